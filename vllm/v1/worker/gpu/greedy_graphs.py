"""The head, the draw and the readings after a replayed decode step of greedy unprocessed rows, captured as well."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.cuda import GraphRecorder
from vllm.v1.worker.gpu.decode_graphs import DecodeStep
from vllm.v1.worker.gpu.sample.logprob import fill_columns, greedy_readings
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import Reads
from vllm.v1.worker.gpu.states import RequestStates

# Widths are rounded up to these; larger ones are not replayed.
_NUM_TOPK = (0, 8, 32)
_NUM_TOKEN_IDS = (0, 8, 32, 128)


class Widths(NamedTuple):
    """What a step reads beside the sampled tokens."""

    reads: bool  # anything at all
    num_topk: int
    num_token_ids: int


class _Recorded(NamedTuple):
    token_ids: Tensor  # int32 [B]
    health: Tensor  # float32 [B]
    readings: LogprobsTensors | None


class GreedyGraphs:
    """One graph for each batch size and width, captured at its first use."""

    def __init__(self, model: Any, sampler: Sampler, states: RequestStates, recorder: GraphRecorder) -> None:
        self._model = model
        self._sampler = sampler
        self._states = states
        self._recorder = recorder
        self._graphs: dict[tuple[int, Widths], tuple[_Recorded, Callable[[], None]]] = {}
        self._lists: Tensor | None = None

    def widths(self, slots: np.ndarray) -> Widths | None:
        """What these slots (int64 [R]) read, rounded up; None: the step cannot be replayed."""
        sampler, own = self._sampler, self._sampler.states
        reads = own.reads[slots]
        if (reads & Reads.ENTROPY).any() or not sampler.is_plain(slots, self._states).all():
            return None
        num_topk = _round_up(int(own.num_topk[slots].max()), _NUM_TOPK)
        num_token_ids = _round_up(sampler.token_ids.max_num_token_ids(slots), _NUM_TOKEN_IDS)
        if num_topk is None or num_token_ids is None:
            return None
        return Widths(bool(reads.any()), min(num_topk, own.vocab_size), num_token_ids)

    def __call__(self, step: DecodeStep, slots: np.ndarray, widths: Widths) -> SamplerOutput:
        """Sample what `step` has just computed for `slots`, and keep the tokens on the device for the next step. The
        results are valid until the next step."""
        if self._lists is not self._sampler.token_ids.token_ids:
            # The lists have moved to a wider table, and graphs read from fixed addresses.
            self._lists = self._sampler.token_ids.token_ids
            self._graphs = {key: graph for key, graph in self._graphs.items() if not key[1].num_token_ids}
        key = step.size, widths
        if key not in self._graphs:
            self._graphs[key] = self._recorder.record(lambda: self._run(step, widths))
        recorded, replay = self._graphs[key]
        replay()
        num_rows = len(slots)
        output = SamplerOutput(recorded.token_ids[:num_rows], recorded.health[:num_rows])
        if recorded.readings is not None:
            reads = self._sampler.states.reads[slots] > 0
            rows = range(num_rows) if reads.all() else np.where(reads, np.arange(num_rows), -1).tolist()
            output.logprobs.append((rows, recorded.readings.moved(lambda tensor: tensor[:num_rows])))
        return output

    def _run(self, step: DecodeStep, widths: Widths) -> _Recorded:
        logits, sampler = self._model.compute_logits(step.hidden), self._sampler
        readings: LogprobsTensors | None = None
        if widths.reads:
            # Padding reads what the last slot reads.
            slots = step.slots.clamp(max=self._states.max_num_reqs - 1)
            columns = fill_columns(logits, widths.num_topk, sampler.token_ids, slots, widths.num_token_ids)
            token_ids, readings = greedy_readings(logits, columns, vocab=sampler.vocab)
            health = readings.lse
        else:
            token_ids, health = sampler.vocab.most_likely(logits)
        if self._states.last_sampled is not None:
            self._states.keep_sampled(step.slots, token_ids)
        return _Recorded(token_ids, health, readings)


def _round_up(value: int, steps: Sequence[int]) -> int | None:
    """The first of `steps` (ascending) that is no less; None: there is none."""
    return next((step for step in steps if step >= value), None)
