"""The changes of llama.cpp's converter to the weights of recurrent states, undone (changes.py says what a change
is)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from vllm.loader.gguf.changes import Array, Change, Weight, minus_one, taps
from vllm.loader.gguf.header import GGUFHeader
from vllm.quantization.formats.gguf import TYPES


def flat(header: GGUFHeader, weight: Weight) -> list[Weight]:
    """A vector, which files have with a dimension of one, or by groups."""
    return [replace(weight, shape=(math.prod(weight.shape),), keeps_rows=False)]


def decays(header: GGUFHeader, weight: Weight) -> list[Weight]:
    """The rates of each channel, which files have as -e^A_log."""
    return [replace(weight, change=lambda value: _logarithm(header, weight, value), keeps_rows=False)]


def head_decays(header: GGUFHeader, weight: Weight) -> list[Weight]:
    """`decays`, one of each head."""
    return [replace(each, shape=(math.prod(each.shape),)) for each in decays(header, weight)]


def _logarithm(header: GGUFHeader, weight: Weight, value: Array) -> Array:
    if not (value <= 0).all():
        raise header.error(f"tensor {weight.tensor} must have no values above 0")
    with np.errstate(divide="ignore"):
        return np.log(-value)


def _in_turn(header: GGUFHeader) -> tuple[int, int, int]:
    """Heads of keys, of values for each of these, and the size of a value."""
    keys, heads, inner = (header.size(f"ssm.{key}") for key in ("group_count", "time_step_rank", "inner_size"))
    if heads % keys or inner % heads:
        raise header.wrong("ssm.time_step_rank", f"must divide ssm.inner_size={inner} and be a multiple of {keys}")
    return keys, heads // keys, inner // heads


def _rows_by_key(width: Callable[[int], int], is_last: bool = False) -> Change:
    """Heads of values (if `is_last`, in the rows after queries and keys) lie in the file in turn, one of each head of
    keys; in the checkpoint all of a head of keys together. `width`: rows of a head, from the size of a value."""

    def change(header: GGUFHeader, weight: Weight) -> list[Weight]:
        keys, share, size = _in_turn(header)
        rows = keys * share * width(size)

        def reorder(value: Array) -> Array:
            start = len(value) - rows if is_last else 0
            heads = value[start:].reshape(share, keys, width(size), *value.shape[1:]).swapaxes(0, 1)
            return np.concatenate((value[:start], heads.reshape(value[start:].shape)))

        return [replace(weight, change=reorder)]

    return change


def _columns_by_key(header: GGUFHeader, weight: Weight) -> list[Weight]:
    """As `_rows_by_key`, of the columns."""
    keys, share, _ = _in_turn(header)

    def reorder(value: Array) -> Array:
        heads = value.reshape(len(value), share, keys, -1)
        return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(value.shape)

    is_stored = header.file.tensors[weight.tensor].ggml_type in TYPES
    return [replace(weight, change=reorder, keeps_rows=is_stored, heads=(share, keys) if is_stored else None)]


def _then(first: Change, second: Change) -> Change:
    """A change of the order of rows, then one of values or the shape alone."""

    def change(header: GGUFHeader, weight: Weight) -> list[Weight]:
        (ordered,) = first(header, weight)
        (other,) = second(header, weight)
        order, values = ordered.change, other.change
        assert order is not None
        return [replace(other, change=order if values is None else lambda value: values(order(value)))]

    return change


_PER_HEAD, _PER_VALUE = _rows_by_key(lambda size: 1), _rows_by_key(lambda size: size)
MAMBA: dict[str, Change] = {"ssm_conv1d": taps, "ssm_a": decays}
MAMBA2: dict[str, Change] = {"ssm_conv1d": taps, "ssm_a": head_decays, "ssm_d": flat, "ssm_norm": flat}
DELTA: dict[str, Change] = {
    **dict.fromkeys(("ssm_conv1d", "ssm_conv1d_q", "ssm_conv1d_k", "ssm_conv1d_v"), taps),
    "ssm_a": head_decays,
    # These norms' weights are as in the checkpoint, whatever is done to others.
    "ssm_norm": flat,
}
# Queries, keys and values stay one matrix.
QWEN_NEXT: dict[str, Change] = DELTA | {"norm": minus_one, "attn_qkv": lambda header, weight: [weight]}
QWEN: dict[str, Change] = QWEN_NEXT | {
    "attn_qkv": _rows_by_key(lambda size: size, is_last=True),
    "attn_gate": _PER_VALUE,
    "ssm_alpha": _PER_HEAD,
    "ssm_beta": _PER_HEAD,
    "ssm_dt": _PER_HEAD,
    "ssm_a": _then(_PER_HEAD, head_decays),
    "ssm_conv1d": _then(_rows_by_key(lambda size: size, is_last=True), taps),
    "ssm_out": _columns_by_key,
}
