"""The weights of a safetensors checkpoint, made from a GGUF file's tensors.

What llama.cpp's converter (convert_hf_to_gguf.py) does to the weights of each architecture is undone here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm.loader.gguf import encoders, experts, mla
from vllm.loader.gguf.file import GGUFFile
from vllm.loader.gguf.header import GGUFHeader
from vllm.loader.gguf.names import (
    BARE,
    FALCON_TWO_NORMS,
    JINA_BERT_FUSED,
    MODERN,
    NAMES,
    Names,
)

Array = np.ndarray[Any, Any]
Change = Callable[[GGUFHeader, str, Array], Array]


@dataclass(frozen=True)
class Weight:
    """One tensor of the checkpoint: `tensor` of the file, its rows from `rows` if given (of a stack of matrices, the
    rows of all), then those of `others`, changed by `change`, which with `keeps_rows` only orders rows; or `value` from
    the header."""

    name: str
    shape: tuple[int, ...]
    tensor: str
    rows: slice | None = None
    change: Callable[[Array], Array] | None = None
    keeps_rows: bool = True
    value: float | None = None
    others: tuple[str, ...] = ()

    def ggml_type(self, file: GGUFFile) -> int:
        """Of the file's tensor; F32 of a value from the header."""
        return 0 if self.value is not None else file.tensors[self.tensor].ggml_type

    def load(self, file: GGUFFile) -> Array:
        """Float32 of `shape`."""
        if self.value is not None:
            return np.full(self.shape, self.value, np.float32)
        value = np.concatenate([file.dequantize(each) for each in (self.tensor, *self.others)])
        if value.ndim > 2:
            value = value.reshape(-1, value.shape[-1])
        return self._changed(file, value).reshape(self.shape)

    def blocks(self, file: GGUFFile) -> Array:
        """The file's own bytes, uint8 [rows, bytes of a row], in the checkpoint's order."""
        assert self.keeps_rows
        return self._changed(file, np.concatenate([file.blocks(each) for each in (self.tensor, *self.others)]))

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


_BLOCK = re.compile(r"blk\.(\d+)\.")
_IN_BLOCK = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_SCALE = re.compile(r"(blk\.\d+\.)(ffn_gate_inp|ffn_down_exps)\.scale")
_SCALES = {"ffn_gate_inp": "router.scale", "ffn_down_exps": "router.per_expert_scale"}
_SINGLE = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight")
_ON_TOP = re.compile(r"([\w.]+)\.(weight|bias)")
# Files leave out the first dimension where it is 1.
_TABLES = ("token_types", "cls.output")
# Two matrices that the checkpoint has as one.
_SHARED = ("ffn_gate_shexp", "ffn_up_shexp")
# Read as part of the configuration, or following from it.
_UNREAD = re.compile(r"(rope_freqs|rope_factors_long|rope_factors_short)\.weight|(blk\.\d+\.)?attn_rot_embd\..*")


def weights(file: GGUFFile) -> Iterator[Weight]:
    """Every weight of the checkpoint; ValueError for a tensor that the architecture does not have."""
    header = GGUFHeader(file)
    architecture = header.architecture
    names = NAMES.get(architecture, MODERN)
    if architecture == "falcon" and header.has("blk.0.attn_norm_2.weight"):
        names = FALCON_TWO_NORMS
    if architecture == "jina-bert-v2" and not header.has("blk.0.ffn_gate.weight"):
        names = JINA_BERT_FUSED
    changes = _CHANGES.get(architecture, {})
    for tensor, entry in file.tensors.items():
        block = _BLOCK.match(tensor)
        if (
            _UNREAD.fullmatch(tensor)
            or tensor.startswith(encoders.DENSE)
            or (block is not None and int(block[1]) in header.further)
        ):
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
        if part in mla.SPLIT and "attn_kv_b" in names.block:
            if part == mla.SPLIT[0] and not header.has(tensor.replace(part, "attn_kv_b")):
                shape, join = mla.join(header, tensor)
                yield Weight(f"{prefix}{names.block['attn_kv_b']}.{kind}", shape, tensor, None, join, False)
            continue
        if architecture == "granitemoe" and part in _SHARED:
            if part == _SHARED[0]:
                yield _joined(file, f"{prefix}{known}.{kind}", tensor, tensor.replace(*_SHARED))
            continue
        if known is None:
            raise ValueError(f"{file.path.name}: {architecture} has no tensor {tensor}")
        shape = entry.shape
        if part in _TABLES and kind == "weight":
            shape = (1 if architecture == "qwen3" else encoders.rows_of(shape), shape[-1])
        change = changes.get(part) or changes.get("norm" if part.endswith("norm") and kind == "weight" else "")
        if change is _transposed:
            shape = shape[::-1]
        if part == "exp_probs_b" and architecture == "ernie4_5-moe":
            shape = (1, *shape)
        bound = None if change is None else _bind(change, header, part)
        name = f"{prefix}{known}" if part in BARE else f"{prefix}{known}.{kind}"
        yield Weight(name, shape, tensor, None, bound, change in _OF_ROWS)
    if architecture == "apertus":
        yield from _xielu(header)
    if architecture == "bailingmoe":
        yield from _uncorrected(header)


def _joined(file: GGUFFile, name: str, tensor: str, other: str) -> Weight:
    """One matrix of two, the rows of `other` last."""
    if other not in file.tensors:
        raise ValueError(f"{file.path.name} has no tensor {other}")
    first, second = file.tensors[tensor], file.tensors[other]
    if first.shape[1:] != second.shape[1:]:
        raise ValueError(f"{file.path.name}: tensors {tensor} and {other} have shapes {first.shape} and {second.shape}")
    shape = (first.shape[0] + second.shape[0], *first.shape[1:])
    return Weight(name, shape, tensor, others=(other,), keeps_rows=first.ggml_type == second.ggml_type)


def _uncorrected(header: GGUFHeader) -> Iterator[Weight]:
    """The correction of the choice of experts, of a model that has none."""
    for layer in range(header.layers):
        if header.has(f"blk.{layer}.ffn_gate_inp.weight"):
            name = f"model.layers.{layer}.mlp.moe_statics.e_score_correction_bias"
            yield Weight(name, (1, header.need("expert_count")), "", value=0.0)


def _of_experts(architecture: str, names: Names, tensor: str) -> str | None:
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


def _pieces(header: GGUFHeader, names: Names, part: str, shape: tuple[int, ...]) -> list[_Piece]:
    """Of a tensor that the checkpoint has in parts, the name of each, its rows and its shape."""
    if part in names.block and (pieces := experts.expert_pieces(header, part, names.block, shape)):
        return pieces
    if part == "ffn_gate_inp_shexp":
        # The file has the one row as a vector.
        return [(experts.NAMES[part], slice(None), (1, *shape[-1:]))]
    if part == "attn_qkv" and header.architecture in ("qwen", "chatglm", "phi2", "glm4", "bailingmoe2"):
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
_JUDGE: dict[str, Change] = {"cls.output": lambda header, part, value: encoders.difference(value)}
_UNIT: dict[str, Change] = {"norm": _minus_one}
# By architecture and tensor; "norm" stands for the weights of all norms.
_CHANGES: dict[str, dict[str, Change]] = {
    **dict.fromkeys(
        (
            *("llama", "mistral3", "internlm2", "xverse", "baichuan", "minicpm", "granite", "granitemoe", "smollm3"),
            "llama-embed",
            *("arcee", "olmo"),
        ),
        _ROTARY,
    ),
    **dict.fromkeys(("gemma", "gemma2", "gemma3", "gemma-embedding", "nemotron"), _UNIT),
    "qwen3": _JUDGE,
    "gpt2": dict.fromkeys(("attn_qkv", "attn_output", "ffn_up", "ffn_down"), _transposed),
    "gptneox": {"attn_qkv": _by_head},
    "bloom": {"attn_qkv": _by_head},
    "falcon": {"attn_qkv": _by_group},
}
