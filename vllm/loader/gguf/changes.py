"""The changes of llama.cpp's converter (convert_hf_to_gguf.py) to a checkpoint's weights, undone: one tensor of the
file becomes the weights that it was made of.

A change takes the header, and the tensor as one weight with the checkpoint's name; it gives the weights that there are.
`{}` in that name is what tells several apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vllm.loader.gguf.file import GGUFFile
from vllm.loader.gguf.header import GGUFHeader

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Weight:
    """One tensor of the checkpoint: `tensor` of the file, its rows from `rows` if given (of a stack of matrices, the
    rows of all), then those of `others`, changed by `change`, which with `keeps_rows` only orders rows; or `value` from
    the header. `heads`: what `change` does is to order columns, which lie in the file as (heads of a group, groups,
    size); blocks stay as they are, and their format is told."""

    name: str
    shape: tuple[int, ...]
    tensor: str
    rows: slice | None = None
    change: Callable[[Array], Array] | None = None
    keeps_rows: bool = True
    value: float | None = None
    others: tuple[str, ...] = ()
    heads: tuple[int, int] | None = None

    def ggml_type(self, file: GGUFFile) -> int:
        """Type of the file's tensor; F32 for a value from the header."""
        return 0 if self.value is not None else file.tensors[self.tensor].ggml_type

    def load(self, file: GGUFFile) -> Array:
        """Float32 of `shape`."""
        if self.value is not None:
            return np.full(self.shape, self.value, np.float32)
        value = np.concatenate([file.dequantize(tensor) for tensor in (self.tensor, *self.others)])
        if value.ndim > 2:
            value = value.reshape(-1, value.shape[-1])
        return self._changed(file, value).reshape(self.shape)

    def blocks(self, file: GGUFFile) -> Array:
        """The file's bytes, uint8 [rows, bytes of a row], in the checkpoint's order."""
        assert self.keeps_rows
        value = np.concatenate([file.blocks(tensor) for tensor in (self.tensor, *self.others)])
        return value if self.heads is not None else self._changed(file, value)

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


Change = Callable[[GGUFHeader, Weight], Iterable[Weight]]


def half_split(header: GGUFHeader, weight: Weight) -> list[Weight]:
    """GGUF has the two rows that rotate together as neighbours; the checkpoint half a head apart."""
    heads = header.heads if ".attn_q." in weight.tensor else header.kv_heads

    def change(value: Array) -> Array:
        pairs = value.reshape(heads, -1, 2, *value.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(value.shape)

    return [replace(weight, change=change)]


def by_head(header: GGUFHeader, weight: Weight) -> list[Weight]:
    """Query, key and value of one head follow each other in the checkpoint."""

    def change(value: Array) -> Array:
        parts = value.reshape(3, header.heads, -1, *value.shape[1:])
        return np.ascontiguousarray(parts.swapaxes(0, 1)).reshape(value.shape)

    return [replace(weight, change=change)]


def by_group(header: GGUFHeader, weight: Weight) -> list[Weight]:
    """The queries of a group and their key and value follow each other in the checkpoint."""

    def change(value: Array) -> Array:
        groups, width = header.kv_heads, header.head_dim
        pieces = np.split(value, [header.heads * width, (header.heads + groups) * width])
        grouped = [piece.reshape(groups, -1, width, *value.shape[1:]) for piece in pieces]
        return np.concatenate(grouped, axis=1).reshape(value.shape)

    return [replace(weight, change=change)]


def minus_one(header: GGUFHeader, weight: Weight) -> list[Weight]:
    """The norm multiplies by 1 + weight, and GGUF holds the sum."""
    return [replace(weight, change=lambda value: value - 1, keeps_rows=False)]


def transposed(header: GGUFHeader, weight: Weight) -> list[Weight]:
    """The checkpoint has matrices as [inputs, outputs]."""
    return [replace(weight, shape=weight.shape[::-1], change=np.transpose, keeps_rows=False)]


def difference(header: GGUFHeader, weight: Weight) -> list[Weight]:
    """Join the rows for "yes" and "no" to the one whose logistic function is the probability of the first."""
    shape = (1, *weight.shape[1:])
    return [replace(weight, shape=shape, change=lambda value: value[:1] - value[1:], keeps_rows=False)]


def taps(header: GGUFHeader, weight: Weight) -> list[Weight]:
    """A convolution by channel, [C, K], whose checkpoint has the dimension of its one input; or its bias."""
    if weight.tensor.endswith(".bias"):
        return [weight]
    return [replace(weight, shape=(math.prod(weight.shape[:-1]), 1, weight.shape[-1]), keeps_rows=False)]


def as_row(header: GGUFHeader, weight: Weight) -> list[Weight]:
    """A matrix of one row, which files have as a vector."""
    return [replace(weight, shape=(rows_of(weight.shape), weight.shape[-1]))]


def table(header: GGUFHeader, weight: Weight) -> list[Weight]:
    """A table, or its bias."""
    return [weight] if weight.tensor.endswith(".bias") else as_row(header, weight)


def rows_of(shape: tuple[int, ...]) -> int:
    """Rows of a table, of which files leave out the dimension where there is one."""
    return shape[0] if len(shape) == 2 else 1


def _cut(weight: Weight, which: tuple[Any, ...], start: int, num_rows: int, shape: tuple[int, ...]) -> Weight:
    """The rows from `start`; `which` fills the name's braces."""
    return replace(weight, name=weight.name.format(*which), shape=shape, rows=slice(start, start + num_rows))


def stacked(header: GGUFHeader, weight: Weight) -> list[Weight]:
    """Matrices [E, N, K], or vectors [E, N], that the checkpoint has one by one. ValueError: the header means another
    number of experts."""
    if "_exps." in weight.tensor:
        _check_experts(header, weight)
    count, *shape = weight.shape
    rows = shape[0] if len(shape) == 2 else 1
    return [_cut(weight, (index,), index * rows, rows, tuple(shape)) for index in range(count)]


def stacked_pairs(header: GGUFHeader, weight: Weight) -> list[Weight]:
    """Stack the gate's rows of each expert [2 N, K], then the up's."""
    _check_experts(header, weight)
    shape = weight.shape
    half, rest = divmod(shape[1], 2)
    if rest or len(shape) != 3:
        raise header.error(f"tensors {_part(weight)} have shape {shape}, whose rows are no two halves")
    pairs = [(expert, kind) for expert in range(shape[0]) for kind in ("gate", "up")]
    return [_cut(weight, pair, index * half, half, (half, shape[2])) for index, pair in enumerate(pairs)]


def _check_experts(header: GGUFHeader, weight: Weight) -> None:
    count = header.need("expert_count")
    if len(weight.shape) not in (2, 3) or weight.shape[0] != count:
        key = f"{header.architecture}.expert_count"
        raise header.error(f"tensors {_part(weight)} have shape {weight.shape}, but {key} is {count}")


def _part(weight: Weight) -> str:
    return weight.tensor.split(".")[2]


def separate_qkv(header: GGUFHeader, weight: Weight) -> list[Weight]:
    """All queries, keys and values, unless the checkpoint has them as one, too."""
    if "{}" not in weight.name:
        return [weight]
    keys, (end, *rest) = header.kv_heads * header.head_dim, weight.shape
    queries = end - 2 * keys
    parts = ("q", 0, queries), ("k", queries, keys), ("v", queries + keys, keys)
    return [_cut(weight, (kind,), start, size, (size, *rest)) for kind, start, size in parts]


def gate_and_up(header: GGUFHeader, weight: Weight) -> list[Weight]:
    """The gate's matrix and that of the rows that it is multiplied with, which the checkpoint has as one."""
    tensors, other = header.file.tensors, weight.tensor.replace("ffn_gate", "ffn_up")
    header.rows(other)
    first, second = tensors[weight.tensor], tensors[other]
    if first.shape[1:] != second.shape[1:]:
        raise header.error(f"tensors {weight.tensor} and {other} have shapes {first.shape} and {second.shape}")
    shape = (first.shape[0] + second.shape[0], *first.shape[1:])
    return [replace(weight, shape=shape, others=(other,), keeps_rows=first.ggml_type == second.ggml_type)]


def keys_and_values(header: GGUFHeader, weight: Weight) -> list[Weight]:
    """Latent attention's products that widen keys and values: each head's keys have their rows turned into columns
    [heads, rank, width] in attn_k_b, and the values' rows [heads, width, rank] in attn_v_b. Files that have the whole,
    too, are read there. ValueError: the file lacks the values, or their shape is another."""
    keys = weight.tensor
    if header.has(keys.replace("attn_k_b", "attn_kv_b")):
        return []
    values = keys.replace("attn_k_b", "attn_v_b")
    header.rows(values)
    shapes = weight.shape, header.file.tensors[values].shape
    if any(len(shape) != 3 for shape in shapes) or shapes[0][:2] != (shapes[1][0], shapes[1][2]):
        raise header.error(f"tensors {keys} and {values} have shapes {shapes[0]} and {shapes[1]}")
    (heads, rank, width), value_width = shapes[0], shapes[1][1]

    def change(stack: Array) -> Array:
        of_keys = stack.reshape(heads, rank, width).swapaxes(1, 2)
        return np.concatenate((of_keys, header.file.dequantize(values)), axis=1).reshape(-1, rank)

    return [replace(weight, shape=(heads * (width + value_width), rank), change=change, keeps_rows=False)]


def read_with_another(header: GGUFHeader, weight: Weight) -> list[Weight]:
    """Nothing: another tensor's change reads it."""
    return []


def named(tensor: str, usual: str, other: str) -> Change:
    """`usual` in the name, in files with `tensor` `other`."""

    def change(header: GGUFHeader, weight: Weight) -> list[Weight]:
        return [replace(weight, name=weight.name.replace(usual, other))] if header.has(tensor) else [weight]

    return change


def xielu(header: GGUFHeader) -> Iterator[Weight]:
    """Curvatures of activations, which the header has for each layer."""
    for part, shape in {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}.items():
        values = header.file.metadata.get(f"xielu.{part}")
        if not isinstance(values, list) or len(values) != header.layers:
            raise header.error(f"xielu.{part} must have {header.layers} values, got {values}")
        for layer, value in enumerate(values):
            yield Weight(f"model.layers.{layer}.mlp.act_fn.{part}", shape, "", value=value)


def uncorrected(header: GGUFHeader) -> Iterator[Weight]:
    """The correction of the choice of experts, of a model that has none."""
    for layer in range(header.layers):
        if header.has(f"blk.{layer}.ffn_gate_inp.weight"):
            name = f"model.layers.{layer}.mlp.moe_statics.e_score_correction_bias"
            yield Weight(name, (1, header.need("expert_count")), "", value=0.0)


ROTARY: dict[str, Change] = {"attn_q": half_split, "attn_k": half_split}
ONE_PLUS: dict[str, Change] = {"norm": minus_one}
LATENT: dict[str, Change] = {"attn_k_b": keys_and_values, "attn_v_b": read_with_another}
EVERYWHERE: dict[str, Change] = {
    "attn_qkv": separate_qkv,
    "cls.output": table,
    "ffn_gate_inp_shexp": as_row,
    "ffn_gate_up_exps": stacked_pairs,
    "token_types": table,
}
"""Every architecture that has no other change of the tensor has these."""
