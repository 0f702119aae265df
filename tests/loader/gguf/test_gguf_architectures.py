"""GGUF files of every architecture, laid out as llama.cpp's converter lays them out, against the models they were made
from. The names are the gguf library's own table; what the converter does to weights and header is written here."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from models_util import hf_logits, paged_logits, random_prompts
from torch import Tensor

from vllm.config import ModelConfig
from vllm.loader import get_model, resolve_model
from vllm.loader.gguf.convert import weights
from vllm.loader.gguf.file import GGUFFile

LAYERS, HEADS, GROUPS, WIDTH, SIZE, VOCAB = 7, 4, 2, 16, 64, 96
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": SIZE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
OLD = {"vocab_size": VOCAB, "n_embd": SIZE, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 128}
OLD |= {"bos_token_id": 0, "eos_token_id": 1}
FALCON = {name: COMMON[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}
FALCON |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
Header = dict[str, Any]


def rope(theta: float = 20000.0, partial: float | None = None) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    return {"rope_parameters": parameters | ({} if partial is None else {"partial_rotary_factor": partial})}


def neighbours(name: str, value: Tensor, config: Any) -> Tensor:
    """The rows that rotate together, side by side."""
    if not name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):
        return value
    heads = HEADS if "q_proj" in name else GROUPS
    return value.reshape(heads, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)


def plus_one(name: str, value: Tensor, config: Any) -> Tensor:
    return value + 1 if name.endswith("norm.weight") else value


def queries_first(name: str, value: Tensor, config: Any) -> Tensor:
    if "query_key_value" not in name:
        return value
    return value.reshape(HEADS, 3, WIDTH, *value.shape[1:]).transpose(0, 1).reshape(value.shape)


def groups_apart(name: str, value: Tensor, config: Any) -> Tensor:
    if "query_key_value" not in name:
        return value
    groups = config.num_kv_heads if config.new_decoder_architecture else 1
    grouped = value.reshape(groups, -1, WIDTH, *value.shape[1:])
    return torch.cat([part.flatten(0, 2) for part in (grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:])])


def linear_layout(name: str, value: Tensor, config: Any) -> Tensor:
    is_conv1d = name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    return value.T.contiguous() if is_conv1d else value


def taps(name: str, value: Tensor, config: Any) -> Tensor:
    return value.squeeze(1) if name.endswith("conv.conv.weight") else value


MODERN = COMMON | rope() | {"head_dim": WIDTH}
# GGUF's name: transformers' class, its options, what the header has beside the usual, what happens to the weights.
Case = tuple[str, str, dict[str, Any], Header, Callable[[str, Tensor, Any], Tensor] | None]
WINDOW = {"attention.sliding_window": 8}
CONVS = ["conv", "conv", "full_attention", "conv", "full_attention", "conv", "conv"]
CASES: dict[str, Case] = {
    "qwen2": ("qwen2", "Qwen2ForCausalLM", COMMON | rope(), {}, None),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", MODERN, {}, None),
    "granite": (
        "granite",
        "GraniteForCausalLM",
        COMMON
        | rope()
        | {"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 4.0},
        {"attention.scale": 0.2, "embedding_scale": 3.0, "residual_scale": 0.5, "logit_scale": 4.0},
        neighbours,
    ),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM", COMMON | rope(), {}, neighbours),
    "arcee": ("arcee", "ArceeForCausalLM", COMMON | rope() | {"head_dim": WIDTH}, {}, neighbours),
    "seed_oss": ("seed_oss", "SeedOssForCausalLM", MODERN, {}, None),
    "ernie4_5": ("ernie4_5", "Ernie4_5ForCausalLM", MODERN, {}, None),
    "hunyuan": ("hunyuan-dense", "HunYuanDenseV1ForCausalLM", MODERN, {}, None),
    "gemma": ("gemma", "GemmaForCausalLM", COMMON | rope() | {"head_dim": WIDTH}, {}, plus_one),
    "gemma2": (
        "gemma2",
        "Gemma2ForCausalLM",
        COMMON | rope() | {"head_dim": WIDTH, "query_pre_attn_scalar": WIDTH, "sliding_window": 8},
        WINDOW | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        plus_one,
    ),
    "gemma3": (
        "gemma3",
        "Gemma3ForCausalLM",
        COMMON | {"head_dim": WIDTH, "query_pre_attn_scalar": WIDTH, "sliding_window": 8},
        WINDOW | {"rope.freq_base": 1e6},
        plus_one,
    ),
    "phi2": (
        "phi2",
        "PhiForCausalLM",
        COMMON | rope(10000.0, 0.5) | {"num_key_value_heads": HEADS},
        {"rope.dimension_count": WIDTH // 2},
        None,
    ),
    "phi3": (
        "phi3",
        "Phi3ForCausalLM",
        COMMON | rope() | {"sliding_window": None, "original_max_position_embeddings": 128},
        {"attention.sliding_window": 0, "rope.dimension_count": WIDTH, "rope.scaling.original_context_length": 128},
        None,
    ),
    "gpt2": ("gpt2", "GPT2LMHeadModel", OLD, {}, linear_layout),
    "starcoder": ("starcoder", "GPTBigCodeForCausalLM", OLD, {"attention.head_count_kv": 1}, None),
    "gptneox": (
        "gptneox",
        "GPTNeoXForCausalLM",
        COMMON | rope(10000.0, 0.25),
        {"rope.dimension_count": WIDTH // 4, "use_parallel_residual": True},
        queries_first,
    ),
    "bloom": (
        "bloom",
        "BloomForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": SIZE, "n_layer": LAYERS, "n_head": HEADS, "pad_token_id": None},
        {"attention.head_count_kv": HEADS},
        queries_first,
    ),
    "mpt": (
        "mpt",
        "MptForCausalLM",
        {"vocab_size": VOCAB, "d_model": SIZE, "n_layers": LAYERS, "n_heads": HEADS, "max_seq_len": 128},
        {"attention.max_alibi_bias": 8.0},
        None,
    ),
    "falcon-7b": (
        "falcon",
        "FalconForCausalLM",
        FALCON | {"multi_query": True, "new_decoder_architecture": False},
        {"attention.head_count_kv": 1},
        groups_apart,
    ),
    "falcon-40b": (
        "falcon",
        "FalconForCausalLM",
        FALCON | {"num_kv_heads": GROUPS, "new_decoder_architecture": True},
        {},
        groups_apart,
    ),
    "falcon2-11b": (
        "falcon",
        "FalconForCausalLM",
        FALCON | {"num_kv_heads": GROUPS, "new_decoder_architecture": True, "num_ln_in_parallel_attn": 1},
        {},
        groups_apart,
    ),
    "starcoder2": ("starcoder2", "Starcoder2ForCausalLM", COMMON | rope() | {"sliding_window": None}, {}, None),
    "stablelm": (
        "stablelm",
        "StableLmForCausalLM",
        COMMON | rope(10000.0, 0.5) | {"use_qkv_bias": True},
        {"rope.dimension_count": WIDTH // 2, "use_parallel_residual": False},
        None,
    ),
    "stablelm-12b": (
        "stablelm",
        "StableLmForCausalLM",
        COMMON | rope(10000.0, 0.25) | {"qk_layernorm": True, "use_parallel_residual": True},
        {"rope.dimension_count": WIDTH // 4, "use_parallel_residual": True},
        None,
    ),
    "olmo": ("olmo", "OlmoForCausalLM", COMMON | rope() | {"clip_qkv": 0.5}, {"attention.clamp_kqv": 0.5}, neighbours),
    "olmo2": ("olmo2", "Olmo2ForCausalLM", COMMON | rope(), {}, None),
    "command-r": (
        "command-r",
        "CohereForCausalLM",
        COMMON | rope() | {"use_qk_norm": True},
        {"logit_scale": 0.0625},
        None,
    ),
    "cohere2": (
        "cohere2",
        "Cohere2ForCausalLM",
        COMMON | rope() | {"sliding_window": 8},
        WINDOW | {"logit_scale": 0.0625},
        None,
    ),
    "glm4": (
        "glm4",
        "Glm4ForCausalLM",
        COMMON | rope(10000.0, 0.5) | {"head_dim": WIDTH, "attention_bias": True},
        {"rope.dimension_count": WIDTH // 2},
        None,
    ),
    "glm": (
        "chatglm",
        "GlmForCausalLM",
        COMMON | rope(10000.0, 0.5) | {"head_dim": WIDTH, "attention_bias": True},
        {"rope.dimension_count": WIDTH // 2},
        None,
    ),
    "exaone4": (
        "exaone4",
        "Exaone4ForCausalLM",
        COMMON | rope() | {"head_dim": WIDTH, "sliding_window": 8, "sliding_window_pattern": 4},
        WINDOW,
        None,
    ),
    "nemotron": (
        "nemotron",
        "NemotronForCausalLM",
        COMMON | rope(10000.0, 0.5) | {"head_dim": WIDTH},
        {"rope.dimension_count": WIDTH // 2},
        plus_one,
    ),
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 20000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
YARN_HEADER = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 8,
    "rope.scaling.yarn_beta_fast": 4.0,
    "rope.scaling.yarn_beta_slow": 1.0,
}
SLIDES = [True, False, True, False, True, True, False]
KINDS = ["sliding_attention" if slides else "full_attention" for slides in SLIDES]
# Gemma 4's, which GGUF's table does not have.
SCALES = {"scale": "ffn_gate_inp.scale", "per_expert_scale": "ffn_down_exps.scale"}
GEMMA = COMMON | {"head_dim": WIDTH, "sliding_window": 8, "layer_types": KINDS, "num_kv_shared_layers": 3}
GEMMA |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}
GEMMA_HEADER = WINDOW | {"attention.sliding_window_pattern": SLIDES, "attention.shared_kv_layers": 3}
GEMMA_HEADER |= {"embedding_length_per_layer_input": 8, "rope.freq_base": 1e6}
GEMMA4 = GEMMA | {"global_head_dim": 2 * WIDTH, "vocab_size_per_layer_input": VOCAB}
GEMMA4_HEADER = {"attention.key_length": 2 * WIDTH, "attention.key_length_swa": WIDTH}
GEMMA4_HEADER |= {"rope.dimension_count_swa": WIDTH, "rope.freq_base_swa": 10000.0}
CASES |= {
    "apertus": ("apertus", "ApertusForCausalLM", MODERN | {"hidden_act": "xielu"}, {}, None),
    "pangu": ("pangu-embedded", "LlamaForCausalLM", MODERN | {"attention_bias": True}, {}, None),
    "paddleocr": ("paddleocr", "LlamaForCausalLM", MODERN, {"rope.dimension_sections": [2, 3, 3, 0]}, None),
    "jais2": ("jais2", "Jais2ForCausalLM", MODERN, {}, None),
    "mistral3": (
        "mistral3",
        "Ministral3ForCausalLM",
        COMMON | {"head_dim": WIDTH, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}, "sliding_window": None},
        YARN_HEADER | {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.1},
        neighbours,
    ),
    # Weights that are ternary already, as in published models, are not changed.
    "bitnet": (
        "bitnet",
        "BitNetForCausalLM",
        COMMON | rope() | {"tie_word_embeddings": True},
        {"hidden_act": "relu2"},
        None,
    ),
    "olmo3": (
        "olmo2",
        "Olmo3ForCausalLM",
        COMMON
        | {
            "sliding_window": 8,
            "layer_types": KINDS,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 20000.0},
                "full_attention": YARN | {"mscale": None, "mscale_all_dim": None},
            },
        },
        WINDOW | YARN_HEADER | {"attention.sliding_window_pattern": SLIDES, "rope.freq_base": 20000.0},
        None,
    ),
    "gemma3n": (
        "gemma3n",
        "Gemma3nForCausalLM",
        GEMMA
        | {
            "intermediate_size": [96] * LAYERS,
            "activation_sparsity_pattern": [0.95, 0.5] + [0.0] * 5,
            "laurel_rank": 8,
            "final_logit_softcapping": 30.0,
        },
        GEMMA_HEADER
        | {
            "activation_sparsity_scale": [1.6448535919, 0.0] + [-math.inf] * 5,
            "altup.num_inputs": 4,
            "altup.active_idx": 0,
            "final_logit_softcapping": 30.0,
        },
        None,
    ),
    "lfm2": (
        "lfm2",
        "Lfm2ForCausalLM",
        COMMON
        | rope()
        | {"layer_types": CONVS, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": True},
        {"attention.head_count_kv": [GROUPS * (kind != "conv") for kind in CONVS], "shortconv.l_cache": 4}
        | {"attention.layer_norm_rms_epsilon": 1e-5},
        taps,
    ),
    "gemma4-e2b": (
        "gemma4",
        "Gemma4ForCausalLM",
        GEMMA4 | {"use_double_wide_mlp": True, "final_logit_softcapping": 30.0},
        GEMMA_HEADER | GEMMA4_HEADER | {"feed_forward_length": [96] * 4 + [192] * 3, "final_logit_softcapping": 30.0},
        None,
    ),
    "gemma4-31b": (
        "gemma4",
        "Gemma4ForCausalLM",
        GEMMA4
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
        },
        GEMMA_HEADER
        | GEMMA4_HEADER
        | {
            "attention.head_count_kv": [GROUPS if slides else 1 for slides in SLIDES],
            "attention.shared_kv_layers": 0,
            "embedding_length_per_layer_input": 0,
        },
        None,
    ),
}


# Matrices that llama.cpp does not store in blocks.
PLAIN = "gate_inp", "shortconv.conv", "ssm_conv1d"


def make(class_name: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model_class = getattr(transformers, class_name)
    options = dict(options)
    model = model_class(model_class.config_class(**options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def write(path: Path, arch: str, model: Any, header: Header, change: Any, kind: Any = None) -> None:
    """`kind`: the type of blocks of all matrices but routers and biases; None: float32."""
    config = model.config
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(architecture, LAYERS)
    writer = gguf.GGUFWriter(str(path), arch)
    inner = 4 * SIZE if not hasattr(config, "intermediate_size") else config.intermediate_size
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta")
    usual: Header = {
        "block_count": LAYERS,
        "context_length": getattr(config, "max_position_embeddings", 128),
        "embedding_length": SIZE,
        "feed_forward_length": inner,
        "attention.head_count": HEADS,
        "attention.head_count_kv": header.get("attention.head_count_kv")
        or getattr(config, "num_key_value_heads", GROUPS),
        "attention.key_length": WIDTH,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", 1e-6),
        "attention.layer_norm_epsilon": _layer_norm_epsilon(config),
    }
    for key, value in (usual | ({} if theta is None else {"rope.freq_base": theta}) | header).items():
        kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        kinds = kinds | {str: writer.add_string}
        kinds[type(value)](f"{arch}.{key}", value)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["a", "b", "ab", *(f"t{index}" for index in range(3, VOCAB))])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(1)
    activations: dict[str, list[float]] = {}
    for name, value in _stacked(model.state_dict(), config).items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if ".act_fn." in name:
            activations.setdefault(name.rpartition(".")[2], []).append(value.item())
            continue
        name += ".weight" * name.endswith(("correct_output_scale", "layer_scalar"))
        value = value if change is None else change(name, value, config)
        # GGUF's table has the names of the first BitNet's checkpoints.
        name = name.replace("attn_sub_norm", "inner_attn_ln").replace("ffn_sub_norm", "ffn_layernorm")
        endings = ".weight", ".bias"
        found = names.get_name(name, endings) or names.get_name(name.removeprefix("transformer."), endings)
        stem, _, own = name.rpartition(".router.")
        if own in SCALES:
            found = f"blk.{stem.rpartition('.')[2]}.{SCALES[own]}"
        assert found is not None, name
        array = np.ascontiguousarray(value.numpy())
        is_plain = found.endswith((".bias", ".ssm_a", ".ssm_d", "norm.weight")) or any(name in found for name in PLAIN)
        if kind is not None and array.ndim > 1 and not is_plain:
            writer.add_tensor(found, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(found, array)
    if arch == "gemma4":
        # A quarter of a wide head rotates: the frequencies of the rest are divided by what makes them 0.
        writer.add_tensor("rope_freqs.weight", np.array([1.0] * (WIDTH // 4) + [1e30] * (WIDTH * 3 // 4), np.float32))
    for name, values in activations.items():
        writer.add_array(f"xielu.{name}", values)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()


def _layer_norm_epsilon(config: Any) -> float:
    names = "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"
    return next((getattr(config, name) for name in names if hasattr(config, name)), 1e-5)


def _stacked(state: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """StableLM's norms of heads and Gemma 3n's projections of streams are one tensor in GGUF."""
    result: dict[str, Tensor] = {}
    for name, value in state.items():
        stem, found, _ = name.partition(".norms.")
        if "altup_projections." in name or "altup_unembed_projections." in name:
            stem, found = name.removesuffix(".weight").rpartition(".")[0], "."
        if not found:
            result[name] = value
        else:
            key = f"{stem}.weight"
            result[key] = torch.cat([result[key], value[None]]) if key in result else value[None]
    return result


@pytest.mark.parametrize("case", CASES)
def test_weights_and_logits_equal_the_original(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "cache"))
    arch, class_name, options, header, change = CASES[case]
    model = make(class_name, options)
    path = tmp_path / "m.gguf"
    write(path, arch, model, header, change)
    file = GGUFFile(path)
    state = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    for weight in weights(file):
        if weight.name in state:
            got = torch.from_numpy(np.array(weight.load(file)))
            # 1 + weight is rounded where the norm's weight is stored so.
            torch.testing.assert_close(got, state.pop(weight.name), rtol=0, atol=2e-7 if change is plus_one else 0)
    assert not state, "left out of the checkpoint"
    resolved = resolve_model(str(path), "float32")
    assert resolved.hf_config.architectures == (class_name,)
    prompts = random_prompts(VOCAB)
    got_logits = paged_logits(_load(resolved), resolved.hf_config, prompts)
    for mine, theirs in zip(got_logits, hf_logits(model, prompts), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)


def _load(resolved: Any) -> torch.nn.Module:
    path = str(resolved.path)
    wanted = ModelConfig(path, path=path, hf_config=resolved.hf_config, dtype=resolved.dtype, max_model_len=128)
    return get_model(wanted, "cpu")
