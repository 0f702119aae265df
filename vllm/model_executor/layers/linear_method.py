"""How the weights of linear layers are kept and multiplied with: the engine's `quantization`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vllm.ops.int8_linear import int8_linear, pack_int8_linear, take_int8_rows
from vllm.ops.packed_linear import pack_linear, packed_linear, take_packed_rows


@dataclass(frozen=True)
class LinearMethod:
    """The three operations on a kind of packed weight.

    Attributes:
        pack: (weight [N, K], bias [N] or None, float_out, gated) -> the packed weight; see pack_linear.
        apply: (x [T, K], packed, float_out, norm) -> [T, N]; see packed_linear.
        take_rows: (packed with float_out, rows int64 [I]) -> the packed weight of these outputs alone.
    """

    pack: Callable[..., Any]
    apply: Callable[..., Tensor]
    take_rows: Callable[[Any, Tensor], Any]


UNQUANTIZED = LinearMethod(pack_linear, packed_linear, take_packed_rows)
INT8 = LinearMethod(pack_int8_linear, int8_linear, take_int8_rows)


def linear_method(quantization: str | None) -> LinearMethod:
    """The method of a ModelConfig's `quantization`."""
    return INT8 if quantization == "int8" else UNQUANTIZED
