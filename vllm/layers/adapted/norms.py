"""Norms whose weights are others for the rows of some adapters."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from vllm.layers.adapted.products import LayerChange, StepAdapters


class AdaptedNorm:
    """A norm calls this with its result.

    Attributes:
        is_used: whether an adapter has, or had, weights of its own. Then no product takes the norm in.
    """

    def __init__(self, step: StepAdapters) -> None:
        self.is_used = False
        self._step = step
        self._weights: dict[int, tuple[Tensor, Tensor | None]] = {}  # by row

    def put(self, row: int, change: LayerChange | None) -> bool:
        """Make an adapter's change that of `row`. True: steps that were recorded before are out of date."""
        self._weights.pop(row, None)
        if change is None or change.norm is None:
            return False
        self._weights[row] = change.norm
        is_new, self.is_used = not self.is_used, True
        return is_new

    def __call__(self, normalise: Callable[..., Tensor], out: Tensor, *inputs: Tensor) -> Tensor:
        """`out` [T, ...], in place normalise(*inputs, weight, bias) for rows whose adapters have their own."""
        rows = self._step.of(len(out)) if self._weights else None
        if rows is None:
            return out
        for adapter, weights in self._weights.items():
            own = rows.of(adapter)
            if len(own):
                out[own] = normalise(*(each[own] for each in inputs), *weights)
        return out
