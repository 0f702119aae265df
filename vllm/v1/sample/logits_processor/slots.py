"""Custom logits processors by slot: upstream's newer interface, and what runs one of them as our own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.interface import AddedRequest, BatchUpdate, LogitsProcessor, MoveDirectionality


class SlotTable:
    """A table with one row a slot: `np` on the host and `gpu` on the engine's device, the same memory on the CPU."""

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        host = torch.zeros(shape, dtype=torch.int32)
        self.np: np.ndarray = host.numpy()
        self.gpu = host if device.type == "cpu" else torch.zeros(shape, dtype=torch.int32, device=device)

    def write(self, slot: int, start: int, values: list[int]) -> None:
        """Put values into a slot's row, from `start` on."""
        self.np[slot, start : start + len(values)] = values
        self._upload((slot, slice(start, start + len(values))))

    def set(self, slot: int, value: int) -> None:
        self.np[slot] = value
        self._upload(slice(slot, slot + 1))

    def _upload(self, place: tuple[int, slice] | slice) -> None:
        if self.gpu.device.type != "cpu":
            self.gpu[place] = torch.from_numpy(self.np[place]).to(self.gpu.device)


class LogitsProcRequestState:
    """The requests that a processor sees, by slot; it only reads them. S = max_num_reqs.

    Attributes:
        all_token_ids: int32 [S, max_model_len], prompt and output.
        prompt_len, prefill_len: int32 [S]; equal here.
        total_len: int32 [S], known tokens.
        device: of the logits and of the tables' `gpu`.
    """

    def __init__(self, max_num_reqs: int, max_model_len: int, vocab_size: int, device: torch.device) -> None:
        self.max_num_reqs = max_num_reqs
        self.vocab_size = vocab_size
        self.device = device
        self.all_token_ids = SlotTable((max_num_reqs, max_model_len + 1), device)
        self.prompt_len = SlotTable((max_num_reqs,), device)
        self.prefill_len = self.prompt_len
        self.total_len = SlotTable((max_num_reqs,), device)


@dataclass
class LogitsContext:
    """The rows of a step's logits: R requests, and as many rows, since no tokens are drafted."""

    expanded_idx_mapping: Tensor  # int32 [R], row -> slot
    idx_mapping: Tensor  # int32 [R], request -> slot
    idx_mapping_np: np.ndarray  # int [R], the same on the host
    expanded_local_pos: Tensor  # int32 [R], 0: the row's place among its request's rows
    input_ids: Tensor  # int32 [R], the token before the one that is sampled
    pos: Tensor  # int64 [R], its position
    seq_lens_upper_bound_np: np.ndarray  # int64 [R], tokens before the one that is sampled


class SlotLogitsProcessor(ABC):
    """Changes the logits of requests that ask for it. A request has a slot, below max_num_reqs, while it runs."""

    def __init__(self, vllm_config: VllmConfig, req_states: LogitsProcRequestState) -> None:  # noqa: B027
        """`req_states` keeps the requests' tokens; it is filled before `apply`."""

    @classmethod  # noqa: B027
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Check a request's parameters before it is queued. Raises ValueError when they cannot be honoured."""

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """A request takes a slot, whose former one is gone. Returns whether `apply` changes its logits."""
        return True

    def apply_staged_writes(self) -> None:  # noqa: B027
        """Called once a step, before `apply`: bring to the device what add_request has kept."""

    @abstractmethod
    def apply(self, logits: Tensor, ctx: LogitsContext) -> Tensor:
        """Process float32 [R, V], the rows of requests that asked for it. Returns the argument, changed in place, or a
        new tensor of its shape."""


class SlotAdapter(LogitsProcessor):
    """Runs a SlotLogitsProcessor over the batch of the other interface. Only rows of its requests are processed; an
    exception from it ends these requests."""

    acts_by_row = True

    def __init__(
        self, processor_class: type[SlotLogitsProcessor], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        model, num_slots = vllm_config.model_config, vllm_config.scheduler_config.max_num_seqs
        self.__name__ = processor_class.__name__
        self._states = LogitsProcRequestState(num_slots, model.max_model_len, model.vocab_size, device)
        self._processor = processor_class(vllm_config, self._states)
        self._free = list(range(num_slots - 1, -1, -1))
        self._slots: dict[int, int] = {}  # index -> slot
        self._outputs: dict[int, list[int]] = {}  # slot -> the request's list, which grows
        self._users: set[int] = set()  # slots
        self._errors: dict[int, Exception] = {}  # slot -> why the request could not be added

    @property
    def req_info(self) -> Mapping[int, int]:
        """index -> slot of the requests whose logits change."""
        return {index: slot for index, slot in self._slots.items() if slot in self._users}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            self._follow(batch_update)
        for slot in self._users:
            known = int(self._states.total_len.np[slot])
            new = self._outputs[slot][known - int(self._states.prompt_len.np[slot]) :]
            if new:
                self._states.all_token_ids.write(slot, known, new)
                self._states.total_len.set(slot, known + len(new))
        self._processor.apply_staged_writes()

    def apply(self, logits: Tensor) -> Tensor:
        raise NotImplementedError("rows are processed by apply_to_rows")

    def apply_to_rows(self, rows: Mapping[int, Tensor]) -> dict[int, Exception]:
        """See AdapterLogitsProcessor."""
        errors = {index: self._errors[slot] for index in rows if (slot := self._slots[index]) in self._errors}
        chosen = [index for index in rows if index not in errors]
        if not chosen:
            return errors
        logits = torch.stack([rows[index] for index in chosen])
        try:
            result = self._processor.apply(logits, self._context([self._slots[index] for index in chosen]))
            for index, row in zip(chosen, result, strict=True):
                rows[index].copy_(row)
        except Exception as error:
            errors.update(dict.fromkeys(chosen, error))
        return errors

    def _context(self, slots: list[int]) -> LogitsContext:
        states, device = self._states, self._states.device
        slots_np = np.array(slots, dtype=np.int64)
        lengths = states.total_len.np[slots_np].astype(np.int64)
        mapping = torch.tensor(slots, dtype=torch.int32, device=device)
        last = states.all_token_ids.np[slots_np, lengths - 1]
        return LogitsContext(
            expanded_idx_mapping=mapping,
            idx_mapping=mapping,
            idx_mapping_np=slots_np,
            expanded_local_pos=torch.zeros_like(mapping),
            input_ids=torch.from_numpy(last).to(device),
            pos=torch.from_numpy(lengths - 1).to(device),
            seq_lens_upper_bound_np=lengths,
        )

    def _follow(self, update: BatchUpdate) -> None:
        for index in update.removed:
            self._leave(index)
        for added in update.added:
            self._leave(added[0])
            self._join(added)
        for first, second, direction in update.moved:
            moved = self._slots.pop(first)
            if direction is MoveDirectionality.SWAP:
                self._slots[first] = self._slots[second]
            self._slots[second] = moved

    def _leave(self, index: int) -> None:
        slot = self._slots.pop(index, None)
        if slot is not None:
            self._free.append(slot)
            self._users.discard(slot)
            self._outputs.pop(slot)
            self._errors.pop(slot, None)

    def _join(self, added: AddedRequest) -> None:
        index, params, prompt_ids, output_ids = added
        slot, prompt_ids = self._free.pop(), prompt_ids or []
        self._slots[index], self._outputs[slot] = slot, output_ids
        self._states.all_token_ids.write(slot, 0, prompt_ids)
        self._states.prompt_len.set(slot, len(prompt_ids))
        self._states.total_len.set(slot, len(prompt_ids))
        try:
            uses = self._processor.add_request(slot, params)
        except Exception as error:
            self._errors[slot], uses = error, True
        if uses:
            self._users.add(slot)
