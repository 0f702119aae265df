"""Experts that are quantised."""

from __future__ import annotations

import json
import shutil

import pytest
import quantized_packing as packing
import torch
from quantized_models import Quantized, assert_reads, generate, make_llm
from safetensors.torch import load_file, save_file
from thread_ranks import make_thread_llm
from tiny_models import make_tiny
from transformers import AutoModelForCausalLM

FIELDS = {"hidden_size": 64, "intermediate_size": 96}
THREADS = {"max_model_len": 64, "max_logprobs": -1, "skip_tokenizer_init": True}


def make_gpt_oss(folder) -> Quantized:
    model = make_tiny("gpt_oss", folder, **FIELDS)
    path = folder / "model.safetensors"
    tensors, values = {}, {}
    for name, tensor in load_file(path).items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = tensor
            continue
        own, values[name] = packing.mxfp4_experts(tensor)
        tensors |= {name + end: each.contiguous() for end, each in own.items()}
    assert len(values) == 8
    save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    model.load_state_dict(values, strict=False)
    return Quantized(folder, model)


@pytest.mark.parametrize("ranks", [1, 2])
def test_gpt_oss(ranks, tmp_path):
    quantized = make_gpt_oss(tmp_path)
    llm = make_llm(tmp_path) if ranks == 1 else make_thread_llm(tmp_path, 2, **THREADS)
    assert llm.llm_engine.vllm_config.model_config.quantization == "mxfp4"
    assert_reads(generate(llm), quantized.model)


def test_gpt_oss_with_another_shape(tmp_path):
    make_gpt_oss(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.experts.down_proj"
    save_file(tensors | {f"{name}_scales": tensors[f"{name}_scales"][:, :-1].contiguous()}, path)
    with pytest.raises(ValueError, match=rf"{name}_scales has shape \(4, 63, 3\), expected \(4, 64, 3\)"):
        make_llm(tmp_path)
    halves = {f"{name}{end}": tensors[f"{name}{end}"][:2].contiguous() for end in ("_blocks", "_scales")}
    save_file(tensors | halves, path)
    with pytest.raises(ValueError, match="lacks weights: model.layers.0.mlp.experts.2.down_proj.weight, "):
        make_llm(tmp_path)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", ["mixtral", "mixtral of GPTQModel", "qwen3_moe"])
def test_experts_with_a_matrix_each(family, ranks, tmp_path):
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
    family, _, renamed = family.partition(" of ")
    plain, folder = tmp_path / "plain", tmp_path / "quantised"
    size = {"moe_intermediate_size": 96} if family == "qwen3_moe" else {}
    make_tiny(family, plain, **FIELDS, **size, num_hidden_layers=2)
    shutil.copytree(plain, folder)
    tensors, values = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        tensors[name] = values[name] = tensor
        if ".experts." in name:
            stored = packing.gptq(tensor, group_size=32, sym=False)
            values[name] = stored.value
            del tensors[name]
            tensors |= {f"{name.removesuffix('.weight')}.{own}": each for own, each in stored.tensors.items()}
    assert len(tensors) > len(values)
    if renamed:
        usual = {"block_sparse_moe": "mlp", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
        tensors = {".".join(usual.get(part, part) for part in name.split(".")): each for name, each in tensors.items()}
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    model = AutoModelForCausalLM.from_pretrained(plain, attn_implementation="eager", dtype="float32")
    llm = make_llm(folder) if ranks == 1 else make_thread_llm(folder, 2, **THREADS)
    assert_reads(generate(llm), model)


def test_an_expert_of_another_shape(tmp_path):
    folder, _ = make_stacked_scales(tmp_path)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.experts.{}.down_proj.weight"
    own = tensors[name.format(1)]
    other = name.format(1)
    save_file(tensors | {other: own[:40].contiguous()}, path)
    with pytest.raises(ValueError, match=rf"{folder.name}.*{other} has shape \(40, 96\), .* means \(64, 96\)"):
        make_llm(folder)


def make_stacked_scales(tmp_path, height=32):
    """Blocks of `height` rows of a gate and the up below it, and 32 columns. As transformers saves its FP8 mixtures:
    scales of all experts in stacks. Returns the folder and the model."""
    plain, folder = tmp_path / "plain", tmp_path / "quantised"
    make_tiny("qwen3_moe", plain, **FIELDS, moe_intermediate_size=96, num_hidden_layers=2)
    shutil.copytree(plain, folder)
    tensors, values, scales = {}, {}, {}
    for name, tensor in sorted(load_file(plain / "model.safetensors").items()):
        tensors[name] = values[name] = tensor
    for name in [name for name in tensors if name.endswith(("down_proj.weight", "gate_proj.weight"))]:
        if ".experts." not in name:
            continue
        stem, part, _ = name.rsplit(".", 2)
        names = [name] if part == "down_proj" else [name, f"{stem}.up_proj.weight"]
        stored = packing.fp8(torch.cat([tensors[each] for each in names]), block=(height, 32))
        for each, codes, value in zip(
            names, stored.tensors["weight"].chunk(len(names)), stored.value.chunk(len(names)), strict=True
        ):
            tensors[each], values[each] = codes.clone(), value
        stack = f"{stem.rpartition('.')[0]}.{'down_proj' if len(names) == 1 else 'gate_up_proj'}_scale_inv"
        scales.setdefault(stack, []).append(stored.tensors["weight_scale_inv"])
    tensors |= {name: torch.stack(each) for name, each in scales.items()}
    save_file(values, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    settings = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [height, 32]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return folder, AutoModelForCausalLM.from_pretrained(plain, attn_implementation="eager", dtype="float32")


def test_a_block_of_scales_over_the_end_of_the_gate(tmp_path):
    folder, model = make_stacked_scales(tmp_path, height=64)
    scales = load_file(folder / "model.safetensors")["model.layers.0.mlp.experts.gate_up_proj_scale_inv"]
    assert scales.shape == (4, 3, 2)
    assert_reads(generate(make_llm(folder)), model)


def test_scales_of_all_experts_in_a_stack(tmp_path):
    folder, model = make_stacked_scales(tmp_path)
    assert_reads(generate(make_llm(folder)), model)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.mlp.experts.down_proj_scale_inv"
    save_file(tensors | {name: tensors[name][:3].contiguous()}, path)
    with pytest.raises(
        ValueError,
        match=rf"{name} has shape \(3, 2, 3\), expected .* the first is the 4 experts",
    ):
        make_llm(folder)


@pytest.mark.parametrize("writer", ["auto-round:0.16.1", "gptqmodel:7.6.0"])
def test_gpt_oss_with_a_matrix_each(writer, tmp_path):
    """Gates and ups alternate in the model's rows; GPTQModel cuts these in halves."""
    model = make_tiny("gpt_oss", tmp_path, **FIELDS)
    path = tmp_path / "model.safetensors"
    tensors, values = {}, {}
    for name, tensor in load_file(path).items():
        module, _, stack = name.rpartition("experts.")
        if not module:
            tensors[name] = tensor
            continue
        is_bias, stack = stack.endswith("_bias"), stack.removesuffix("_bias")
        rows = tensor if is_bias else tensor.mT
        parts = {"down_proj": slice(None)}
        if stack == "gate_up_proj":
            half = rows.shape[1] // 2
            halves = {"gate_proj": slice(half), "up_proj": slice(half, None)}
            alternating = {"gate_proj": slice(0, None, 2), "up_proj": slice(1, None, 2)}
            parts = halves if writer.startswith("gptqmodel") else alternating
        value = rows.clone()
        for part, own in parts.items():
            for expert, matrix in enumerate(rows[:, own]):
                target = f"{module}experts.{expert}.{part}"
                if is_bias:
                    tensors[f"{target}.bias"] = matrix.clone()
                    continue
                stored = packing.gptq(matrix.contiguous(), group_size=32, sym=True)
                value[expert, own] = stored.value
                tensors |= {f"{target}.{key}": each for key, each in stored.tensors.items()}
        values[name] = value if is_bias else value.mT
    save_file(tensors, path)
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "meta": {"quantizer": [writer]}}
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    model.load_state_dict(values, strict=False)
    assert_reads(generate(make_llm(tmp_path)), model)
