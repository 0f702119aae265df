"""Experts whose tokens may go through adapters (LoRA): one by one, where others are one operation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vllm.layers.adapted.products import AdaptedProduct, AdapterPlace, AdapterRows, StepAdapters
from vllm.layers.experts import Experts
from vllm.layers.sharding import Shard
from vllm.ops.experts import experts_one_by_one


@dataclass(eq=False)
class ExpertProduct:
    """One of an expert's two products, as a layer.

    Attributes:
        experts: all of them.
        number: the expert's, over all ranks.
        sizes: the outputs of its parts.
        width: its inputs.
        adapters: what adds to it; None: another rank has the expert.
    """

    experts: Experts
    number: int
    is_first: bool
    sizes: list[int]
    width: int
    adapters: AdaptedProduct | None = None

    @property
    def empty(self) -> Tensor:
        """[0], of the dtype and on the device of what is multiplied with."""
        return self.experts.like[:0]

    @property
    def is_held(self) -> bool:
        """Whether this rank has the expert."""
        return self.number in self.experts.experts.held


def expert_places(name: str, experts: Experts) -> Iterator[tuple[str, AdapterPlace]]:
    """The places of the experts' matrices, by the names of their weights; `name` is the experts' own."""
    *first, second = experts.shapes
    for number in range(experts.experts.size):
        for is_first, parts in ((True, first), (False, [second])):
            sizes, width = [experts.shapes[part][0] for part in parts], experts.shapes[parts[0]][1]
            product = ExpertProduct(experts, number, is_first, sizes, width)
            for index, part in enumerate(parts):
                place = AdapterPlace(product, index, Shard.whole(sizes[index]), Shard.whole(width))
                yield f"{name}.{number}.{part}.weight", place


class AdaptedExperts:
    """A layer of experts calls this in place of its operation where some rows have adapters."""

    def __init__(self, experts: Experts, step: StepAdapters, num_adapters: int) -> None:
        self._experts, self._step, self._num_adapters = (experts,), step, num_adapters
        # The adapters of the tokens of the expert that is multiplied with.
        self.own_step = StepAdapters()
        self.products: dict[tuple[bool, int], AdaptedProduct] = {}

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor | None:
        """As Experts.forward; None: no row has an adapter of experts."""
        rows = self._step.of(len(x))
        if rows is None or not any(product.is_used for product in self.products.values()):
            return None
        (layer,) = self._experts
        adapters = torch.full((len(x),), self._num_adapters, dtype=torch.int64, device=x.device)
        for adapter in range(self._num_adapters):
            adapters[rows.of(adapter)] = adapter
        first_expert = layer.experts.held.start

        def multiply(is_first: bool, index: int, inputs: Tensor, tokens: Tensor) -> Tensor:
            packed = layer.first if is_first else layer.second
            self.own_step.use({len(tokens): self._grouped(adapters[tokens])})
            product = self.products[is_first, first_expert + index]
            return product(lambda x, _, norm=None: packed.multiply(index, x).contiguous(), inputs)

        options = len(layer.first), multiply, layer.activation, first_expert, layer.weighs_inputs
        return experts_one_by_one(x, ids, weights, *options)

    def _grouped(self, adapters: Tensor) -> AdapterRows:
        order = adapters.argsort(stable=True).to(torch.int32)
        counts = torch.bincount(adapters, minlength=self._num_adapters + 1)[: self._num_adapters]
        return AdapterRows(order, torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32))
