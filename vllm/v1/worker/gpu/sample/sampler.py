"""From logits to sampled tokens and readings; a row's cost depends on its own request alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from vllm.config import VllmConfig
from vllm.ops.top_p import keep_top_p_
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.buffer_utils import upload
from vllm.v1.worker.gpu.sample.logit_bias import BadWordsState, LogitBiasState
from vllm.v1.worker.gpu.sample.logprob import (
    FilledColumns,
    LogprobTokenIdsState,
    ReadingClock,
    as_tensors,
    compute_topk_logprobs,
    greedy_readings,
)
from vllm.v1.worker.gpu.sample.output import AllowedMass, SamplerOutput
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState
from vllm.v1.worker.gpu.sample.processors import LogitsProcessorError, make_processors
from vllm.v1.worker.gpu.sample.states import Reads, SamplingStates
from vllm.v1.worker.gpu.sample.vocab import WHOLE, WholeVocab
from vllm.v1.worker.gpu.states import RequestStates

# Rows with a larger top_k are cut apart from the others, which would otherwise be cut at their width.
_WIDE_TOP_K_CUT = 256

# Reading rows that lie between a group's costs about as much as copying the group together.
_MAX_SPAN = 1.5

_VECTOR = 16  # floats of the widest SIMD register


class Masks:
    """The first stage: masks of slots, which say what is forbidden whatever else changes the logits. A guest may have
    some; this class has none."""

    @property
    def in_use(self) -> bool:
        """Whether any slot has one."""
        return False

    def uses(self, slots: np.ndarray) -> np.ndarray:
        """bool [R]: rows that have one."""
        return np.zeros(len(slots), dtype=bool)

    def apply(
        self, logits: Tensor, slots: np.ndarray, states: RequestStates
    ) -> tuple[dict[int, str], AllowedMass | None]:
        """Set what is forbidden to -inf, in place, before anything else has changed the logits, float32 [R, V]. Returns
        row -> why its request cannot go on, and what is allowed of rows that read it."""
        return {}, None

    def ending(self, slots: np.ndarray) -> np.ndarray:
        """bool [R]: rows that `apply` left nothing but an end, which min_tokens must not forbid, then."""
        return np.zeros(len(slots), dtype=bool)


class Sampler:
    """Samples one token for each logits row and reads the logprobs that its request needs.

    Plain rows (greedy, with unchanged logits) take one fused pass over the model's logits. The others are copied to
    float32 and processed in upstream's order: structured_outputs, allowed_token_ids, logit_bias, min_tokens, bad_words,
    the request's own logits_processors, custom processors, penalties, temperature, min_p, argmax-invariant custom
    processors, top_k, top_p. Every stage gets only the rows that use it, so a row's result does not depend on its
    batch; only custom processors see all rows.

    Each stage has a state by slot: `add_request` and `remove_request` fill and clear a slot, `apply_staged_writes`
    uploads what was filled, `uses` gives the rows that need the stage, bool [R], and `apply` changes a workspace,
    float32 [R, V], in place.

    Where several ranks share the vocabulary, each samples the same batch from its slice of the logits, and `vocab`
    makes the results those of the whole rows, on every rank.
    """

    def __init__(self, config: VllmConfig, device: torch.device, vocab: WholeVocab = WHOLE) -> None:
        """Raises LogitsProcessorError when the constructor of a custom processor does."""
        model_config, max_num_reqs = config.model_config, config.scheduler_config.max_num_seqs
        self.states = SamplingStates(max_num_reqs, model_config.vocab_size, device, model_config.seed)
        self.vocab = vocab
        self.penalties = PenaltiesState(max_num_reqs, device, vocab)
        self.logit_bias = LogitBiasState(max_num_reqs, device, model_config.hf_config.eos_token_ids, vocab)
        self.token_ids = LogprobTokenIdsState(max_num_reqs, device)
        self.columns = FilledColumns(self.token_ids, self.states)
        self.bad_words = BadWordsState(vocab)
        self.masks = Masks()  # filled by a guest, which adds and removes requests itself
        self.trace = TraceState()
        self.request_processors, self.custom = make_processors(config, device, vocab)
        self.reading_clock = ReadingClock()
        # Whether host code observes every sampled row, and so must see none that is discarded later.
        self.is_followed = self.custom is not None
        self.version = 0  # counts the changes of any slot
        self._applied_version = 0

    def add_request(self, slot: int, params: SamplingParams, request_id: str) -> None:
        """Stage the state of the request that takes `slot`; for `request_id` see SamplingStates.add_request."""
        self.version += 1
        self.states.add_request(slot, params, request_id)
        stages = (self.penalties, self.logit_bias, self.token_ids, self.bad_words, self.request_processors, self.trace)
        for state in stages:
            state.add_request(slot, params)
        if self.custom is not None:
            self.custom.add_request(slot, params)

    def remove_request(self, slot: int) -> None:
        self.version += 1
        for state in (self.token_ids, self.bad_words, self.request_processors, self.trace, self.custom):
            if state is not None:
                state.remove_request(slot)

    def apply_staged_writes(self) -> None:
        """Make what add_request staged visible to device code; once a step, before sampling."""
        if self._applied_version == self.version:
            return
        self._applied_version = self.version
        for state in (self.states, self.penalties, self.logit_bias, self.token_ids):
            state.apply_staged_writes()

    def __call__(
        self, logits: Tensor, slots: np.ndarray, states: RequestStates, lengths: np.ndarray | None = None
    ) -> SamplerOutput:
        """Sample. Does not wait for the device, except, where ranks share the vocabulary, for rows with top-p alone or
        with processors. `logits` are this rank's, [L, V] where it is alone, in float32, bfloat16 or float16, and not
        changed; `slots`, int64 [L], are each row's. A row samples the token at position `lengths`, int32 [L]; None:
        `total_len`. Slots of rows that depend on history are distinct, and these sample at `total_len`."""
        if self.custom is None:
            return self._sample(logits, slots, states, lengths)
        try:
            self.custom.update_state(slots, states)
            return self._sample(logits, slots, states, lengths)
        except BaseException as error:
            # Some processors may have seen the step and others not, or only part of it.
            self.custom.discard()
            if isinstance(error, LogitsProcessorError):
                return SamplerOutput.failed(len(slots), logits.device, str(error))
            raise

    def _sample(
        self, logits: Tensor, slots: np.ndarray, states: RequestStates, lengths: np.ndarray | None
    ) -> SamplerOutput:
        token_ids = torch.empty(len(slots), dtype=torch.int32, device=logits.device)
        output = SamplerOutput(token_ids, torch.empty_like(token_ids, dtype=torch.float32))
        plain = self.is_plain(slots, states)
        self._sample_plain(logits, slots, np.flatnonzero(plain), output)
        others = np.flatnonzero(~plain)
        if others.size:
            if lengths is None:
                lengths = states.total_len[slots]
            self._sample_processed(logits, slots, others, lengths[others], states, output)
        return output

    def depends_on_history(self, slots: np.ndarray, states: RequestStates) -> np.ndarray:
        """bool [R]: rows whose processing depends on the request's tokens or on their number, the noise apart."""
        depends = self.penalties.uses(slots) | self.logit_bias.may_not_stop(slots, states)
        for state in (self.bad_words, self.request_processors, self.masks, self.trace):
            if state.in_use:
                depends |= state.uses(slots)
        return depends

    def is_plain(self, slots: np.ndarray, states: RequestStates) -> np.ndarray:
        """bool [R]: greedy rows with unchanged logits."""
        changed = self.penalties.uses(slots) | self.logit_bias.uses(slots, states)
        for state in (self.bad_words, self.request_processors, self.masks):
            if state.in_use:
                changed |= state.uses(slots)
        if self.trace.in_use:
            changed |= self.trace.uses(slots)
        greedy = self.states.is_greedy(slots)
        if self.custom is not None:
            if self.custom.needs_all_rows(all_greedy=bool(greedy.all())):
                return np.zeros(len(slots), dtype=bool)
            changed |= self.custom.touches(slots)
        return greedy & ~changed

    def _sample_plain(self, logits: Tensor, slots: np.ndarray, plain: np.ndarray, output: SamplerOutput) -> None:
        for members, kind in self.states.reading_groups(slots[plain], by_mode=False):
            rows = plain[members]
            span, is_own = _span(rows)
            has_others = len(span) > len(rows)
            part = _take(logits, span)
            if not kind:
                token_ids, health = self.vocab.most_likely(part)
            else:
                own_slots = slots[rows]
                with self.reading_clock.running(logits.device):
                    # Rows of other groups read what a row of this group reads.
                    readers = np.where(is_own, slots[span], own_slots[0]) if has_others else own_slots
                    columns = self.columns.of(part, readers)
                    token_ids, tensors = greedy_readings(part, columns, bool(kind & Reads.ENTROPY), self.vocab)
                owners = np.where(is_own, span, -1).tolist() if has_others else _as_range(rows)
                output.logprobs.append((owners, tensors))
                health = tensors.lse
            if has_others:
                chosen = upload(np.flatnonzero(is_own), logits.device)
                token_ids, health = token_ids[chosen], health[chosen]
            _put(output.sampled_token_ids, rows, token_ids)
            _put(output.health, rows, health)

    def _sample_processed(
        self,
        logits: Tensor,
        slots: np.ndarray,
        rows: np.ndarray,
        lengths: np.ndarray,
        states: RequestStates,
        output: SamplerOutput,
    ) -> None:
        """`lengths`, int32, are those of `rows`."""
        device = logits.device
        own_slots = slots[rows]
        processed = self.vocab.workspace(_float32_copy(logits, rows))
        # The maximum of a row with a NaN is NaN; processing could hide it.
        maxima = [processed.amax(dim=-1)]
        mask_errors, allowed = self.masks.apply(processed, own_slots, states)
        if allowed is not None:
            output.allowed_mass = AllowedMass(rows[allowed.rows].tolist(), allowed.logs)
        temperature, errors, highest_processed = self._process(processed, own_slots, states)
        errors |= mask_errors
        if highest_processed is not None:
            maxima.append(highest_processed)
        positions = upload(lengths.astype(np.int64), device)
        drawn = self.vocab.draw(processed, temperature, self.states.seeds.of(own_slots), positions, maxima)
        token_ids, (highest, *later) = drawn.token_ids, drawn.maxima
        if self.trace.in_use:
            self.trace.apply(token_ids, own_slots, states)
        _put(output.sampled_token_ids, rows, token_ids)
        is_judged = highest.isfinite()
        needs_token = self._needs_token(own_slots, states)
        if not needs_token.all():
            is_judged &= upload(needs_token, device)
        _put(output.health, rows, torch.where(is_judged, drawn.logits, highest))
        if later:
            output.corrupted = torch.zeros(len(slots), dtype=torch.bool, device=device)
            non_finite = later[0].isnan() | (later[0] == torch.inf)
            _put(output.corrupted, rows, highest.isfinite() & non_finite)
        output.processor_errors = {int(rows[row]): message for row, message in errors.items()}
        for members, kind in self.states.reading_groups(own_slots, by_mode=True):
            if not kind:
                continue
            part = _take(processed, members) if kind & Reads.PROCESSED else _take(logits, rows[members])
            readers, owners = own_slots[members], _as_range(rows[members])
            with self.reading_clock.running(device):
                if kind & Reads.CANDIDATES:
                    raw = _take(logits, rows[members])
                    tensors, scores = self._read_candidates(part, raw, _take(processed, members), readers)
                    output.beam_scores.append((owners, scores))
                else:
                    columns, entropy = self.columns.of(part, readers), bool(kind & Reads.ENTROPY)
                    tensors = compute_topk_logprobs(
                        part,
                        columns.num_topk,
                        _take(token_ids, members),
                        entropy=entropy,
                        vocab=self.vocab,
                        columns=columns,
                    )
            output.logprobs.append((owners, tensors))

    def _needs_token(self, slots: np.ndarray, states: RequestStates) -> np.ndarray:
        """bool [R]: rows of which processing must leave a token, as one is drawn or the distribution is read."""
        mode = self.states.reads[slots] & (Reads.PROCESSED | Reads.CANDIDATES)
        return (states.samples[slots] & ~self.trace.uses(slots)) | (mode == Reads.PROCESSED)

    def _read_candidates(
        self, part: Tensor, raw: Tensor, processed: Tensor, slots: np.ndarray
    ) -> tuple[LogprobsTensors, LogprobsTensors]:
        """Read the K most likely tokens of `processed` (float32 [R, V]) in `part`, and their scores, as `logprobs`: the
        logprob in the model's logits (`raw`, [R, V]) at the request's temperature, and what processing added to the
        logit. So what was ruled out has -inf, and the others keep what they have in the whole vocabulary."""
        num_topk = int(self.states.num_topk[slots].max())
        values, token_ids = self.vocab.topk(processed, num_topk)
        columns = torch.cat((token_ids[:, :1], token_ids), dim=1).to(torch.int32)
        readings = self.vocab.read(part, columns, 0, None, first=columns[:, 0])
        temperature = self.states.temperature.of(slots)[:, None]
        _, lse = self.vocab.most_likely(raw.float() / temperature.masked_fill(temperature == 0, 1.0))
        values = torch.cat((values[:, :1], values), dim=1)
        scores = LogprobsTensors(columns, values - lse[:, None], None, values, torch.zeros_like(columns), lse, num_topk)
        return as_tensors(readings, None, num_topk), scores

    def _process(
        self, logits: Tensor, slots: np.ndarray, states: RequestStates
    ) -> tuple[Tensor, dict[int, str], Tensor | None]:
        """Process a workspace, float32 [R, V], in place. Returns what the draw has still to divide by, float32 [R]; row
        -> how its logits processor failed; this rank's maxima after logits processors, float32 [R], None: none ran."""
        self.logit_bias.apply(logits, slots, states, self.masks.ending(slots))
        self.bad_words.apply(logits, slots, states)
        errors = self.request_processors.apply(logits, slots, states)
        if self.custom is not None:
            errors.update(self.custom.apply(logits, slots))

        def penalise(part: Tensor, rows: np.ndarray) -> None:
            self.penalties.apply(part, slots[rows], states)

        def cut_min_p(part: Tensor, rows: np.ndarray) -> None:
            apply_min_p(part, self.states.log_min_p.of(slots[rows]), self.vocab)

        _on_rows(logits, self.penalties.uses(slots), penalise)
        temperature = self._scale(logits, slots)
        _on_rows(logits, self.states.uses_min_p(slots), cut_min_p)
        if self.custom is not None:
            errors.update(self.custom.apply_argmax_invariant(logits, slots, ~self.states.is_greedy(slots)))
        any_ran = self.custom is not None or self.request_processors.in_use
        highest = logits.amax(dim=-1) if any_ran else None
        self._cut_top(logits, slots)
        return temperature, errors, highest

    def _scale(self, logits: Tensor, slots: np.ndarray) -> Tensor:
        """Divide by the temperature, in place, the rows whose scaled logits are used before the draw. Returns what the
        draw divides by, float32 [R]: 1 for those rows, the request's temperature for the others."""
        params = self.states
        temperature = params.temperature.of(slots)

        def divide(part: Tensor, rows: np.ndarray) -> None:
            index = upload(rows, part.device)
            part.div_(temperature[index][:, None])
            temperature[index] = 1.0

        used = params.cuts(slots) | (params.reads[slots] & (Reads.PROCESSED | Reads.CANDIDATES) > 0)
        if self.custom is not None:
            used |= self.custom.has_argmax_invariant
        _on_rows(logits, used & ~params.is_greedy(slots), divide)
        return temperature

    def _cut_top(self, logits: Tensor, slots: np.ndarray) -> None:
        params = self.states

        def cut_top_k(part: Tensor, rows: np.ndarray) -> None:
            own = slots[rows]
            apply_top_k(part, params.top_k.of(own), int(params.top_k.np[own].max()), params.top_p.of(own), self.vocab)

        def cut_top_p(part: Tensor, rows: np.ndarray) -> None:
            self.vocab.keep_top_p_(part, params.top_p.of(slots[rows]))

        top_k, wide = params.uses_top_k(slots), params.top_k.np[slots] > _WIDE_TOP_K_CUT
        _on_rows(logits, top_k & ~wide, cut_top_k)
        _on_rows(logits, top_k & wide, cut_top_k)
        _on_rows(logits, params.uses_top_p(slots) & ~top_k, cut_top_p)


def apply_min_p(logits: Tensor, log_min_p: Tensor, vocab: WholeVocab = WHOLE) -> None:
    """Set to -inf, in place, what has less than `min_p` times the probability of the row's most likely token. Logits
    float32 [R, V], temperature applied, need no normalisation: p / p_max = exp(x - x_max). `log_min_p`, float32 [R], is
    not computed here: how a vector's logarithm rounds may depend on a row's place in the vector."""
    threshold = vocab.highest(logits) + log_min_p
    logits.masked_fill_(logits < threshold[:, None], -torch.inf)


def apply_top_k(logits: Tensor, top_k: Tensor, max_top_k: int, top_p: Tensor, vocab: WholeVocab = WHOLE) -> None:
    """Keep each row's `top_k` most likely tokens, then of these the smallest set that holds `top_p` of their
    probability; set the rest to -inf, in place. Exactly `top_k` tokens pass the first cut, the lower ids among equals.
    Logits are float32 [R, V], temperature applied; `top_k` is int [R], in [1, V), `max_top_k` its maximum; `top_p` is
    float32 [R], in (0, 1], where 1 = no second cut."""
    values, token_ids = vocab.topk(logits, max_top_k)
    column = torch.arange(max_top_k, device=logits.device)
    # Padded to whole vectors of every kernel, so that the summation order of a row's probabilities does not depend on
    # the other rows' top_k.
    width = -(-max_top_k // _VECTOR) * _VECTOR
    kept = values.new_full((len(values), width), -torch.inf)
    kept[:, :max_top_k] = values.masked_fill(column >= top_k[:, None], -torch.inf)
    keep_top_p_(kept, top_p)
    vocab.keep_only_(logits, token_ids, kept[:, :max_top_k])


def _span(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rows (ascending) with the others between them, and which of these are the rows; or the rows alone, where the
    others are so many that a copy of the rows is cheaper than reading them all."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first + 1 > _MAX_SPAN * len(rows):
        return rows, np.ones(len(rows), dtype=bool)
    is_own = np.zeros(last - first + 1, dtype=bool)
    is_own[rows - first] = True
    return np.arange(first, last + 1), is_own


def _take(table: Tensor, rows: np.ndarray) -> Tensor:
    """The rows (ascending) of a [L, ...] tensor; a view when they are adjacent."""
    if _are_adjacent(rows):
        return table[int(rows[0]) : int(rows[-1]) + 1]
    return table[upload(rows, table.device)]


def _are_adjacent(rows: np.ndarray) -> bool:
    return int(rows[-1]) - int(rows[0]) + 1 == len(rows)


def _as_range(rows: np.ndarray) -> Sequence[int]:
    """The rows (ascending), as a range when they are adjacent."""
    return range(int(rows[0]), int(rows[-1]) + 1) if _are_adjacent(rows) else rows.tolist()


def _put(table: Tensor, rows: np.ndarray, values: Tensor) -> None:
    if len(rows) == len(table):
        table.copy_(values)
    else:
        table[upload(rows, table.device)] = values


def _float32_copy(logits: Tensor, rows: np.ndarray) -> Tensor:
    return _take(logits, rows).to(torch.float32, copy=_are_adjacent(rows)).contiguous()


def _on_rows(logits: Tensor, chosen: np.ndarray, apply: Callable[[Tensor, np.ndarray], None]) -> None:
    """Call `apply(logits of the chosen rows, the rows)`, which works in place, unless no row is chosen (bool [R])."""
    rows = np.flatnonzero(chosen)
    if not rows.size:
        return
    part = _take(logits, rows)
    apply(part, rows)
    if not _are_adjacent(rows):
        logits[upload(rows, logits.device)] = part


class TraceState:
    """The given continuations, by slot."""

    def __init__(self) -> None:
        self._traces: dict[int, np.ndarray] = {}

    @property
    def in_use(self) -> bool:
        return bool(self._traces)

    def add_request(self, slot: int, params: SamplingParams) -> None:
        self.remove_request(slot)
        if params.trace_decode_token_ids:
            self._traces[slot] = np.asarray(params.trace_decode_token_ids, dtype=np.int32)

    def remove_request(self, slot: int) -> None:
        self._traces.pop(slot, None)

    def uses(self, slots: np.ndarray) -> np.ndarray:
        return np.fromiter(map(self._traces.__contains__, slots.tolist()), dtype=bool, count=len(slots))

    def apply(self, token_ids: Tensor, slots: np.ndarray, states: RequestStates) -> None:
        """Put the given tokens in place of the drawn ones, int [R], where there are any."""
        rows = np.flatnonzero(self.uses(slots))
        if not rows.size:
            return
        own = slots[rows]
        num_generated = states.total_len[own] - states.prompt_len[own]
        given = [self._traces[slot][step] for slot, step in zip(own.tolist(), num_generated.tolist(), strict=True)]
        token_ids[upload(rows, token_ids.device)] = upload(np.asarray(given), token_ids.device).to(token_ids.dtype)
