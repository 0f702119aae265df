"""The adapters of a worker: in the host's memory, and those of running requests in the layers' rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from vllm.config.checkpoint.text_part import text_tensor_name
from vllm.config.lora import LoRAConfig
from vllm.layers.adapted.experts import AdaptedExperts, ExpertProduct, expert_places
from vllm.layers.adapted.heads import AdaptedHeads
from vllm.layers.adapted.norms import AdaptedNorm
from vllm.layers.adapted.products import (
    AdaptedEmbedding,
    AdaptedProduct,
    AdapterRows,
    LayerChange,
    ModuleLinear,
    StepAdapters,
    WideLinear,
)
from vllm.layers.experts import Experts
from vllm.layers.latent_attention import LatentHeads
from vllm.layers.layernorm import AdaptableNorm
from vllm.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.lora.request import LoRARequest
from vllm.v1.features.adapters.adapter import AdapterFile, read_adapter
from vllm.v1.features.adapters.changes import layer_changes
from vllm.v1.features.adapters.modules import ModuleMap

NO_ADAPTER = -1

_Product = AdaptedProduct | AdaptedEmbedding | AdaptedNorm | AdaptedHeads


class AdapterManager:
    """Adapters by `lora_int_id`, a number that stands for one reading of the files.

    Attributes:
        row_of_slot: int32 [max_num_reqs], the row in the layers of the adapter of each slot's request, or NO_ADAPTER.
        version: changes when layers begin to take adapters: steps that were recorded before lack that.
    """

    def __init__(
        self, model: Any, config: LoRAConfig, max_num_reqs: int, max_tokens: int, reads_images: bool = False
    ) -> None:
        """`model` was loaded with its `adapter_places`; `reads_images`: there is a picture tower beside it."""
        self._reads_images = reads_images
        self.row_of_slot = np.full(max_num_reqs, NO_ADAPTER, dtype=np.int32)
        self.version = 0
        self._max_rank, self._num_rows = config.max_lora_rank, config.max_loras
        self._step = StepAdapters()
        places = dict(model.adapter_places)
        for name, module in model.named_modules():
            if isinstance(module, Experts):
                places |= dict(expert_places(name, module))
        self._map = ModuleMap(model, places)
        self._loaded: dict[int, dict[Any, LayerChange]] = {}
        self._numbers: list[int | None] = [None] * self._num_rows  # of the adapter in each row, the last used last
        self._slots: list[set[int]] = [set() for _ in range(self._num_rows)]  # that use each row
        self._used_last: list[int] = list(range(self._num_rows))
        self._products: dict[Any, _Product] = {}
        for place in places.values():
            layer = place.module
            if layer not in self._products and (not isinstance(layer, ExpertProduct) or layer.is_held):
                self._products[layer] = layer.adapters = self._product(layer)
        # Where recorded steps find their rows.
        self._order = torch.zeros(max_tokens, dtype=torch.int32)
        self._starts = torch.zeros(self._num_rows + 1, dtype=torch.int32)
        self._device = next(iter(self._products)).empty.device
        # The rows whose adapters have weights that recorded steps lack.
        self._unrecorded: set[int] = set()

    def add(self, request: LoRARequest) -> bool:
        """Read an adapter into memory; False: it is there. ValueError, and nothing changes: see `read_adapter` and
        `layer_changes`."""
        if request.lora_int_id in self._loaded:
            return False
        found = read_adapter(Path(request.lora_path).expanduser(), self._max_rank)
        if self._reads_images:
            _check_decoders(found)
        self._loaded[request.lora_int_id] = layer_changes(found, self._map)
        return True

    def remove(self, number: int) -> bool:
        """Free an adapter's memory; False: there is none. Requests that run with it keep their row."""
        if number in self._numbers:
            self._clear_unused(self._numbers.index(number))
        return self._loaded.pop(number, None) is not None

    def numbers(self) -> set[int]:
        """The numbers of the adapters that are loaded."""
        return set(self._loaded)

    # -- steps ------------------------------------------------------------------------------------------------

    def add_request(self, slot: int, request: LoRARequest | None) -> None:
        """The request in `slot` runs with an adapter that is loaded, or without one."""
        self.remove_request(slot)
        if request is None:
            return
        row = self._row_of(request.lora_int_id)
        self._slots[row].add(slot)
        self._used_last.remove(row)
        self._used_last.append(row)
        self.row_of_slot[slot] = row

    def remove_request(self, slot: int) -> None:
        """Its slot is free."""
        row = int(self.row_of_slot[slot])
        if row != NO_ADAPTER:
            self._slots[row].discard(slot)
            self.row_of_slot[slot] = NO_ADAPTER
            if self._numbers[row] not in self._loaded:
                self._clear_unused(row)

    @torch.inference_mode()
    def _clear_unused(self, row: int) -> None:
        """Give back what an adapter without requests holds beside the row's own memory."""
        if not self._slots[row]:
            self._numbers[row] = None
            self._unrecorded.discard(row)
            for product in self._products.values():
                self.version += product.put(row, None)

    def _product(self, layer: Any) -> _Product:
        if isinstance(layer, AdaptableNorm):
            return AdaptedNorm(self._step)
        if isinstance(layer, LatentHeads):
            return AdaptedHeads(layer, self._step)
        common = layer.empty, self._step, self._num_rows, self._max_rank
        if isinstance(layer, VocabParallelEmbedding):
            return AdaptedEmbedding([layer.width], len(layer.vocab_range), *common)
        if isinstance(layer, ParallelLMHead):
            return AdaptedProduct([len(layer.vocab_range)], layer.width, *common, packed=layer.packed)
        if isinstance(layer, ExpertProduct):
            if layer.experts.adapters is None:
                layer.experts.adapters = AdaptedExperts(layer.experts, self._step, self._num_rows)
            experts: Any = layer.experts.adapters
            product = AdaptedProduct(layer.sizes, layer.width, layer.empty, experts.own_step, *common[2:])
            experts.products[layer.is_first, layer.number] = product
            return product
        if isinstance(layer, WideLinear | ModuleLinear):
            return AdaptedProduct([len(layer.weight)], layer.width, *common)
        sizes = [len(rows.held) for rows in layer.parts.values()]
        return AdaptedProduct(sizes, len(layer.inputs.held), *common, packed=layer.packed)

    def use_one(self, slot: int) -> None:
        """Before layers that take rows of the request in `slot` alone."""
        row = int(self.row_of_slot[slot])
        self._step.use_one(None if row == NO_ADAPTER else row, self._num_rows)

    def use(self, *slots_of_rows: np.ndarray) -> bool:
        """Before a step: the slot of each row, of all rows that layers may have in it. Returns whether one has an
        adapter."""
        rows = {}
        for slots in slots_of_rows:
            adapters = self.row_of_slot[slots]
            if len(slots) not in rows and (adapters != NO_ADAPTER).any():
                rows[len(slots)] = self._grouped(adapters)
        if rows:
            # Such as the rows whose results are needed, without those of adapters.
            for slots in slots_of_rows:
                rows.setdefault(len(slots), self._grouped(self.row_of_slot[slots]))
        self._step.use(rows)
        return bool(rows)

    def use_recorded(self, slots: np.ndarray) -> bool:
        """As `use`, of a step's only rows, in memory that stays where it is."""
        adapters = self.row_of_slot[slots]
        if not (adapters != NO_ADAPTER).any():
            self._step.use({})
            return False
        order, starts = _sorted(adapters, self._num_rows)
        self._order[: len(slots)] = torch.from_numpy(order)
        self._starts.copy_(torch.from_numpy(starts))
        self._step.use({len(slots): AdapterRows(self._order[: len(slots)], self._starts)})
        return True

    def can_record(self, slots: np.ndarray) -> bool:
        """Whether a step of these slots may be recorded."""
        return not self._unrecorded or not self._unrecorded & set(self.row_of_slot[slots].tolist())

    @property
    def changes_head(self) -> bool:
        """Whether an adapter's logits are others than the head's product."""
        return any(product.is_used for layer, product in self._products.items() if isinstance(layer, ParallelLMHead))

    def _grouped(self, adapters: np.ndarray) -> AdapterRows:
        order, starts = (torch.from_numpy(each).to(self._device) for each in _sorted(adapters, self._num_rows))
        return AdapterRows(order, starts)

    def _row_of(self, number: int) -> int:
        """The row that has the adapter, or now gets it: the one that no request has used for longest."""
        if number in self._numbers:
            return self._numbers.index(number)
        row = next((row for row in self._used_last if not self._slots[row]), None)
        if row is None:
            raise RuntimeError(f"all {self._num_rows} rows of adapters are used by requests (max_loras)")
        changes = self._loaded[number]
        for layer, product in self._products.items():
            self.version += product.put(row, changes.get(layer))
        self._unrecorded.discard(row)
        if any(map(_is_unrecorded, changes, changes.values())):
            self._unrecorded.add(row)
        self._numbers[row] = number
        return row


def _is_unrecorded(layer: Any, change: LayerChange) -> bool:
    """Whether a layer's change is none of the operations that are recorded."""
    if isinstance(layer, ExpertProduct | LatentHeads):
        return True
    # The head is no part of a recorded step.
    is_scaled = isinstance(layer, VocabParallelEmbedding) and change.gain is not None
    return not isinstance(layer, ParallelLMHead) and (is_scaled or change.is_whole)


def _sorted(adapters: np.ndarray, num_adapters: int) -> tuple[np.ndarray, np.ndarray]:
    """int32 [T]: the rows by adapter, those without one at the end; and int32 [L + 1], where each adapter's begin."""
    order = np.argsort(np.where(adapters == NO_ADAPTER, num_adapters, adapters), kind="stable").astype(np.int32)
    starts = np.zeros(num_adapters + 1, dtype=np.int32)
    np.cumsum(np.bincount(adapters[adapters != NO_ADAPTER], minlength=num_adapters), out=starts[1:])
    return order, starts


def _check_decoders(found: AdapterFile) -> None:
    """Raises ValueError where an adapter changes the tower: without its share, readings behind pictures were others."""
    for module in (*found.modules, *(name.rpartition(".")[0] for name in found.saved), *found.tokens):
        # Heads of classes have names without a dot.
        if "." in module and text_tensor_name(f"{module}.weight") is None:
            raise ValueError(
                f"{found.name}: {module} is a part of the picture tower, to which no adapters are applied: merge the "
                "adapter into the model, or pass language_model_only=True to use its text decoder's part alone"
            )
