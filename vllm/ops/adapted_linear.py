"""Adapters (LoRA) that our CPU kernel adds to a product in the passes that it makes over memory anyway: rows are
multiplied with A where they are packed, and the results with B where sums are written."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from vllm.ops._dispatch import implementation
from vllm.ops.add_lora import RANK_GROUP, AddedAdapters, grouped_ranks, rank_groups
from vllm.ops.packed_linear import PANEL, interleave_gate

BLOCK = PANEL // 2
"""Columns of a block of B: half of a panel."""


class AdaptedWeights:
    """L adapters of a packed weight [N, K], all zero at first.

    Their memory follows the weight's panels: for each half of one, and each part that has columns in it, the block of
    each adapter's B. Of bfloat16 two values of K, or two ranks, stand side by side.

    Attributes:
        a: [L, P groups, K, RANK_GROUP], or [L, P groups, ceil(K / 2), RANK_GROUP, 2].
        b: [blocks, L, groups * RANK_GROUP, BLOCK], or [blocks, L, groups * RANK_GROUP / 2, BLOCK, 2].
        ranks: int32 [L, P].
        scales: float32 [L, P].
        gain, shift: float32 [L, columns of the panels]; None: no adapter has them.
    """

    def __init__(
        self, sizes: Sequence[int], width: int, gated: bool, like: Tensor, num_adapters: int, max_rank: int
    ) -> None:
        """`sizes` are the parts' outputs, side by side in the weight, which was packed for a gate or without one;
        `width` is K. `like` has the dtype of x."""
        borders = torch.tensor([0, *accumulate(sizes)])
        columns = torch.arange(1, int(borders[-1]) + 1)
        columns = interleave_gate(columns) if gated else columns
        # The panels hold the weight's columns by half panels; -1: there is none.
        filled = torch.zeros(-(-len(columns) // PANEL) * PANEL, dtype=torch.int64)
        filled[: len(columns)] = columns
        self._columns = filled.view(-1, BLOCK) - 1
        part_of = torch.bucketize(self._columns, borders, right=True) - 1
        halves = [sorted(set(each[each >= 0].tolist())) for each in part_of]
        self._block_halves = torch.tensor([half for half, parts in enumerate(halves) for _ in parts])
        self._first_blocks = torch.tensor([0, *accumulate(map(len, halves))], dtype=torch.int32)
        self._block_parts = torch.tensor([part for parts in halves for part in parts], dtype=torch.int32)
        self._borders, self._width = borders.tolist(), width
        self._groups = groups = rank_groups(max_rank)
        ranks = groups * RANK_GROUP
        blocks = len(self._block_parts)
        self.a = side_by_side(like.new_zeros(num_adapters, len(sizes) * groups, width, RANK_GROUP))
        self.b = side_by_side(like.new_zeros(blocks, num_adapters, ranks, BLOCK))
        self.ranks = torch.zeros(num_adapters, len(sizes), dtype=torch.int32)
        self.scales = torch.zeros(num_adapters, len(sizes))
        self.gain: Tensor | None = None
        self.shift: Tensor | None = None
        self._number = self._make()

    def of(self, order: Tensor, starts: Tensor) -> AddedAdapters:
        """The arguments that a product with these rows takes."""
        return AddedAdapters(self._number, order, starts)

    def clear(self, adapter: int) -> None:
        """Let it change nothing."""
        self.ranks[adapter] = 0
        self.put_vectors(adapter, None, None)

    def put(self, adapter: int, part: int, a: Tensor, b: Tensor, scale: float) -> None:
        """Let it add scale (x a^T) b^T to a part's outputs; a [r, K], b [N_p, r]."""
        rank, first = len(a), part * self._groups
        self.a[adapter, first : first + self._groups] = side_by_side(grouped_ranks(a.to(self.a), self._groups))
        own = self._block_parts == part
        columns = self._columns[self._block_halves[own]]
        start, end = self._borders[part : part + 2]
        is_own = (columns >= start) & (columns < end)
        wide = self.b.new_zeros(*columns.shape, self._groups * RANK_GROUP)
        wide[is_own] = torch.nn.functional.pad(b.to(self.b), (0, wide.shape[-1] - rank))[columns[is_own] - start]
        self.b[own, adapter] = side_by_side(wide.transpose(-1, -2))
        self.ranks[adapter, part] = rank
        self.scales[adapter, part] = scale

    def put_vectors(self, adapter: int, gain: Tensor | None, shift: Tensor | None) -> None:
        """Let it make outputs y of the weight, their bias included, y (1 + gain) + shift before it adds to them; [N],
        None = 0."""
        if self.gain is None or self.shift is None:
            if gain is None and shift is None:
                return
            self.gain, self.shift = (torch.zeros(len(self.ranks), self._columns.numel()) for _ in range(2))
            self._number = self._make()
        columns = self._columns.flatten()
        for kept, given in ((self.gain, gain), (self.shift, shift)):
            kept[adapter] = 0 if given is None else given[columns.clamp(min=0)] * (columns >= 0)

    def _make(self) -> int:
        tables = self.ranks, self.scales, self._first_blocks, self._block_parts, self.gain, self.shift
        number: int = torch.ops.vllm_cpu.make_adapted_weights(self.a, self.b, *tables, self._width)
        # At the interpreter's end the operators may be gone before the adapters.
        weakref.finalize(self, torch.ops.vllm_cpu.free_adapted_weights, number).atexit = False
        return number


def adds_adapters(tensor: Tensor) -> bool:
    """Whether a product with weights packed on the device of `tensor` can take adapters."""
    return implementation(tensor) == "cpp"


def side_by_side(values: Tensor) -> Tensor:
    """[..., n, 16] as the kernel reads it: of bfloat16 [..., ceil(n / 2), 16, 2], filled up with zeros."""
    if values.dtype != torch.bfloat16:
        return values.contiguous()
    if values.shape[-2] % 2:
        values = torch.nn.functional.pad(values, (0, 0, 0, 1))
    return values.unflatten(-2, (-1, 2)).transpose(-1, -2).contiguous()
