"""GGUF's names, translated to those of config.json and safetensors."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from vllm.model_executor.model_loader.gguf_file import GGUFFile

_ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_TOP_LEVEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}

_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

_BLOCK_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"


def weight_names(file: GGUFFile) -> dict[str, str]:
    """GGUF name -> safetensors name of every weight, in file order; ValueError for a tensor that no supported
    architecture has."""
    names: dict[str, str] = {}
    for name in file.tensors:
        match = _BLOCK_NAME.fullmatch(name)
        if name in _TOP_LEVEL:
            names[name] = _TOP_LEVEL[name]
        elif match is not None and match[2] in _IN_BLOCK:
            names[name] = f"model.layers.{match[1]}.{_IN_BLOCK[match[2]]}.{match[3]}"
        elif name != _ROPE_FACTORS:
            raise ValueError(f"{file.path.name} has a tensor {name}, which no supported architecture has")
    return names


def restore_layout(file: GGUFFile, name: str, value: np.ndarray, config: dict[str, Any]) -> np.ndarray:
    """Undo GGUF's reordering of Llama's query and key rows: there, the two rows that rotate together are neighbours;
    here, they are half a head apart."""
    match = _BLOCK_NAME.fullmatch(name)
    if file.metadata["general.architecture"] != "llama" or match is None or match[2] not in ("attn_q", "attn_k"):
        return value
    heads = config["num_attention_heads" if match[2] == "attn_q" else "num_key_value_heads"]
    pairs = value.reshape(heads, -1, 2, *value.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(value.shape)


def hf_config(file: GGUFFile, dtype: str) -> dict[str, Any]:
    """The contents of config.json; ValueError for an unsupported architecture, or a value that the header lacks."""
    reader = _Reader(file)
    arch = reader.architecture
    heads = reader.need("attention.head_count")
    hidden = reader.need("embedding_length")
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[arch]],
        "model_type": arch,
        "dtype": dtype,
        "hidden_size": hidden,
        "num_hidden_layers": reader.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": reader.get("attention.head_count_kv", heads),
        "head_dim": reader.get("attention.key_length", hidden // heads),
        "intermediate_size": reader.need("feed_forward_length"),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "max_position_embeddings": reader.need("context_length"),
        "rms_norm_eps": reader.get("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_parameters": _rope(file, reader),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": arch != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
        "hidden_act": "silu",
        **special_ids(file),
    }
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        if not isinstance(config[name], int):
            raise ValueError(f"{file.path.name}: layers that differ in {name} are not supported, got {config[name]}")
    return config


def special_ids(file: GGUFFile) -> dict[str, Any]:
    """The known ones of bos_token_id, pad_token_id and eos_token_id (a list if turns and texts end differently)."""
    get = file.metadata.get
    eos = [get(f"tokenizer.ggml.{name}") for name in ("eos_token_id", "eot_token_id")]
    eos_ids = list(dict.fromkeys(value for value in eos if value is not None))
    ids = {
        "bos_token_id": get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": get("tokenizer.ggml.padding_token_id"),
        "eos_token_id": (eos_ids if len(eos_ids) > 1 else eos_ids[0]) if eos_ids else None,
    }
    return {name: value for name, value in ids.items() if value is not None}


def _rope(file: GGUFFile, reader: _Reader) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": reader.get("rope.freq_base", 10000.0)}
    if _ROPE_FACTORS in file.tensors:
        return rope | {"rope_type": "factors", "factors": file.dequantize(_ROPE_FACTORS).ravel().tolist()}
    kind = reader.get("rope.scaling.type", "none")
    if kind != "none":
        rope |= {"rope_type": kind, "factor": reader.need("rope.scaling.factor")}
        if (original := reader.get("rope.scaling.original_context_length", None)) is not None:
            rope["original_max_position_embeddings"] = original
    return rope


class _Reader:
    """Header values of the model's architecture."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file
        self.architecture: str = file.metadata.get("general.architecture", "")
        if self.architecture not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise ValueError(
                f"{file.path.name}: general.architecture must be one of {known}, got {self.architecture!r}"
            )
        if "token_embd.weight" not in file.tensors:
            raise ValueError(f"{file.path.name} has no tensor token_embd.weight")

    def get(self, key: str, default: Any) -> Any:
        return self._file.metadata.get(f"{self.architecture}.{key}", default)

    def need(self, key: str) -> Any:
        value = self.get(key, None)
        if value is None:
            raise ValueError(f"{self._file.path.name} has no {self.architecture}.{key}")
        return value
