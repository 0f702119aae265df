"""From logits to sampled tokens and readings: each row pays for what its own request asks, no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.buffer_utils import StagedTensor, upload
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.custom_processors import LogitsProcessorError
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.logprob import (
    FilledColumns,
    LogprobTokenIdsState,
    compute_topk_logprobs,
    greedy_readings,
)
from vllm.v1.worker.gpu.sample.min_p import apply_min_p
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.reading_clock import ReadingClock
from vllm.v1.worker.gpu.sample.sliced_processors import make_processors
from vllm.v1.worker.gpu.sample.states import Reads, SamplingStates
from vllm.v1.worker.gpu.sample.top_k import apply_top_k
from vllm.v1.worker.gpu.sample.vocab import WHOLE, WholeVocab

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.worker.gpu.states import RequestStates

# Rows that keep more tokens than this are cut apart from the others, which would otherwise pay for their width.
_WIDE_TOP_K_CUT = 256

# A row's logits are read about as fast as they are copied.
_MAX_SPAN = 1.5


class _Processed(NamedTuple):
    """What is known of R rows beside their processed logits."""

    temperature: torch.Tensor  # float32 [R], what the draw has still to divide by
    errors: dict[int, str]  # row -> how its logits processor failed
    highest: torch.Tensor | None  # float32 [R], this rank's maxima after logits processors; None: none ran


class Sampler:
    """Samples one token for each logits row and reads the logprobs that its request wants.

    Rows split in two. Plain rows (greedy, nothing changes their logits) take one fused pass over the model's
    logits as they are. The others are copied to float32 and processed in upstream's order:
    allowed_token_ids, logit_bias, min_tokens, bad_words, the request's own logits_processors, custom processors,
    penalties, temperature, min_p, argmax-invariant custom processors, top_k, top_p. Every step sees only the rows
    that use it, so a row's result does not depend on its batch; custom processors alone see all rows.

    Where several ranks share the vocabulary, each samples the same batch from its slice of the logits, and `vocab`
    makes the results those of the whole rows, on every rank.
    """

    def __init__(self, config: VllmConfig, device: torch.device, vocab: WholeVocab = WHOLE) -> None:
        """
        Args:
            vocab: how this rank's logits are read.

        Raises:
            LogitsProcessorError: the constructor of a custom processor raised.
        """
        model_config, max_num_reqs = config.model_config, config.scheduler_config.max_num_seqs
        self.states = SamplingStates(max_num_reqs, model_config.vocab_size, device, model_config.seed)
        self.vocab = vocab
        self.penalties = PenaltiesState(max_num_reqs, device, vocab)
        self.logit_bias = LogitBiasState(max_num_reqs, device, model_config.hf_config.eos_token_ids, vocab)
        self.token_ids = LogprobTokenIdsState(max_num_reqs, device)
        self.columns = FilledColumns(self.token_ids, self.states)
        self.bad_words = BadWordsState(vocab)
        self.request_processors, self.custom = make_processors(config, device, vocab)
        self.reading_clock = ReadingClock()
        # Whether somebody on the host follows what is sampled, and must see no row that is dropped later.
        self.is_followed = self.custom is not None

    def add_request(self, slot: int, params: SamplingParams, request_id: str) -> None:
        """Stage the state of the request that takes `slot`, over whatever the slot's last owner left.

        Args:
            request_id: seeds a request that has no seed; see SamplingStates.add_request.
        """
        self.states.add_request(slot, params, request_id)
        self.penalties.add_request(slot, params)
        self.logit_bias.add_request(slot, params)
        self.token_ids.add_request(slot, params)
        self.bad_words.add_request(slot, params)
        self.request_processors.add_request(slot, params)
        if self.custom is not None:
            self.custom.add_request(slot, params)

    def remove_request(self, slot: int) -> None:
        """The slot's request is gone."""
        self.token_ids.remove_request(slot)
        self.bad_words.remove_request(slot)
        self.request_processors.remove_request(slot)
        if self.custom is not None:
            self.custom.remove_request(slot)

    def apply_staged_writes(self) -> None:
        """Make what add_request staged visible to device code; once a step, before sampling."""
        self.states.apply_staged_writes()
        self.penalties.apply_staged_writes()
        self.logit_bias.apply_staged_writes()
        self.token_ids.apply_staged_writes()

    def __call__(self, logits: torch.Tensor, slots: np.ndarray, states: RequestStates) -> SamplerOutput:
        """Sample. Does not wait for the device; where ranks share the vocabulary, rows with top-p alone, or with
        processors, do.

        Args:
            logits: this rank's, [L, V] where it is alone, in float32, bfloat16 or float16; left as they are.
            slots: int64 [L], the slot of each row, distinct.
            states: token ids and lengths by slot; the token that a row draws is its request's `total_len`-th.
        """
        if self.custom is None:
            return self._sample(logits, slots, states)
        try:
            self.custom.update_state(slots, states)
            return self._sample(logits, slots, states)
        except BaseException as error:
            # Some may have been told of the step and others not, or only half done with it.
            self.custom.discard()
            if isinstance(error, LogitsProcessorError):
                return SamplerOutput.failed(len(slots), logits.device, str(error))
            raise

    def _sample(self, logits: torch.Tensor, slots: np.ndarray, states: RequestStates) -> SamplerOutput:
        output = SamplerOutput(
            torch.empty(len(slots), dtype=torch.int32, device=logits.device),
            torch.empty(len(slots), dtype=torch.float32, device=logits.device),
        )
        plain = self.is_plain(slots, states)
        self._sample_plain(logits, slots, np.flatnonzero(plain), output)
        others = np.flatnonzero(~plain)
        if others.size:
            self._sample_processed(logits, slots, others, states, output)
        return output

    def is_plain(self, slots: np.ndarray, states: RequestStates) -> np.ndarray:
        """bool [R]: rows that are greedy and that nothing processes."""
        changed = self.penalties.uses(slots) | self.logit_bias.uses(slots, states)
        for state in (self.bad_words, self.request_processors):
            if state.in_use:
                changed |= state.uses(slots)
        greedy = self.states.is_greedy(slots)
        if self.custom is not None:
            if self.custom.needs_all_rows(all_greedy=bool(greedy.all())):
                return np.zeros(len(slots), dtype=bool)
            changed |= self.custom.touches(slots)
        return greedy & ~changed

    # -- plain rows ------------------------------------------------------------------------------------------

    def _sample_plain(self, logits: torch.Tensor, slots: np.ndarray, plain: np.ndarray, output: SamplerOutput) -> None:
        for members, kind in self.states.reading_groups(slots[plain], by_mode=False):
            rows = plain[members]
            span, is_own = _span(rows)
            has_strangers = len(span) > len(rows)
            part = _take(logits, span)
            if not kind:
                token_ids, health = self.vocab.most_likely(part)
            else:
                own_slots = slots[rows]
                with self.reading_clock.running(logits.device):
                    # Strangers read what some row of the group reads.
                    readers = np.where(is_own, slots[span], own_slots[0]) if has_strangers else own_slots
                    columns = self.columns.of(part, readers)
                    token_ids, tensors = greedy_readings(part, columns, bool(kind & Reads.ENTROPY), self.vocab)
                owners = np.where(is_own, span, -1).tolist() if has_strangers else _as_range(rows)
                output.logprobs.append((owners, tensors))
                health = tensors.lse
            if has_strangers:
                chosen = upload(np.flatnonzero(is_own), logits.device)
                token_ids, health = token_ids[chosen], health[chosen]
            _put(output.sampled_token_ids, rows, token_ids)
            _put(output.health, rows, health)

    # -- the others ------------------------------------------------------------------------------------------

    def _sample_processed(
        self,
        logits: torch.Tensor,
        slots: np.ndarray,
        rows: np.ndarray,
        states: RequestStates,
        output: SamplerOutput,
    ) -> None:
        device = logits.device
        own_slots = slots[rows]
        processed = self.vocab.workspace(_float32_copy(logits, rows))
        # The maximum of a row with a NaN is NaN; processing could hide it.
        maxima = [processed.amax(dim=-1)]
        work = self._process(processed, own_slots, states)
        if work.highest is not None:
            maxima.append(work.highest)
        index = upload(own_slots, device)
        positions = upload(states.total_len[own_slots].astype(np.int64), device)
        drawn = self.vocab.draw(processed, work.temperature, self.states.seeds.tensor[index], positions, maxima)
        token_ids, (highest, *later) = drawn.token_ids, drawn.maxima
        _put(output.sampled_token_ids, rows, token_ids)
        _put(output.health, rows, torch.where(highest.isfinite(), drawn.logits, highest))
        if later:
            output.corrupted = torch.zeros(len(slots), dtype=torch.bool, device=device)
            non_finite = later[0].isnan() | (later[0] == torch.inf)
            _put(output.corrupted, rows, highest.isfinite() & non_finite)
        output.processor_errors = {int(rows[row]): message for row, message in work.errors.items()}
        for members, kind in self.states.reading_groups(own_slots, by_mode=True):
            if not kind:
                continue
            part = _take(processed, members) if kind & Reads.PROCESSED else _take(logits, rows[members])
            tensors = self._read(part, kind, _take(token_ids, members), own_slots[members])
            output.logprobs.append((_as_range(rows[members]), tensors))

    def _process(self, logits: torch.Tensor, slots: np.ndarray, states: RequestStates) -> _Processed:
        """Process a workspace, float32 [R, V], in place."""
        self.logit_bias.apply(logits, slots, states)
        self.bad_words.apply(logits, slots, states)
        errors = self.request_processors.apply(logits, slots, states)
        if self.custom is not None:
            errors.update(self.custom.apply(logits, slots))

        def penalise(part: torch.Tensor, rows: np.ndarray) -> None:
            self.penalties.apply(part, slots[rows], states)

        _on_rows(logits, self.penalties.uses(slots), penalise)
        temperature = self._scale(logits, slots)
        self._cut_min_p(logits, slots)
        if self.custom is not None:
            errors.update(self.custom.apply_argmax_invariant(logits, slots, ~self.states.is_greedy(slots)))
        any_ran = self.custom is not None or self.request_processors.in_use
        highest = logits.amax(dim=-1) if any_ran else None
        self._cut_top(logits, slots)
        return _Processed(temperature, errors, highest)

    def _scale(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        """Divide by the temperature, in place, the rows that somebody looks at before the draw, which divides
        by what this returns, float32 [R]: 1 for those rows, the request's temperature for the others."""
        params = self.states
        temperature = params.temperature.tensor[upload(slots, logits.device)]

        def divide(part: torch.Tensor, rows: np.ndarray) -> None:
            index = upload(rows, part.device)
            part.div_(temperature[index][:, None])
            temperature[index] = 1.0

        looked_at = params.cuts(slots) | (params.reads[slots] & Reads.PROCESSED > 0)
        if self.custom is not None:
            looked_at |= self.custom.has_argmax_invariant
        _on_rows(logits, looked_at & ~params.is_greedy(slots), divide)
        return temperature

    def _cut_min_p(self, logits: torch.Tensor, slots: np.ndarray) -> None:
        def cut(part: torch.Tensor, rows: np.ndarray) -> None:
            apply_min_p(part, _of_slots(self.states.log_min_p, slots[rows]), self.vocab)

        _on_rows(logits, self.states.uses_min_p(slots), cut)

    def _cut_top(self, logits: torch.Tensor, slots: np.ndarray) -> None:
        params = self.states

        def cut_top_k(part: torch.Tensor, rows: np.ndarray) -> None:
            own = slots[rows]
            widest = int(params.top_k.np[own].max())
            apply_top_k(part, _of_slots(params.top_k, own), widest, _of_slots(params.top_p, own), self.vocab)

        def cut_top_p(part: torch.Tensor, rows: np.ndarray) -> None:
            self.vocab.keep_top_p_(part, _of_slots(params.top_p, slots[rows]))

        top_k, wide = params.uses_top_k(slots), params.top_k.np[slots] > _WIDE_TOP_K_CUT
        _on_rows(logits, top_k & ~wide, cut_top_k)
        _on_rows(logits, top_k & wide, cut_top_k)
        _on_rows(logits, params.uses_top_p(slots) & ~top_k, cut_top_p)

    # -- readings --------------------------------------------------------------------------------------------

    def _read(self, logits: torch.Tensor, kind: int, token_ids: torch.Tensor, slots: np.ndarray) -> LogprobsTensors:
        with self.reading_clock.running(logits.device):
            columns = self.columns.of(logits, slots)
            entropy = bool(kind & Reads.ENTROPY)
            return compute_topk_logprobs(
                logits, columns.num_topk, token_ids, entropy=entropy, vocab=self.vocab, columns=columns
            )


def _of_slots(table: StagedTensor, slots: np.ndarray) -> torch.Tensor:
    return table.tensor[upload(slots, table.device)]


def _span(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows (ascending) with the strangers between them, and which of these are the rows; or the rows alone, where
    the strangers are too many: up to some share, it is cheaper to read them, too, than to copy rows together."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 > _MAX_SPAN * len(rows):
        return rows, np.ones(len(rows), dtype=bool)
    is_own = np.zeros(last - first + 1, dtype=bool)
    is_own[rows - first] = True
    return np.arange(first, last + 1), is_own


def _take(table: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """The rows (ascending) of a [L, ...] tensor; a view when they stand together."""
    if _stand_together(rows):
        return table[int(rows[0]) : int(rows[-1]) + 1]
    return table[upload(rows, table.device)]


def _stand_together(rows: np.ndarray) -> bool:
    return int(rows[-1]) - int(rows[0]) + 1 == len(rows)


def _as_range(rows: np.ndarray) -> Sequence[int]:
    """The rows (ascending), as a range when they stand together."""
    return range(int(rows[0]), int(rows[-1]) + 1) if _stand_together(rows) else rows.tolist()


def _put(table: torch.Tensor, rows: np.ndarray, values: torch.Tensor) -> None:
    if len(rows) == len(table):
        table.copy_(values)
    else:
        table[upload(rows, table.device)] = values


def _float32_copy(logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    return _take(logits, rows).to(torch.float32, copy=_stand_together(rows)).contiguous()


def _on_rows(logits: torch.Tensor, chosen: np.ndarray, apply: Callable[[torch.Tensor, np.ndarray], None]) -> None:
    """Call `apply(logits of the chosen rows, the rows)`, which works in place, unless no row is chosen (bool [R])."""
    rows = np.flatnonzero(chosen)
    if not rows.size:
        return
    part = _take(logits, rows)
    apply(part, rows)
    if not _stand_together(rows):
        logits[upload(rows, logits.device)] = part
