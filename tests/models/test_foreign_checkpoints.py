"""Checkpoints as they were published, where names, layouts or options differ from what transformers writes today: the
same weights under both must give the same logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, fill_weights, make_architecture
from models_util import hf_logits, load_model, paged_logits, random_prompts
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm.config.checkpoint.config import load_hf_config
from vllm.config.checkpoint.text_part import text_part
from vllm.loader import resolve_model
from vllm.models.registry import resolve_model_class

Weights = dict[str, Tensor]


def publish(folder: Path, model: Any, rename: Callable[[str, Tensor, Weights], Weights], **config: Any) -> None:
    """Replace the folder's weights by renamed ones, and its config by `config`, which inherits nothing if it has a
    model type."""
    weights: Weights = {}
    source = model.state_dict()
    for name, tensor in source.items():
        weights |= {new: value.contiguous().clone() for new, value in rename(name, tensor, source).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(config if "model_type" in config else json.loads(path.read_text()) | config))


def check(folder: Path, model: Any) -> None:
    ours, config = load_model(folder, max_model_len=128)
    prompts = random_prompts(131, (1, 5, 37))
    config = resolve_model_class(config.architectures).resolve_config(config)
    for got, want in zip(paged_logits(ours, config, prompts, 7), hf_logits(model, prompts), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=2e-4)


def test_gpt2_without_prefix_and_with_masks(tmp_path: Path) -> None:
    model = make_architecture("gpt2", tmp_path)

    def rename(name: str, tensor: Tensor, _: Weights) -> Weights:
        if name == "lm_head.weight":
            return {}
        new = {name.removeprefix("transformer."): tensor}
        if name.endswith("attn.c_attn.bias"):
            block = name.removeprefix("transformer.").removesuffix("c_attn.bias")
            new |= {block + "bias": torch.ones(1, 1, 8, 8), block + "masked_bias": torch.tensor(-1e4)}
        return new

    publish(tmp_path, model, rename, n_ctx=128)
    check(tmp_path, model)


@pytest.mark.parametrize("name", ["falcon", "falcon-7b", "falcon-rw"])
def test_falcon_under_its_first_name_and_options(name: str, tmp_path: Path) -> None:
    model = make_architecture(name, tmp_path)
    config = model.config
    older: dict[str, Any] = {
        "architectures": ["RWForCausalLM"],
        "model_type": "RefinedWeb" if name == "falcon" else "RefinedWebModel",
        "alibi": config.alibi,
        "apply_residual_connection_post_layernorm": False,
        "attention_dropout": 0.0,
        "bias": config.bias,
        "hidden_size": 32,
        "layer_norm_epsilon": 1e-5,
        "multi_query": config.multi_query,
        "n_head": 4,
        "n_layer": 4,
        "parallel_attn": config.parallel_attn,
        "vocab_size": 131,
    }
    if name == "falcon":
        older["n_head_kv"] = 2
    publish(tmp_path, model, lambda name, tensor, _: {name: tensor}, **older)
    check(tmp_path, model)


def test_bloom_without_prefix(tmp_path: Path) -> None:
    model = make_architecture("bloom", tmp_path)
    publish(tmp_path, model, lambda name, tensor, _: {name.removeprefix("transformer."): tensor}, seq_length=128)
    check(tmp_path, model)


def test_gpt_neox_with_masks(tmp_path: Path) -> None:
    model = make_architecture("gpt_neox", tmp_path)

    def rename(name: str, tensor: Tensor, _: Weights) -> Weights:
        new = {name: tensor}
        if name.endswith("attention.dense.bias"):
            block = name.removesuffix("dense.bias")
            new |= {block + "bias": torch.ones(1, 1, 8, 8, dtype=torch.bool), block + "masked_bias": torch.tensor(-1e4)}
            new[block + "rotary_emb.inv_freq"] = torch.ones(4)
        return new

    older = {"rotary_pct": 0.5, "rotary_emb_base": 10000, "rope_parameters": None}
    publish(tmp_path, model, rename, **older)
    check(tmp_path, model)


def llama_config(model_type: str, architecture: str, **fields: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    names = {"architectures": [architecture], "model_type": model_type, "vocab_size": 131, "hidden_act": "silu"}
    return names | sizes | {"rms_norm_eps": 1e-6, "max_position_embeddings": 128, "tie_word_embeddings": False} | fields


def make_llama(folder: Path, **fields: Any) -> Any:
    return make_architecture("llama", folder, attention_bias=False, mlp_bias=False, head_dim=8, **fields)


def test_baichuan_w_pack(tmp_path: Path) -> None:
    model = make_llama(tmp_path, num_key_value_heads=4)

    def rename(name: str, tensor: Tensor, source: Weights) -> Weights:
        if "q_proj" in name:
            keys, values = (source[name.replace("q_proj", other)] for other in ("k_proj", "v_proj"))
            return {name.replace("q_proj", "W_pack"): torch.cat((tensor, keys, values))}
        return {} if "k_proj" in name or "v_proj" in name else {name: tensor}

    # rope_theta says that it is the kind with rotary positions, whatever the width.
    fields = {"model_max_length": 128, "z_loss_weight": 0, "rope_theta": 10000.0, "_from_model_config": True}
    publish(tmp_path, model, rename, **llama_config("baichuan", "BaichuanForCausalLM", **fields))
    check(tmp_path, model)


def test_internlm2_wqkv(tmp_path: Path) -> None:
    model = make_llama(tmp_path, num_key_value_heads=2)
    names = {
        "model.embed_tokens": "model.tok_embeddings",
        "lm_head": "output",
        "self_attn.o_proj": "attention.wo",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
    }

    def rename(name: str, tensor: Tensor, source: Weights) -> Weights:
        if "q_proj" in name:
            # For each of the two key heads: its two queries, the key, the value, of 8 rows each.
            queries = tensor.view(2, 16, 32)
            keys, values = (source[name.replace("q_proj", other)].view(2, 8, 32) for other in ("k_proj", "v_proj"))
            return {
                name.replace("self_attn.q_proj", "attention.wqkv"): torch.cat((queries, keys, values), 1).flatten(0, 1)
            }
        if "k_proj" in name or "v_proj" in name:
            return {}
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        return {name: tensor}

    fields = {"num_key_value_heads": 2, "bias": False, "rope_theta": 10000.0, "attn_implementation": "eager"}
    publish(tmp_path, model, rename, **llama_config("internlm2", "InternLM2ForCausalLM", **fields))
    check(tmp_path, model)


def test_minicpm_scales(tmp_path: Path) -> None:
    scales = {"embedding_multiplier": 12.0, "residual_multiplier": 0.7, "logits_scaling": 2.0}
    model = make_architecture("granite", tmp_path, attention_multiplier=8**-0.5, rms_norm_eps=1e-6, **scales)
    fields = {"num_key_value_heads": 2, "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}
    publish(
        tmp_path,
        model,
        lambda name, tensor, _: {name: tensor},
        **llama_config("minicpm", "MiniCPMForCausalLM", **fields),
    )
    check(tmp_path, model)


@pytest.mark.parametrize("architecture", ["ChatGLMModel", "ChatGLMForConditionalGeneration"])
def test_chatglm(architecture: str, tmp_path: Path) -> None:
    model = make_architecture("glm", tmp_path, rms_norm_eps=1e-5, attention_bias=True)
    names = {
        "model.embed_tokens": "transformer.embedding.word_embeddings",
        "model.norm": "transformer.encoder.final_layernorm",
        "model.layers": "transformer.encoder.layers",
        "lm_head": "transformer.output_layer",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.gate_up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    }

    def rename(name: str, tensor: Tensor, source: Weights) -> Weights:
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        if "q_proj" in name:
            stem = name.replace("transformer.encoder", "model")
            keys, values = (source[stem.replace("q_proj", other)] for other in ("k_proj", "v_proj"))
            return {
                name.replace("self_attn.q_proj", "self_attention.query_key_value"): torch.cat((tensor, keys, values))
            }
        return {} if "k_proj" in name or "v_proj" in name else {name: tensor}

    config = {
        "architectures": [architecture],
        "model_type": "chatglm",
        "add_bias_linear": False,
        "add_qkv_bias": True,
        "apply_query_key_layer_scaling": True,
        "apply_residual_connection_post_layernorm": False,
        "attention_softmax_in_fp32": True,
        "bias_dropout_fusion": True,
        "ffn_hidden_size": 48,
        "fp32_residual_connection": False,
        "hidden_size": 32,
        "kv_channels": 8,
        "layernorm_epsilon": 1e-5,
        "multi_query_attention": True,
        "multi_query_group_num": 2,
        "num_attention_heads": 4,
        "num_layers": 4,
        "original_rope": True,
        "padded_vocab_size": 131,
        "post_layer_norm": True,
        "rmsnorm": True,
        "seq_length": 128,
        "use_cache": True,
    }
    publish(tmp_path, model, rename, **config)
    check(tmp_path, model)
    resolved = resolve_model_class([architecture]).resolve_config(load_hf_config(tmp_path))
    assert (resolved.num_key_value_heads, resolved.head_dim, resolved.max_context_len) == (2, 8, 128)


def make_reader_of_images(folder: Path) -> Any:
    """A Gemma 3 that reads images, too, whose text_config leaves much out."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = ARCHITECTURES["gemma3"][1] | {"vocab_size": 131}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4}
    config = Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=1, attn_implementation="eager")
    model = Gemma3ForConditionalGeneration(config).eval()
    fill_weights(model, 0)
    model.save_pretrained(folder)
    path = folder / "config.json"
    whole = json.loads(path.read_text())
    # As published: sizes are defaults, and rope_scaling stands for what layers without a window have.
    sparse = {name: whole["text_config"][name] for name in text} | {"model_type": "gemma3_text"}
    path.write_text(json.dumps(whole | {"text_config": sparse}))
    return model


def test_the_text_decoder_of_a_model_that_reads_images(tmp_path: Path) -> None:
    model = make_reader_of_images(tmp_path)
    check(tmp_path, model)
    resolved = resolve_model(str(tmp_path))
    assert resolved.hf_config.architectures == ("Gemma3ForCausalLM",) and resolved.hf_config.max_context_len == 131072
    overrides = {"text_config": {"sliding_window": 5}, "rms_norm_eps": 0.25}
    raw = resolve_model(str(tmp_path), hf_overrides=overrides).hf_config.raw
    assert (raw["sliding_window"], raw["rms_norm_eps"]) == (5, 0.25)
    ours, _ = load_model(tmp_path, max_model_len=64, model_impl="transformers")
    assert type(ours).__name__ == "TransformersForCausalLM"

    def rename(name: str, tensor: Tensor, _: Weights) -> Weights:
        return {name.replace("model.language_model.", "language_model.model.").removeprefix("model."): tensor}

    publish(tmp_path, model, rename)
    check(tmp_path, model)


def test_a_text_decoder_has_the_head_of_the_whole_model() -> None:
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"tie_word_embeddings": False}}
    assert text_part(whole)["architectures"] == ["MistralForCausalLM"]
    assert text_part(whole)["tie_word_embeddings"] is False
    assert text_part(whole | {"tie_word_embeddings": True})["tie_word_embeddings"] is True
    whole["text_config"] = {"model_type": "nobodys"}
    assert text_part(whole) is whole


def test_a_fused_weight_of_another_shape_is_named(tmp_path: Path) -> None:
    make_architecture("phi3", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.self_attn.qkv_proj.weight"
    save_file(
        weights | {name: weights[name][:-1].contiguous()}, tmp_path / "model.safetensors", metadata={"format": "pt"}
    )
    with pytest.raises(ValueError, match=rf"{tmp_path.name}/model.safetensors: weight {name} has shape \(63, 32\)"):
        load_model(tmp_path)


def test_baichuan_2_heads_have_rows_of_unit_length() -> None:
    from vllm.models.dense.baichuan import BaichuanForCausalLM, unit_rows

    fields = llama_config("baichuan", "BaichuanForCausalLM", model_max_length=64, hidden_size=5120)
    fields |= {
        "num_attention_heads": 40,
        "intermediate_size": 100,
        "vocab_size": 125696,
        "max_position_embeddings": None,
    }
    from vllm.config.checkpoint.config import parse_hf_config

    spec = BaichuanForCausalLM.spec_of(parse_hf_config(fields, {}))
    slopes = spec.layers[0].alibi_slopes
    # 40 heads have the slopes of 32, and every other one of 64.
    assert slopes is not None and slopes[31] == 2**-8 and slopes[32] == 2**-0.125 and len(slopes) == 40
    ((_, head),) = unit_rows("lm_head.weight", torch.randn(6, 8), spec)
    torch.testing.assert_close(head.norm(dim=1), torch.ones(6))
