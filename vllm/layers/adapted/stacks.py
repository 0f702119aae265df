"""Adapters of a layer as `add_lora_` takes them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from vllm.ops.add_lora import RANK_GROUP, add_lora_, add_lora_embedding_, grouped_ranks, rank_groups


class AdapterRows(NamedTuple):
    """Rows by adapter, as `add_lora_` takes them; in `order` those without one follow the others."""

    order: Tensor  # int32 [T]
    starts: Tensor  # int32 [L + 1]

    def of(self, adapter: int) -> Tensor:
        """int64: the rows of one. Waits for the device."""
        first, end = self.starts[adapter : adapter + 2].tolist()
        return self.order[first:end].long()


class AdapterStacks:
    """L adapters of a layer, all zero at first; gain and shift are None until an adapter has them."""

    def __init__(self, sizes: Sequence[int], width: int, like: Tensor, num_adapters: int, max_rank: int) -> None:
        """`sizes` and `width` are what b's and a's parts hold; `like` has the dtype and the device of what is
        multiplied with."""
        columns = [0, *accumulate(sizes)]
        self._columns, self._groups, self._like = columns, rank_groups(max_rank), like
        self._a = like.new_zeros(num_adapters, len(sizes) * self._groups, width, RANK_GROUP)
        self._b = like.new_zeros(num_adapters, self._groups * RANK_GROUP, columns[-1])
        self._ranks = torch.zeros(num_adapters, len(sizes), dtype=torch.int32, device=like.device)
        self._scales = torch.zeros(num_adapters, len(sizes), dtype=torch.float32, device=like.device)
        self._borders = torch.tensor(columns, dtype=torch.int32, device=like.device)
        self.gain: Tensor | None = None
        self.shift: Tensor | None = None

    def clear(self, adapter: int) -> None:
        """Let it change nothing."""
        self._ranks[adapter] = 0
        self.put_vectors(adapter, None, None)

    def put(self, adapter: int, part: int, a: Tensor, b: Tensor, scale: float) -> None:
        """Let it add scale (x a^T) b^T to a part's outputs; a [r, K], b [N_p, r]."""
        rank, first = len(a), part * self._groups
        self._a[adapter, first : first + self._groups] = grouped_ranks(a.to(self._a), self._groups)
        self._b[adapter, :rank, self._columns[part] : self._columns[part + 1]] = b.T
        self._ranks[adapter, part] = rank
        self._scales[adapter, part] = scale

    def put_vectors(self, adapter: int, gain: Tensor | None, shift: Tensor | None) -> None:
        """Let it make outputs y of the layer y (1 + gain) + shift before it adds to them; [N], None = 0."""
        if self.gain is None or self.shift is None:
            if gain is None and shift is None:
                return
            shape = len(self._ranks), self._columns[-1]
            self.gain = torch.zeros(shape, dtype=torch.float32, device=self._like.device)
            self.shift = torch.zeros_like(self.gain)
        for kept, given in ((self.gain, gain), (self.shift, shift)):
            kept[adapter] = 0 if given is None else given

    def add_(self, out: Tensor, x: Tensor, rows: AdapterRows) -> Tensor:
        """`out` [T, N] with what the rows' adapters change, in place, where x [T, K] was multiplied."""
        tables = self._a, self._b, self._ranks, self._scales, self._borders
        add_lora_(*(out, x, *rows, *tables, self.gain, self.shift))
        return out

    def add_embedding_(self, out: Tensor, ids: Tensor, rows: AdapterRows) -> Tensor:
        """The same where tokens [T] were looked up."""
        add_lora_embedding_(*(out, ids, *rows, self._a, self._b, self._ranks, self._scales, self._borders))
        return out
