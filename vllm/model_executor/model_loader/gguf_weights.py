"""The weights of a safetensors checkpoint, made from a GGUF file's tensors.

What llama.cpp's converter (convert_hf_to_gguf.py) does to the weights of each architecture is undone here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm.model_executor.model_loader import gguf_experts, gguf_mla
from vllm.model_executor.model_loader.gguf_file import GGUFFile
from vllm.model_executor.model_loader.gguf_header import GGUFHeader

Array = np.ndarray[Any, Any]
Change = Callable[[GGUFHeader, str, Array], Array]


@dataclass(frozen=True)
class Weight:
    """One tensor of the checkpoint: `tensor` of the file, its rows from `rows` if given (of a stack of matrices, the
    rows of all), changed by `change`, which with `keeps_rows` only orders rows; or `value` from the header."""

    name: str
    shape: tuple[int, ...]
    tensor: str
    rows: slice | None = None
    change: Callable[[Array], Array] | None = None
    keeps_rows: bool = True
    value: float | None = None

    def ggml_type(self, file: GGUFFile) -> int:
        """Of the file's tensor; F32 of a value from the header."""
        return 0 if self.value is not None else file.tensors[self.tensor].ggml_type

    def load(self, file: GGUFFile) -> Array:
        """Float32 of `shape`."""
        if self.value is not None:
            return np.full(self.shape, self.value, np.float32)
        value = file.dequantize(self.tensor)
        if value.ndim > 2:
            value = value.reshape(-1, value.shape[-1])
        return self._changed(file, value).reshape(self.shape)

    def blocks(self, file: GGUFFile) -> Array:
        """The file's own bytes, uint8 [rows, bytes of a row], in the checkpoint's order."""
        assert self.keeps_rows
        return self._changed(file, file.blocks(self.tensor))

    def _changed(self, file: GGUFFile, value: Array) -> Array:
        if self.rows is not None:
            value = value[self.rows]
        if self.change is None:
            return value
        try:
            return self.change(value)
        except ValueError as error:
            problem = f"tensor {self.tensor} does not fit the header's sizes: {error}"
            raise ValueError(f"{file.path.name}: {problem}") from None


@dataclass(frozen=True)
class _Names:
    """A checkpoint's names for GGUF's, without their ending ".weight" or ".bias"; `{}` is a layer's number."""

    top: dict[str, str]
    layer: str
    block: dict[str, str]


_MODERN = _Names(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"},
    "model.layers.{}.",
    {
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
    },
)
_GPT2 = _Names(
    {
        "token_embd": "transformer.wte",
        "position_embd": "transformer.wpe",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    "transformer.h.{}.",
    {
        "attn_norm": "ln_1",
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_norm": "ln_2",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    },
)
_NEOX = _Names(
    {"token_embd": "gpt_neox.embed_in", "output_norm": "gpt_neox.final_layer_norm", "output": "embed_out"},
    "gpt_neox.layers.{}.",
    {
        "attn_norm": "input_layernorm",
        "attn_qkv": "attention.query_key_value",
        "attn_output": "attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
)
_BLOOM = _Names(
    {
        "token_embd": "transformer.word_embeddings",
        "token_embd_norm": "transformer.word_embeddings_layernorm",
        "output_norm": "transformer.ln_f",
        "output": "lm_head",
    },
    "transformer.h.{}.",
    {
        "attn_norm": "input_layernorm",
        "attn_qkv": "self_attention.query_key_value",
        "attn_output": "self_attention.dense",
        "ffn_norm": "post_attention_layernorm",
        "ffn_up": "mlp.dense_h_to_4h",
        "ffn_down": "mlp.dense_4h_to_h",
    },
)
_MPT = _Names(
    {"token_embd": "transformer.wte", "output_norm": "transformer.norm_f", "output": "lm_head"},
    "transformer.blocks.{}.",
    {
        "attn_norm": "norm_1",
        "attn_qkv": "attn.Wqkv",
        "attn_output": "attn.out_proj",
        "ffn_norm": "norm_2",
        "ffn_up": "ffn.up_proj",
        "ffn_down": "ffn.down_proj",
    },
)


def _with(names: _Names, top: dict[str, str] | None = None, **block: str) -> _Names:
    return _Names(names.top | (top or {}), names.layer, names.block | block)


_BOTH_NORMS = _with(
    _MODERN,
    post_attention_norm="post_attention_layernorm",
    ffn_norm="pre_feedforward_layernorm",
    post_ffw_norm="post_feedforward_layernorm",
)
_EXPERTS = _with(_MODERN, None, **gguf_experts.NAMES)
_ROUTED = _with(_EXPERTS, None, **gguf_experts.ROUTED_NAMES)
_FUSED_MLP = _with(_MODERN, ffn_up="mlp.gate_up_proj")
# Falcon's larger models have a norm each for the MLP and for attention.
_FALCON_TWO_NORMS = _with(_BLOOM, attn_norm="ln_mlp", attn_norm_2="ln_attn")
_PLAIN_MLP = _with(_MODERN, ffn_up="mlp.c_fc", ffn_down="mlp.c_proj")
_PHI = _with(
    _MODERN,
    {"output_norm": "model.final_layernorm"},
    attn_output="self_attn.dense",
    ffn_up="mlp.fc1",
    ffn_down="mlp.fc2",
)

_GEMMA4 = _with(
    _BOTH_NORMS,
    {
        "per_layer_token_embd": "model.embed_tokens_per_layer",
        "per_layer_model_proj": "model.per_layer_model_projection",
        "per_layer_proj_norm": "model.per_layer_projection_norm",
    },
    inp_gate="per_layer_input_gate",
    proj="per_layer_projection",
    post_norm="post_per_layer_input_norm",
    layer_output_scale="layer_scalar",
    ffn_gate_inp="router.proj",
    pre_ffw_norm_2="pre_feedforward_layernorm_2",
    post_ffw_norm_1="post_feedforward_layernorm_1",
    post_ffw_norm_2="post_feedforward_layernorm_2",
    **gguf_experts.stack_names("experts"),
)
_GEMMA3N = _with(
    _GEMMA4,
    {"altup_proj": "model.altup_projections.{}", "altup_unembd_proj": "model.altup_unembed_projections.{}"},
    altup_correct_coef="altup.correction_coefs",
    altup_correct_scale="altup.correct_output_scale",
    altup_predict_coef="altup.prediction_coefs",
    altup_router="altup.modality_router",
    altup_router_norm="altup.router_norm",
    laurel_l="laurel.linear_left",
    laurel_r="laurel.linear_right",
    laurel_post_norm="laurel.post_laurel_norm",
)
# Those that have no ending in the checkpoint.
_BARE = ("layer_output_scale", "altup_correct_scale", "attn_sinks", "exp_probs_b")

_NAMES: dict[str, _Names] = {
    "apertus": _with(_MODERN, attn_norm="attention_layernorm", ffn_norm="feedforward_layernorm"),
    "bitnet": _with(_MODERN, attn_sub_norm="self_attn.attn_sub_norm", ffn_sub_norm="mlp.ffn_sub_norm"),
    "llama": _EXPERTS,
    "qwen2moe": _EXPERTS,
    "qwen3moe": _EXPERTS,
    "qwen3vlmoe": _EXPERTS,
    "olmoe": _EXPERTS,
    "gpt-oss": _with(
        _EXPERTS,
        attn_sinks="self_attn.sinks",
        post_attention_norm="post_attention_layernorm",
        ffn_gate_inp="mlp.router",
    ),
    "granitemoe": _with(
        _MODERN,
        None,
        ffn_gate_inp="block_sparse_moe.router",
        **gguf_experts.stack_names("block_sparse_moe.experts"),
    ),
    "deepseek2": _with(_ROUTED, None, **gguf_mla.NAMES),
    "dots1": _ROUTED,
    "glm4moe": _with(_ROUTED, post_attention_norm="post_attention_layernorm"),
    "ernie4_5-moe": _with(_ROUTED, exp_probs_b="mlp.moe_statics.e_score_correction_bias"),
    "minimax-m2": _with(_EXPERTS, exp_probs_b="mlp.e_score_correction_bias"),
    "hunyuan-moe": _with(
        _EXPERTS,
        attn_q_norm="self_attn.query_layernorm",
        attn_k_norm="self_attn.key_layernorm",
        ffn_gate_inp="mlp.gate.wg",
        ffn_gate_shexp="mlp.shared_mlp.gate_proj",
        ffn_up_shexp="mlp.shared_mlp.up_proj",
        ffn_down_shexp="mlp.shared_mlp.down_proj",
    ),
    "gemma3n": _GEMMA3N,
    "gemma4": _GEMMA4,
    "gemma2": _BOTH_NORMS,
    "gemma3": _BOTH_NORMS,
    "olmo2": _BOTH_NORMS,
    "exaone4": _BOTH_NORMS,
    "seed_oss": _with(_MODERN, post_attention_norm="post_attention_layernorm"),
    "hunyuan-dense": _with(_MODERN, attn_q_norm="self_attn.query_layernorm", attn_k_norm="self_attn.key_layernorm"),
    "glm4": _with(_FUSED_MLP, post_attention_norm="post_self_attn_layernorm", post_ffw_norm="post_mlp_layernorm"),
    "chatglm": _FUSED_MLP,
    "phi2": _PHI,
    "phi3": _with(_FUSED_MLP, attn_qkv="self_attn.qkv_proj"),
    "starcoder2": _PLAIN_MLP,
    "stablelm": _with(_MODERN, attn_q_norm="self_attn.q_layernorm", attn_k_norm="self_attn.k_layernorm"),
    "gpt2": _GPT2,
    "starcoder": _GPT2,
    "gptneox": _NEOX,
    "bloom": _BLOOM,
    "falcon": _BLOOM,
    "mpt": _MPT,
}

_BLOCK = re.compile(r"blk\.(\d+)\.")
_IN_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_SCALE = re.compile(r"(blk\.\d+\.)(ffn_gate_inp|ffn_down_exps)\.scale")
_SCALES = {"ffn_gate_inp": "router.scale", "ffn_down_exps": "router.per_expert_scale"}
_SINGLE = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight")
_ON_TOP = re.compile(r"(\w+)\.(weight|bias)")
# Read as part of the configuration.
_ROPE = re.compile(r"(rope_freqs|rope_factors_long|rope_factors_short)\.weight")


def weights(file: GGUFFile) -> Iterator[Weight]:
    """Every weight of the checkpoint; ValueError for a tensor that the architecture does not have."""
    header = GGUFHeader(file)
    architecture = header.architecture
    names = _NAMES.get(architecture, _MODERN)
    if architecture == "falcon" and header.has("blk.0.attn_norm_2.weight"):
        names = _FALCON_TWO_NORMS
    changes = _CHANGES.get(architecture, {})
    for tensor, entry in file.tensors.items():
        block = _BLOCK.match(tensor)
        if _ROPE.fullmatch(tensor) or (block is not None and int(block[1]) in header.further):
            continue
        if (name := _of_experts(architecture, names, tensor)) is not None:
            yield Weight(name, entry.shape, tensor)
            continue
        in_block, on_top = _IN_BLOCK.fullmatch(tensor), _ON_TOP.fullmatch(tensor)
        if in_block is not None:
            layer, part, kind = in_block.groups()
            prefix, known = names.layer.format(layer), names.block.get(part)
        else:
            part, kind, prefix = (on_top[1], on_top[2], "") if on_top is not None else (tensor, "", "")
            known = names.top.get(part)
        if pieces := _pieces(header, names, part, entry.shape):
            for name, rows, shape in pieces:
                yield Weight(f"{prefix}{name}.{kind}", shape, tensor, rows)
            continue
        if part in gguf_mla.SPLIT and "attn_kv_b" in names.block:
            if part == gguf_mla.SPLIT[0]:
                shape, join = gguf_mla.join(header, tensor)
                yield Weight(f"{prefix}{names.block['attn_kv_b']}.{kind}", shape, tensor, None, join, False)
            continue
        if known is None:
            raise ValueError(f"{file.path.name}: {architecture} has no tensor {tensor}")
        shape = entry.shape
        change = changes.get(part) or changes.get("norm" if part.endswith("norm") and kind == "weight" else "")
        if change is _transposed:
            shape = shape[::-1]
        if part == "exp_probs_b" and architecture == "ernie4_5-moe":
            shape = (1, *shape)
        bound = None if change is None else _bind(change, header, part)
        name = f"{prefix}{known}" if part in _BARE else f"{prefix}{known}.{kind}"
        yield Weight(name, shape, tensor, None, bound, change in _OF_ROWS)
    if architecture == "apertus":
        yield from _xielu(header)


def _of_experts(architecture: str, names: _Names, tensor: str) -> str | None:
    """The checkpoint's name of a single expert's matrix in the first files of Mixtral, or of Gemma 4's scales."""
    if architecture == "llama" and (single := _SINGLE.fullmatch(tensor)):
        layer, kind, expert = single.groups()
        return f"{names.layer.format(layer)}mlp.experts.{expert}.{kind}_proj.weight"
    if architecture == "gemma4" and (scale := _SCALE.fullmatch(tensor)):
        return f"{names.layer.format(scale[1].split('.')[1])}{_SCALES[scale[2]]}"
    return None


def _xielu(header: GGUFHeader) -> Iterator[Weight]:
    """Curvatures of activations, which the header has for each layer."""
    for part, shape in {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}.items():
        values = header.file.metadata.get(f"xielu.{part}")
        if not isinstance(values, list) or len(values) != header.layers:
            raise ValueError(f"{header.file.path.name}: xielu.{part} must have {header.layers} values, got {values}")
        for layer, value in enumerate(values):
            yield Weight(f"model.layers.{layer}.mlp.act_fn.{part}", shape, "", value=value)


def _bind(change: Change, header: GGUFHeader, part: str) -> Callable[[Array], Array]:
    return lambda value: change(header, part, value)


_Piece = tuple[str, slice, tuple[int, ...]]


def _pieces(header: GGUFHeader, names: _Names, part: str, shape: tuple[int, ...]) -> list[_Piece]:
    """Of a tensor that the checkpoint has in parts, the name of each, its rows and its shape."""
    if part in names.block and (experts := gguf_experts.expert_pieces(header, part, names.block, shape)):
        return experts
    if part == "ffn_gate_inp_shexp":
        # The file has the one row as a vector.
        return [(gguf_experts.NAMES[part], slice(None), (1, *shape[-1:]))]
    if part == "attn_qkv" and header.architecture in ("qwen", "chatglm", "phi2", "glm4"):
        keys = header.kv_heads * header.head_dim
        queries = shape[0] - 2 * keys
        bounds = 0, queries, queries + keys, shape[0]
        parts = [names.block[name] for name in ("attn_q", "attn_k", "attn_v")]
        return [
            (name, slice(first, end), (end - first, *shape[1:]))
            for name, first, end in zip(parts, bounds[:-1], bounds[1:], strict=True)
        ]
    if part in ("attn_q_norm", "attn_k_norm") and header.architecture == "stablelm":
        name = names.block[part]
        return [(f"{name}.norms.{head}", slice(head, head + 1), shape[1:]) for head in range(shape[0])]
    if part in ("altup_proj", "altup_unembd_proj") and part in names.top:
        size = shape[1]
        return [
            (names.top[part].format(index), slice(index * size, (index + 1) * size), shape[1:])
            for index in range(shape[0])
        ]
    return []


def _half_split(header: GGUFHeader, part: str, value: Array) -> Array:
    """GGUF has the two rows that rotate together as neighbours; the checkpoint half a head apart."""
    heads = header.heads if part == "attn_q" else header.kv_heads
    pairs = value.reshape(heads, -1, 2, *value.shape[1:])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(value.shape)


def _minus_one(header: GGUFHeader, part: str, value: Array) -> Array:
    """The norm multiplies by 1 + weight, and GGUF holds the sum."""
    return value - 1


def _transposed(header: GGUFHeader, part: str, value: Array) -> Array:
    return value.T if value.ndim == 2 else value


def _by_head(header: GGUFHeader, part: str, value: Array) -> Array:
    """Query, key and value of one head follow each other in the checkpoint."""
    parts = value.reshape(3, header.heads, -1, *value.shape[1:])
    return np.ascontiguousarray(parts.swapaxes(0, 1)).reshape(value.shape)


def _by_group(header: GGUFHeader, part: str, value: Array) -> Array:
    """The queries of a group and their key and value follow each other in the checkpoint."""
    groups, width = header.kv_heads, header.head_dim
    rest = value.shape[1:]
    queries, keys, values = np.split(value, [header.heads * width, (header.heads + groups) * width])
    grouped = [piece.reshape(groups, -1, width, *rest) for piece in (queries, keys, values)]
    return np.concatenate(grouped, axis=1).reshape(value.shape)


# These only order rows.
_OF_ROWS = (None, _half_split, _by_head, _by_group)
_ROTARY: dict[str, Change] = {"attn_q": _half_split, "attn_k": _half_split}
_UNIT: dict[str, Change] = {"norm": _minus_one}
# By architecture and tensor; "norm" stands for the weights of all norms.
_CHANGES: dict[str, dict[str, Change]] = {
    **dict.fromkeys(
        (
            *("llama", "mistral3", "internlm2", "xverse", "baichuan", "minicpm", "granite", "granitemoe", "smollm3"),
            *("arcee", "olmo"),
        ),
        _ROTARY,
    ),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "nemotron"), _UNIT),
    "gpt2": dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), _transposed),
    "gptneox": {"attn_qkv": _by_head},
    "bloom": {"attn_qkv": _by_head},
    "falcon": {"attn_qkv": _by_group},
}
