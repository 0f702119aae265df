"""Grammars in the worker: what they forbid (structured_outputs), by slot, and the tokens that they force."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from vllm.config import ModelConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.structured_output.matcher import Matcher, ThinkingMatcher, all_bits_but, grammars_of
from vllm.v1.worker.gpu.buffer_utils import upload
from vllm.v1.worker.gpu.guests import RunnerGuest
from vllm.v1.worker.gpu.sample.output import AllowedMass
from vllm.v1.worker.gpu.sample.sampler import Masks
from vllm.v1.worker.gpu.sample.vocab import WHOLE, WholeVocab
from vllm.v1.worker.gpu.states import RequestStates


class Grammars(RunnerGuest):
    """Tells the masks which request has which slot."""

    def __init__(self, runner: Any) -> None:
        self.masks = runner.sampler.masks = GrammarMasks(runner.model_config, runner.sampler.vocab)

    def add(self, slot: int, new: NewRequestData, step: SchedulerOutput) -> None:
        self.masks.add_request(slot, new.sampling_params)

    def remove(self, slot: int) -> None:
        self.masks.remove_request(slot)


class GrammarMasks(Masks):
    """A matcher for each slot whose request has a grammar. A matcher follows the slot's tokens when its mask is needed:
    a request that begins anew with tokens it has generated needs nothing else."""

    def __init__(self, config: ModelConfig, vocab: WholeVocab = WHOLE) -> None:
        self._config = config
        self._vocab = vocab
        self._matchers: dict[int, Matcher | ThinkingMatcher] = {}
        self._reads: set[int] = set()
        # Slots with min_tokens have bits of all tokens but those that end them; and where only those are allowed.
        self._others: dict[int, np.ndarray] = {}
        self._ending: set[int] = set()
        # Slots to which forced tokens may be appended undrawn, and the tokens that they may generate.
        self._limits: dict[int, int] = {}

    @property
    def in_use(self) -> bool:
        return bool(self._matchers)

    def add_request(self, slot: int, params: SamplingParams) -> None:
        """A request has taken the slot."""
        self.remove_request(slot)
        if params.grammar is not None:
            self._matchers[slot] = grammars_of(self._config).start(params.grammar)
            if params.min_tokens:
                ends = [*self._config.hf_config.eos_token_ids, *(params.stop_token_ids or ())]
                self._others[slot] = all_bits_but(ends, self._config.vocab_size)
            if _takes_runs(params):
                self._limits[slot] = params.max_tokens or 0
        if params.grammar_readings:
            self._reads.add(slot)

    def remove_request(self, slot: int) -> None:
        """The slot has no request."""
        self._matchers.pop(slot, None)
        self._limits.pop(slot, None)
        self._others.pop(slot, None)
        self._reads.discard(slot)

    def uses(self, slots: np.ndarray) -> np.ndarray:
        return np.fromiter(map(self._matchers.__contains__, slots.tolist()), dtype=bool, count=len(slots))

    def apply(
        self, logits: Tensor, slots: np.ndarray, states: RequestStates
    ) -> tuple[dict[int, str], AllowedMass | None]:
        self._ending.clear()
        if not self.in_use:
            return {}, None
        rows = np.flatnonzero(self.uses(slots))
        masks = np.zeros((len(rows), -(-self._config.vocab_size // 32)), dtype=np.int32)
        errors: dict[int, str] = {}
        for row, slot, mask in zip(rows.tolist(), slots[rows].tolist(), masks, strict=True):
            error = self._follow(slot, states) or self._matchers[slot].fill_mask(mask)
            if error is not None:
                errors[row] = f"structured_outputs: {error}"
            elif slot in self._others and not (mask & self._others[slot]).any():
                self._ending.add(slot)
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

    def ending(self, slots: np.ndarray) -> np.ndarray:
        return np.fromiter(map(self._ending.__contains__, slots.tolist()), dtype=bool, count=len(slots))

    def forced_runs(self, slots: np.ndarray, states: RequestStates) -> dict[int, list[int]]:
        """By index into `slots`, the tokens that follow the last one without a choice. One token is left to be drawn:
        a request never ends within a run."""
        runs = {}
        for index, slot in enumerate(slots.tolist()):
            if slot in self._limits and self._follow(slot, states) is None:
                total, longest = int(states.total_len[slot]), states.token_ids.shape[1] - 1
                left = min(int(states.prompt_len[slot]) + self._limits[slot], longest) - total
                run = self._matchers[slot].forced()[: max(left - 1, 0)]
                if run:
                    runs[index] = run
        return runs

    def _follow(self, slot: int, states: RequestStates) -> str | None:
        """Take the slot's tokens that its matcher has not seen; why it cannot, or None."""
        matcher = self._matchers[slot]
        generated = states.token_ids[slot, states.prompt_len[slot] : states.total_len[slot]]
        return matcher.take(generated[matcher.num_taken :].tolist())


def _takes_runs(params: SamplingParams) -> bool:
    """Whether the grammar alone rules tokens out, none ends the answer, and readings are of the model's logits."""
    rules_out = params.allowed_token_ids or params.bad_words or params.logits_processors
    ends = params.stop_token_ids or params.repetition_detection or params._beam_length is not None
    reads_processed = params.num_logprobs is not None and (params.logprobs_mode or "").startswith("processed")
    return not (rules_out or ends or reads_processed)
