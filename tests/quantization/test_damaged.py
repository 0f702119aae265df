"""Files and settings that cannot be used: an error that names them, before anything is computed."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import quantized_packing as packing
import torch
from quantized_models import make_llm, make_quantized
from safetensors.torch import load_file, save_file
from test_formats import FLOAT4, FLOAT8, INT8, ROWS, compressed, only_blocks

from vllm import LLM
from vllm.config import QUANTIZATIONS
from vllm.models.transformers.weights import CheckpointNames
from vllm.platforms import current_platform
from vllm.quantization import setting_values, stored
from vllm.quantization.settings import find_settings

Q = "model.layers.0.self_attn.q_proj"
BLOCKS = FLOAT8 | {"strategy": "block"}


def make(name: str, folder, change=lambda tensors: None, **settings):
    """ROWS' checkpoint with other tensors, and with other settings."""
    row = ROWS[name]
    make_quantized(folder, only_blocks(row.pack), row.settings | settings, num_hidden_layers=1)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def without(name):
    return lambda tensors: tensors.pop(f"{Q}.{name}")


def with_value(name, index, value):
    def change(tensors):
        tensors[f"{Q}.{name}"][index] = value

    return change


def renamed(name, new):
    return lambda tensors: tensors.update({f"{Q}.{new}": tensors.pop(f"{Q}.{name}")})


def with_byte(name, byte):
    def change(tensors):
        tensors[f"{Q}.{name}"].view(torch.uint8)[3, 2] = byte

    return change


def replaced(name, make_new):
    return lambda tensors: tensors.update({f"{Q}.{name}": make_new(tensors[f"{Q}.{name}"]).contiguous()})


NO_SCALES = r"model.safetensors lacks model.layers.0.self_attn.q_proj.{}: a weight of method '{}' has "


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("gptq-4", without("scales"), NO_SCALES.format("scales", "gptq")),
        ("gptq-4", with_value("scales", 3, math.nan), r"q_proj.scales has a value that is NaN or infinite"),
        ("fp8", with_value("weight_scale", (), math.inf), r"q_proj.weight_scale has a value that is NaN or infinite"),
        ("fp8", replaced("weight", lambda x: x.float()), r"q_proj.weight has dtype float32, expected float8_e4m3fn"),
        ("fp8-block", replaced("weight", lambda x: x.float()), r"q_proj.weight has dtype float32, expected float8"),
        ("fp8", with_byte("weight", 127), r"q_proj.weight has a value that is NaN or infinite"),
        ("mxfp8", with_byte("weight", 255), r"q_proj.weight has a value that is NaN or infinite"),
        ("mxfp4", with_byte("weight_scale", 255), r"q_proj.weight_packed has a scale, .* that is NaN or infinite"),
        (
            "nvfp4",
            with_value("weight_global_scale", 0, math.inf),
            r"weight_global_scale has a value that is NaN",
        ),
        ("nf4", with_value("weight.nested_quant_map", 0, math.nan), r"nested_quant_map has a value that is NaN or inf"),
        ("squeezellm-sparse", with_value("vals", 0, math.nan), r"q_proj.vals has a value that is NaN or infinite"),
        ("gptq-4", without("qweight"), NO_SCALES.format("qweight", "gptq")),
        ("gptq-desc-act", without("g_idx"), r"q_proj.g_idx is missing: .* desc_act=True"),
        ("gptq-4", replaced("scales", lambda x: x[:-1]), r"q_proj.scales has shape \(3, 128\), expected \(4, 128\)"),
        (
            "gptq-4",
            replaced("scales", lambda x: x.to(torch.int32)),
            r"q_proj.scales has dtype int32, expected float16 or",
        ),
        ("gptq-4", replaced("qzeros", lambda x: x[:, 1:]), r"q_proj.qzeros has shape \(4, 15\), expected \(4, 16\)"),
        ("gptq-4", replaced("qweight", lambda x: x[:-4]), r"q_proj.(scales|g_idx) has shape .*, expected"),
        ("gptq-desc-act", with_value("g_idx", 5, 4), r"q_proj.g_idx has values outside of \[0, 4\)"),
        ("gptq-desc-act", with_value("g_idx", 5, -1), r"q_proj.g_idx has values outside of \[0, 4\)"),
        ("gptq-4", with_value("g_idx", 5, 1), r"q_proj.g_idx is not that of groups of 32 inputs.*desc_act=False"),
        ("awq-32", without("qzeros"), NO_SCALES.format("qzeros", "awq")),
        ("awq-32", replaced("qzeros", lambda x: x[1:]), r"q_proj.qzeros has shape \(3, 16\), expected \(4, 16\)"),
        ("squeezellm", replaced("lookup_table", lambda x: x[:, :8]), r"q_proj.lookup_table has shape \(128, 8\)"),
        ("squeezellm-sparse", without("vals"), NO_SCALES.format("vals", "squeezellm")),
        ("squeezellm-sparse", with_value("cols", 0, 128), r"q_proj.cols has values outside of \[0, 128\)"),
        ("squeezellm-sparse", with_value("rows", 3, 9999), r"q_proj.rows does not rise from 0"),
        ("squeezellm-full-rows", with_value("full_row_indices", 0, 128), r"full_row_indices has values outside of"),
        ("packed-4", without("weight_scale"), NO_SCALES.format("weight_scale", "compressed-tensors")),
        ("packed-4-asym", without("weight_zero_point"), NO_SCALES.format("weight_zero_point", "compressed-tensors")),
        ("packed-4", with_value("weight_shape", 1, 64), r"q_proj.weight_packed has 16 words, expected 8 for 64 codes"),
        ("packed-actorder", with_value("weight_g_idx", 0, 9), r"q_proj.weight_g_idx has values outside of \[0, 4\)"),
        ("int8", replaced("weight", lambda x: x.float()), r"q_proj.weight has dtype float32, expected int8"),
        ("int8", without("weight_scale"), r"q_proj.weight has dtype torch.int8, but no scales beside it"),
        (
            "int8",
            replaced("weight", lambda x: x[:, 1:]),
            r"q_proj.weight has shape \(128, 127\), but config.json means \(128, 128\)",
        ),
        ("int8-asym", replaced("weight_zero_point", lambda x: x[:1]), r"zero_point .* expected that of weight_scale"),
        (
            "packed-4-plain-zeros",
            with_value("weight_zero_point", 0, 9),
            r"zero_point has values outside of those of 4 b",
        ),
        ("packed-actorder", without("weight_g_idx"), NO_SCALES.format("weight_g_idx", "compressed-tensors")),
        (
            "mxfp4",
            replaced("weight_packed", lambda x: torch.cat((x, x[:, :1]), 1)),
            r"the tensors of model.layers.0.self_attn.q_proj do not fit each other: scales must be",
        ),
        (
            "modelopt-nvfp4",
            replaced("weight_scale", lambda x: x[:, ::2]),
            r"weight_scale has groups of 32 inputs, but quantization_config has group_size=16",
        ),
        (
            "modelopt-int4-awq",
            replaced("weight_scale", lambda x: x[:, ::2]),
            r"weight_scale has groups of 64 inputs, but quantization_config has group_size=32",
        ),
        ("torchao", without("_weight_zero_point"), NO_SCALES.format("_weight_zero_point", "torchao")),
        ("torchao", replaced("_weight_scale", lambda x: x[::2]), r"_weight_scale has 64 rows, expected 1 or 128"),
        ("nvfp4", without("weight_global_scale"), NO_SCALES.format("weight_global_scale", "compressed-tensors")),
        ("fp8", without("weight_scale"), r"q_proj.weight has dtype torch.float8_e4m3fn, but no scales beside it"),
        ("fp8", replaced("weight_scale", lambda x: torch.ones(3)), r"q_proj.weight_scale has shape \(3,\), expected"),
        (
            "modelopt-int8-smooth",
            replaced("pre_quant_scale", lambda x: x[:9]),
            r"pre_quant_scale has shape \(9,\), expec",
        ),
        (
            "modelopt-int8-smooth",
            with_value("pre_quant_scale", 3, math.inf),
            r"pre_quant_scale has a value that is NaN",
        ),
        ("modelopt-int4-awq", replaced("weight_scale", lambda x: x[:, :3]), r"its columns do not divide 128 inputs"),
        (
            "modelopt-int8-smooth",
            renamed("pre_quant_scale", "weight_scale_2"),
            r"q_proj.weight has dtype int8 and a weig",
        ),
        ("fp8-block", replaced("weight_scale_inv", lambda x: torch.ones(2, 1)), r"weight_scale_inv has shape \(2, 1\)"),
        ("torchao", without("_weight_scale"), NO_SCALES.format("_weight_scale", "torchao")),
        ("torchao", replaced("_weight_scale", lambda x: x[:, :3]), r"q_proj._weight_scale has shape \(128, 3\)"),
        ("torchao", replaced("_weight_qdata", lambda x: x.view(torch.uint8)), r"q_proj._weight_qdata has dtype uint8"),
        ("nf4", without("weight.quant_map"), NO_SCALES.format("weight.quant_map", "bitsandbytes")),
        ("nf4", without("weight.nested_absmax"), NO_SCALES.format("weight.nested_absmax", "bitsandbytes")),
        ("nf4", with_value("weight.quant_state.bitsandbytes__nf4", 0, 0), r"bitsandbytes__nf4 is not the JSON"),
        ("nf4", replaced("weight", lambda x: x[:-1]), r"q_proj.weight has 8191 bytes, expected 8192"),
        ("bitsandbytes-8", without("SCB"), NO_SCALES.format("SCB", "bitsandbytes")),
        ("bitsandbytes-8", replaced("weight_format", lambda x: x + 1), r"q_proj.weight_format is not 0"),
    ],
)
def test_files(name, change, problem, tmp_path):
    make(name, tmp_path, change)
    with pytest.raises(ValueError, match=problem) as error:
        make_llm(tmp_path)
    assert f"{tmp_path.name}/model.safetensors" in str(error.value)


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("gptq-4", {"bits": 5}, r"config.json: quantization_config: bits must be one of 2, 3, 4, 8, got 5"),
        ("gptq-4", {"bits": True}, r"bits must be one of"),
        ("gptq-4", {"group_size": 48}, r"proj.scales has shape .*, expected \(\d, 128\), for group_size=48 in quant"),
        ("awq-32", {"group_size": 48}, r"proj.qweight does not fit .*: group_size=48 does not divide the \d+ inputs"),
        ("gptq-4", {"group_size": 64}, r"proj.scales has shape \(\d, 128\), expected \(\d, 128\)"),
        ("gptq-4", {"group_size": 0}, r"group_size must be -1 or at least 1, got 0"),
        ("gptq-4", {"bits": 8}, r"proj.scales has shape \(\d, 128\), expected \(\d, 128\)"),
        ("gptq-4", {"checkpoint_format": "marlin"}, r"checkpoint_format must be gptq or gptq_v2, got 'marlin'"),
        ("gptq-4", {"dynamic": {".*up_proj": {"bits": 7}}}, r"bits must be one of 2, 3, 4, 8, got 7"),
        ("gptq-4", {"dynamic": {"-:.*q_proj": {}}}, r"q_proj: .*dynamic '-:.*q_proj' excludes it, but it is quantised"),
        ("gptq-4", {"dynamic": {"+:re[": {"bits": 4}}}, r"dynamic: 're\[' is not a regular expression"),
        ("gptq-4", {"dynamic": {".*": 4}}, r"dynamic must be an object of objects, got"),
        ("gptq-4", {"desc_act": "yes"}, r"desc_act must be true or false, got 'yes'"),
        ("gptq-4", {"adapter": {"rank": 8}}, r"adapter is not implemented"),
        ("gptq-4", {"checkpoint_format": ["gptq"]}, r"checkpoint_format must be gptq or gptq_v2, got \['gptq'\]"),
        ("gptq-4", {"is_marlin_format": True}, r"is_marlin_format must be false"),
        ("gptq-4", {"rotation": "hadamard"}, r"rotation is not implemented, got 'hadamard': inputs of some weights"),
        ("gptq-4", {"rotation": "none", "meta": {"rotation": "random"}}, r"rotation is not implemented, got 'random'"),
        ("gptq-4", {"dynamic": [4]}, r"dynamic must be an object of objects"),
        (
            "gptq-4",
            {"quant_method": "int8"},
            r"quant_method 'int8', which is what quantization='int8' does to unq.*; a",
        ),
        ("gptq-4", {"quant_method": "unheard"}, r"quant_method 'unheard': quantization must be one of"),
        ("gptq-4", {"quant_method": "hqq"}, r"quant_method 'hqq': quantization='hqq' is not implemented: use a GPTQ"),
        ("gptq-4", {"quant_method": "awq"}, r"proj.scales has shape"),
        (
            "auto-round",
            {"packing_format": "auto_round:marlin"},
            r"packing_format must be one of auto_round:auto_gptq",
        ),
        (
            "auto-round-early",
            {"backend": "auto_round:awq:marlin"},
            r"backend must be one of auto_round:auto_gptq.*, got 'auto_round:awq:marlin'",
        ),
        ("auto-round-early", {"backend": "gptq:marlin"}, r"backend must be one of .*, got 'gptq:marlin'"),
        ("auto-round-mxfp4", {"data_type": "int"}, r"data_type must be one of nv_fp of 4 bits.*, got int of 4"),
        ("torchao", {"quant_type": "int4_weight_only"}, r"quant_type must be one of .*, got 'int4_weight_only'"),
        (
            "torchao",
            {"quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {}}}},
            r"quant_type must be one of .*, got 'Int4WeightOnlyConfig': quantise the model with one of these",
        ),
        ("auto-round", {"data_type": "mx_fp"}, r"data_type must be int"),
        ("auto-round", {"extra_config": {".*up_proj": {"bits": 16}}}, r"up_proj: .* excludes it, but it is quantised"),
        ("auto-round", {"extra_config": {"model.layers.0.mlp.up_proj": {"bits": 5}}}, r"bits must be one of .*got 5"),
        ("awq-32", {"bits": 8}, r"bits must be 4, got 8"),
        ("awq-32", {"version": "gemv"}, r"version must be gemm, got 'gemv'"),
        ("awq-32", {"version": None, "format": "gemv_fast"}, r"format must be gemm, got 'gemv_fast'"),
        ("awq-32", {"w_bit": 8}, r"bits=4 and w_bit=8 are one setting"),
        ("awq-32", {"q_group_size": 64}, r"group_size=32 and q_group_size=64 are one setting"),
        ("squeezellm", {"bits": 3}, r"wbits=4 and bits=3 are one setting"),
        ("auto-round-mxfp4", {"hadamard_config": {"block": 32}}, r"hadamard_config is not implemented"),
        ("torchao", {"quant_type": {}}, r"quant_type must be one of .*, got \{\}"),
        ("packed-4", {"kv_cache_scheme": "fp8"}, r"kv_cache_scheme must be an object, got 'fp8'"),
        ("packed-4", {"sparsity_config": True}, r"sparsity_config is not implemented, got True"),
        ("packed-4", {"format": ["dense"]}, r"group_0: format must be one of pack-quantized.*got \['dense'\]"),
        ("squeezellm", {"wbits": 2}, r"wbits must be one of 3, 4, got 2"),
        ("packed-4", {"kv_cache_scheme": {"num_bits": 8}}, r"kv_cache_scheme is not implemented"),
        ("packed-4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, r"sparsity_config is not implemented"),
        ("packed-4", {"transform_config": {"config_groups": {"u": {}}}}, r"transform_config is not implemented"),
        ("packed-4", {"format": "marlin-24"}, r"group_0: format must be one of pack-quantized.*got 'marlin-24'"),
        ("packed-4", {"ignore": "lm_head"}, r"ignore must be a list of names, got 'lm_head'"),
        ("packed-4", {"ignore": ["re:["]}, r"ignore: '\[' is not a regular expression"),
        ("packed-4", {"config_groups": {"W4A16": ["Linear"]}}, r"W4A16: must be an object with targets and weights"),
        ("packed-4", {"config_groups": {}}, r"config_groups must name at least one group"),
        ("packed-4", {"ignore": ["re:.*q_proj"]}, r"q_proj: quantization_config ignores it .* but it is quantised"),
        ("packed-4", {"format": "float-quantized"}, r"weights of format float-quantized cannot be of type 'int'"),
        ("fp8", {"activation_scheme": "guess"}, r"activation_scheme must be dynamic or static, got 'guess'"),
        ("modelopt-fp8", {"quant_algo": "NVFP4_SVD"}, r"quant_algo must be one of FP8, .*, got 'NVFP4_SVD'"),
        (
            "modelopt-fp8",
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a": {"quant_algo": "INT8"}}},
            r"quantized_layers: a must be one of .*, got 'INT8'",
        ),
        ("modelopt-fp8", {"kv_cache_quant_algo": "NVFP4"}, r"kv_cache_quant_algo is not implemented with 'NVFP4'"),
        ("fp8-block", {"weight_block_size": [128]}, r"weight_block_size must be two sizes, got \[128\]"),
    ],
)
def test_settings(name, settings, problem, tmp_path):
    make(name, tmp_path, **settings)
    with pytest.raises(ValueError, match=problem) as error:
        make_llm(tmp_path)
    assert tmp_path.name in str(error.value)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (compressed(None, INT8 | {"strategy": "token"}, format="int-quantized"), r"strategy must be tensor, channel"),
        (compressed(None, INT8 | {"dynamic": True}, format="int-quantized"), r"weights must not be dynamic"),
        (compressed(None, INT8 | {"actorder": "up"}, format="int-quantized"), r"actorder must be one of None, .* 'up'"),
        (compressed(None, INT8 | {"symmetric": "no"}, format="int-quantized"), r"symmetric must be true or false"),
        (compressed(None, FLOAT8 | {"strategy": "block"}, format="float-quantized"), r"block_structure must be two"),
        (compressed(None, BLOCKS | {"block_structure": "128"}, format="float-quantized"), r"two sizes, got '128'"),
        (compressed(None, BLOCKS | {"block_structure": [128, 0]}, format="float-quantized"), r"sizes, got \[128, 0\]"),
        (compressed(None, FLOAT4 | {"strategy": "group"}, format="mxfp4-pack-quantized"), r"group_size must be at"),
    ],
)
def test_schemes(row, problem, tmp_path):
    make("packed-4", tmp_path, **row.settings)
    with pytest.raises(ValueError, match=problem):
        make_llm(tmp_path)


def test_settings_that_nothing_knows(tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(setting_values, "warn_once", lambda _, text, *args: said.append(text % args))
    make("gptq-4", tmp_path, sym=None, damp_percent=0.1, meta={"quantizer": "gptqmodel"}, twist=2, bend=None)
    make_llm(tmp_path)
    where = f"{tmp_path.name}/config.json: quantization_config"
    assert set(said) == {f"{where} has settings that are not known here and have no effect: twist"}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(("gptq-4", {"rotation": value}) for value in ("none", None, False, {})),
        ("packed-4", {"transform_config": {"config_groups": {}}}),
        ("awq-32", {"q_group_size": None}),
    ],
)
def test_settings_that_ask_for_nothing(name, settings, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(setting_values, "warn_once", lambda _, text, *args: said.append(text % args))
    make(name, tmp_path, **settings)
    make_llm(tmp_path)
    assert said == []


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("DefaultCPUAllocator: can't allocate memory: x")],
)
def test_memory_that_ends_is_no_damage(error):
    def read(_):
        raise error

    with pytest.raises(type(error), match="memory") as caught:
        stored._read("m.weight", read, stored.StoredTensors("file", "m"))
    assert caught.value is error
    part, converter = (
        ("a", "p", torch.ones(1)),
        SimpleNamespace(add_tensor=lambda *_: None, convert=lambda *_, **__: read(None)),
    )
    names = object.__new__(CheckpointNames)
    names._by_pattern, names._model = {"p": converter}, SimpleNamespace(config=None)
    with pytest.raises(type(error)) as caught:
        list(names._merge_tensors("b", [part]))
    assert str(caught.value) == str(error)


def test_load_format_of_bitsandbytes(tmp_path):
    make("nf4", tmp_path)
    config = make_llm(tmp_path, quantization="bitsandbytes", load_format="bitsandbytes").llm_engine.vllm_config
    assert (config.model_config.quantization, config.model_config.load_format) == ("bitsandbytes", "auto")


@pytest.mark.parametrize("name", ["nf4", "squeezellm", "torchao", "modelopt-fp8"])
def test_every_format_knows_its_settings(name, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(setting_values, "warn_once", lambda _, text, *args: said.append(text % args))
    make(name, tmp_path)
    make_llm(tmp_path)
    assert said == []
    make(name, tmp_path, twist=2)
    make_llm(tmp_path)
    assert len(set(said)) == 1
    assert said[0].endswith("quantization_config has settings that are not known here and have no effect: twist")


def test_settings_without_quantised_weights(tmp_path):
    make_quantized(tmp_path, only_blocks(packing.awq), {})
    path = tmp_path / "model.safetensors"
    plain = {name: tensor for name, tensor in load_file(path).items() if name.rpartition(".")[2] == "weight"}
    save_file(plain, path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": ROWS["gptq-4"].settings}))
    with pytest.raises(ValueError, match="has no quantised weight, but its quantization_config is of method 'gptq'"):
        make_llm(tmp_path)
    with pytest.raises(ValueError, match="load_format='dummy' makes up plain weights only"):
        make_llm(tmp_path, load_format="dummy")


def test_what_is_asked_for_must_agree(tmp_path):
    make("gptq-4", tmp_path)
    for name in ("gptq", "gptq_marlin", "gptq_bitblas", "auto_gptq"):
        assert make_llm(tmp_path, quantization=name).llm_engine.vllm_config.model_config.quantization == "gptq"
    for name in ("awq", "awq_marlin", "fp8", "int8", "compressed-tensors", "gguf"):
        with pytest.raises(ValueError, match="config.json: quantization_config has quant_method 'gptq'"):
            make_llm(tmp_path, quantization=name)
    assert make_llm(tmp_path, quantization="GPTQ").llm_engine.vllm_config.model_config.quantization == "gptq"
    for name in ("awq_marlin", "auto_awq"):
        with pytest.raises(ValueError, match=f"quantization='{name}', but"):
            make_llm(tmp_path, quantization=name)
    with pytest.raises(ValueError, match="load_format='bitsandbytes', but the model is no checkpoint of bitsandbytes"):
        make_llm(tmp_path, load_format="bitsandbytes")
    with pytest.raises(ValueError, match="hf_overrides must be a dict of entries that replace .*, got a list"):
        make_llm(tmp_path, hf_overrides=["config"])
    for name in ("hqq", "quark", "quanto", "unheard"):
        with pytest.raises(ValueError, match=f"quantization.*'{name}'.*: use a GPTQ, AWQ"):
            LLM(str(tmp_path), quantization=name)


def test_where_the_settings_are(tmp_path):
    make("gptq-4", tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    settings = config.pop("quantization_config")
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"has .*qweight in place of .*weight, .* has no quantization_config"):
        make_llm(tmp_path)
    with pytest.raises(ValueError, match="quantization='gptq', but .*config.json has no quantization_config"):
        make_llm(tmp_path, quantization="gptq")
    for where, content in {
        "quantize_config.json": {name: settings[name] for name in ("bits", "group_size", "desc_act", "sym")},
        "quant_config.json": settings,
    }.items():
        (tmp_path / where).write_text(json.dumps(content))
        assert make_llm(tmp_path).llm_engine.vllm_config.model_config.quantization == "gptq"
        (tmp_path / where).unlink()
    path.write_text(json.dumps(config | {"compression_config": settings}))
    assert make_llm(tmp_path).llm_engine.vllm_config.model_config.quantization == "gptq"
    assert find_settings(tmp_path, {"text_config": {"quantization_config": settings}}).method == "gptq"
    (tmp_path / "quantize_config.json").write_text("{")
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="quantize_config.json is not JSON"):
        make_llm(tmp_path)


def test_platforms_know_what_is_supported():
    assert set(current_platform.supported_quantization) == set(QUANTIZATIONS) - {None}
