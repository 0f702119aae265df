"""One expert's matrix, packed and put where it belongs."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from vllm.layers.linear_method import LinearMethod, pack_expert
from vllm.ops.experts import PackedExperts
from vllm.quantization.weight import QuantizedWeight


def put_expert(
    experts: PackedExperts,
    index: int,
    weights: Sequence[Tensor | QuantizedWeight],
    bias: Tensor | None,
    method: LinearMethod,
) -> None:
    """As Experts does it while a checkpoint is read."""
    method, packed = pack_expert(experts, weights, bias, method)
    experts.put(index, packed, method.apply)
