"""SqueezeLLM checkpoints.

A module with weight [N, K] of b bits has
- qweight: int32 [K b / 32, N], the codes of each output down a column of words, low bits first;
- lookup_table: [N, 2 ** b], each output's values;
and, where some values are kept apart ("dense and sparse"), which are added:
- rows, cols, vals: a sparse matrix [N, K] in compressed rows (int32 [N + 1], int32 [M], float [M]);
- full_rows, full_row_indices: whole rows of one, [K, R] (a row down a column), and which they are, int32 [R].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm.ops.quantized_tensor import QuantizedTensor, SparseRows
from vllm.quantization.bits import unpack
from vllm.quantization.setting_values import read_one
from vllm.quantization.stored import FLOATS, StoredConfig, StoredTensors, WeightFormat
from vllm.quantization.weight import QuantizedWeight

_BITS = (3, 4)


class SqueezeLLMConfig(StoredConfig):
    """See the module."""

    name = "squeezellm"
    files = ("quant_config.json",)
    settings = "wbits bits"
    names = (
        "qweight", "lookup_table", "rows", "cols", "vals", "full_rows", "full_row_indices", "startrows",
    )  # fmt: skip

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        bits = read_one(config, ("wbits", "bits"), 4)
        if bits not in _BITS or isinstance(bits, bool):
            raise ValueError(f"wbits must be one of {', '.join(map(str, _BITS))}, got {bits!r}")
        self._bits: int = bits

    @staticmethod
    def wrote(settings: dict[str, Any]) -> bool:
        return "wbits" in settings

    def weight_format(self, module: str, stored: set[str]) -> WeightFormat:
        required = ["qweight", "lookup_table"]
        for apart in (("rows", "cols", "vals"), ("full_rows", "full_row_indices")):
            if not stored.isdisjoint(apart):
                required += apart
        # startrows divides the sparse part among the threads of a kernel.
        return WeightFormat(tuple(required), ("startrows",), self._read)

    def _read(self, stored: StoredTensors) -> QuantizedWeight:
        words = stored.take("qweight", torch.int32, None, None)
        if words.shape[0] % (self._bits if self._bits == 3 else 1):
            raise stored.error("qweight", f"has {words.shape[0]} rows of words, expected a multiple of 3 for 3 bits")
        width, rows = words.shape[0] * 32 // self._bits, words.shape[1]
        table = stored.take("lookup_table", FLOATS, rows, 1 << self._bits)
        tensor = QuantizedTensor(
            codes=unpack(words.t(), self._bits),
            bits=self._bits,
            scales=torch.ones(rows, 1),
            group_size=width,
            values=table.float(),
            sparse=_sparse(stored, rows, width),
        )
        return QuantizedWeight(tensor, f"{stored.module}.qweight")


def _sparse(stored: StoredTensors, rows: int, width: int) -> SparseRows | None:
    """The values kept apart; of an entry that is named twice, the sum."""
    entries: list[tuple[Tensor, Tensor, Tensor]] = []
    if "rows" in stored:
        starts = stored.take("rows", torch.int32, rows + 1).long()
        values = stored.take("vals", FLOATS, None).float()
        columns = stored.take("cols", torch.int32, len(values)).long()
        if starts[0] != 0 or starts[-1] != len(values) or (starts.diff() < 0).any():
            raise stored.error("rows", f"does not rise from 0 to {len(values)}, the number of vals")
        _check_within(stored, "cols", columns, width)
        entries.append((torch.arange(rows).repeat_interleave(starts.diff()), columns, values))
    if "full_rows" in stored:
        which = stored.take("full_row_indices", torch.int32, None).long()
        _check_within(stored, "full_row_indices", which, rows)
        whole = stored.take("full_rows", FLOATS, width, len(which)).float()
        entries.append((which.repeat(width), torch.arange(width).repeat_interleave(len(which)), whole.flatten()))
    if not entries:
        return None
    places = torch.cat([row * width + column for row, column, _ in entries])
    places, own = places.unique(return_inverse=True)
    values = torch.zeros(len(places)).index_add_(0, own, torch.cat([values for _, _, values in entries]))
    counts = torch.bincount(places // width, minlength=rows)
    return SparseRows(torch.nn.functional.pad(counts.cumsum(0), (1, 0)), places % width, values)


def _check_within(stored: StoredTensors, name: str, indices: Tensor, size: int) -> None:
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < size:
        raise stored.error(name, f"has values outside of [0, {size})")
