"""What grammars forbid (structured_outputs), by slot."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.structured_output.matcher import Matcher, ThinkingMatcher, grammars_of
from vllm.v1.worker.gpu.buffer_utils import upload
from vllm.v1.worker.gpu.sample.vocab import WHOLE, WholeVocab
from vllm.v1.worker.gpu.states import RequestStates


class AllowedMass(NamedTuple):
    """The raw model's probability of what a grammar allows."""

    rows: list[int]
    logs: Tensor  # float32 [len(rows)], its logarithm, in nats


class GrammarState:
    """A matcher for each slot whose request has a grammar. A matcher follows the slot's tokens when its mask is needed:
    a request that begins anew with tokens it has generated needs nothing else."""

    def __init__(self, config: ModelConfig, vocab: WholeVocab = WHOLE) -> None:
        self._config = config
        self._vocab = vocab
        self._matchers: dict[int, Matcher | ThinkingMatcher] = {}
        self._reads: set[int] = set()

    @property
    def in_use(self) -> bool:
        return bool(self._matchers)

    def add_request(self, slot: int, params: SamplingParams) -> None:
        self.remove_request(slot)
        if params.grammar is not None:
            self._matchers[slot] = grammars_of(self._config).start(params.grammar)
        if params.grammar_readings:
            self._reads.add(slot)

    def remove_request(self, slot: int) -> None:
        self._matchers.pop(slot, None)
        self._reads.discard(slot)

    def uses(self, slots: np.ndarray) -> np.ndarray:
        return np.fromiter(map(self._matchers.__contains__, slots.tolist()), dtype=bool, count=len(slots))

    def apply(
        self, logits: Tensor, slots: np.ndarray, states: RequestStates
    ) -> tuple[dict[int, str], AllowedMass | None]:
        """Set what the grammars forbid to -inf, in place, before anything else has changed the logits. Returns row ->
        why its grammar cannot go on, and what they allow of rows that read it."""
        if not self.in_use:
            return {}, None
        rows = np.flatnonzero(self.uses(slots))
        masks = np.zeros((len(rows), -(-self._config.vocab_size // 32)), dtype=np.int32)
        errors: dict[int, str] = {}
        for row, slot, mask in zip(rows.tolist(), slots[rows].tolist(), masks, strict=True):
            matcher = self._matchers[slot]
            generated = states.token_ids[slot, states.prompt_len[slot] : states.total_len[slot]]
            error = matcher.take(generated[matcher.num_taken :].tolist()) or matcher.fill_mask(mask)
            if error is not None:
                errors[row] = f"structured_outputs: {error}"
        if not len(rows):
            return errors, None
        # On all ranks alike, as they exchange sums.
        reading = [row for row in rows.tolist() if slots[row] in self._reads]
        read = upload(np.asarray(reading, np.int64), logits.device)
        before = self._vocab.log_sums(logits[read]) if reading else None
        self._vocab.keep_bits_(logits, upload(masks, logits.device), upload(rows, logits.device))
        if before is None:
            return errors, None
        return errors, AllowedMass(reading, (self._vocab.log_sums(logits[read]) - before).clamp(max=0.0))
