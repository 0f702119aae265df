"""Whether requests get the same bits in every way the engine may run them, and what batch invariance costs."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.config.cache import Window
from vllm.selftest.probes import Probe, Result, make_others, make_probe, make_probes, result_of, run_probes
from vllm.v1.core.kv_cache_groups import blocks_needed
from vllm.v1.core.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.llm_engine import LLMEngine

NUM_COMPOSITIONS = 3
NUM_OTHERS = 12
CHUNKS = (3, 16, 50)
WORKLOADS = {"scoring": "12 prompts of 40 tokens, 2 ids", "decode": "8 sequences, 16 tokens"}

_Found = tuple[int | None, float, float, int, float | None]


@dataclass(frozen=True)
class Difference:
    """The first value of a check that differs from the request run alone."""

    probe: int  # index of the request
    kind: str  # name of its parameters
    prompt_len: int  # in tokens
    field: str  # which array of its output
    index: int | None  # into the flattened array; None: the arrays differ in size
    expected: float  # the value alone, or the size
    got: float  # the value in this check, or the size
    differing: int  # number of values of the array that differ
    largest: float | None  # absolute difference among them; None when sizes differ


@dataclass(frozen=True)
class Check:
    """The probes run in one way and compared bit by bit: `values` numbers of `requests` outputs, of which `differing`
    differ. `detail` shows that the path was exercised, `missed` says why it was not: such a check fails."""

    name: str
    requests: int
    values: int
    differing: int
    first: Difference | None
    detail: str = ""
    missed: str | None = None

    @property
    def passed(self) -> bool:
        return not self.differing and self.missed is None


class InvarianceTest:
    """Runs the probes alone, then in every other way, and compares. `engine` is idle and lets whole rows of logits be
    read (max_logprobs=-1, max_logprob_token_ids=-1); `seed` decides the probes, the other requests and all orders."""

    def __init__(self, engine: LLMEngine, seed: int = 0) -> None:
        self.engine = engine
        self._rng = random.Random(seed)
        config = engine.vllm_config
        self._vocab_size = config.model_config.vocab_size
        self._max_model_len = config.model_config.max_model_len
        self._block_size = config.cache_config.block_size
        self._caches = config.cache_config.enable_prefix_caching
        self.probes = make_probes(self._vocab_size, self._max_model_len, self._block_size, self._rng)
        self._expected: list[Result] = []

    def run(self) -> Iterator[Check]:
        """Run the probes in every way, one check each. A RuntimeError if the model failed on a request."""
        self._expected = [result_of(output) for output in self._alone()]
        yield self._compare("alone again", self._alone())
        for number in range(1, NUM_COMPOSITIONS + 1):
            self.engine.reset_prefix_cache()
            others = self._others(NUM_OTHERS * number // NUM_COMPOSITIONS)
            # Later compositions arrive over several steps, so that prompts share steps with decodes.
            outputs = self._mixed(others, spread=3 * (number - 1))
            yield self._compare(f"batch composition {number}", outputs, f"{len(others)} other requests")
        for chunk in CHUNKS:
            with self._scheduler(max_num_batched_tokens=chunk, enable_chunked_prefill=True):
                outputs = self._mixed([])
            yield self._compare(f"steps of {chunk} tokens", outputs)
        # A request that fits in one block shares none, and is never short of a second one.
        has_blocks = max(len(probe.prompt) for probe in self.probes) > self._block_size
        if self._caches and has_blocks:
            for share, words in ((0.0, "one block"), (0.5, "half the blocks"), (1.0, "every block")):
                with self._scheduler():
                    check = self._cached(share, words)
                yield check
        if has_blocks:
            yield self._preempted()
        yield self._other_thread_count()

    def _alone(self) -> list[RequestOutput]:
        outputs = []
        for probe in self.probes:
            self.engine.reset_prefix_cache()
            outputs += run_probes(self.engine, [probe])
        return outputs

    def _cached(self, share: float, words: str) -> Check:
        """The cache holds the first blocks of every probe's prompt: `share` of those that can be hit, at least one."""
        self.engine.reset_prefix_cache()
        warm = []
        for probe in self.probes:
            hittable = (len(probe.prompt) - 1) // self._block_size
            if hittable:
                beginning = probe.prompt[: max(1, round(share * hittable)) * self._block_size]
                # A request with prompt readings hits only blocks that such a request left.
                params = probe.params.clone()
                params.max_tokens = 1
                warm.append(Probe([*beginning, 0], probe.kind, params))
        run_probes(self.engine, warm)
        outputs = self._mixed([])
        hits = sum(output.num_cached_tokens or 0 for output in outputs)
        missed = None if hits else "nothing was found in the prefix cache"
        return self._compare(f"{words} cached", outputs, f"{hits} tokens from the cache", missed)

    @property
    def _windows(self) -> tuple[Window, ...]:
        windows: tuple[Window, ...] = self.engine.engine_core.executor.worker.kv_group_windows
        return windows

    def _preempted(self) -> Check:
        """All probes but the longest, twice, in a cache that holds no more than the largest of these."""
        lengths = [len(probe.prompt) for probe in self.probes]
        # The short ones first: many are admitted, and then there is no block for their next tokens.
        numbers = 2 * sorted(range(len(lengths)), key=lengths.__getitem__)[:-1]
        numbers.sort(key=lengths.__getitem__)
        tokens = max(lengths[number] + (self.probes[number].params.max_tokens or 0) for number in numbers)
        step_tokens = self.engine.engine_core.scheduler.config.max_num_batched_tokens
        blocks = blocks_needed(tokens, step_tokens, self._windows, self._block_size)
        with self._scheduler(num_blocks=blocks) as scheduler:
            outputs = run_probes(self.engine, [self.probes[number] for number in numbers])
            count = scheduler.num_preemptions
        missed = None if count else "nothing was preempted"
        return self._compare("preempted", outputs, f"{count} preemptions", missed, numbers)

    def _other_thread_count(self) -> Check:
        import torch

        before = torch.get_num_threads()
        other = 1 if before > 1 else 2
        torch.set_num_threads(other)
        try:
            self.engine.reset_prefix_cache()
            outputs = self._mixed(self._others(NUM_OTHERS // 3))
        finally:
            torch.set_num_threads(before)
        return self._compare(f"{other} thread{'s' * (other > 1)}", outputs, f"instead of {before}")

    def _others(self, count: int) -> list[Probe]:
        return make_others(self.probes, self._vocab_size, self._max_model_len, count, self._rng)

    def _mixed(self, others: list[Probe], spread: int = 0) -> list[RequestOutput]:
        """The probes' outputs when all run together, in random order, arriving over `spread` + 1 steps."""
        requests = [*self.probes, *others]
        order = self._rng.sample(range(len(requests)), len(requests))
        arrivals = [self._rng.randint(0, spread) for _ in requests]
        outputs = dict(zip(order, run_probes(self.engine, [requests[i] for i in order], arrivals), strict=True))
        return [outputs[i] for i in range(len(self.probes))]

    @contextmanager
    def _scheduler(self, num_blocks: int | None = None, **changes: Any) -> Iterator[Scheduler]:
        """Run under another scheduler, with a cache of fewer blocks or other fields of its configuration. Recurrent
        states are kept at every border of blocks."""
        core = self.engine.engine_core
        before = core.scheduler
        core.step()  # sends the finished requests' ids to the worker
        blocks = min(num_blocks or before.kv.pool.num_blocks, before.kv.pool.num_blocks)
        cache = before.cache_config
        cache = replace(cache, num_blocks=blocks, num_host_blocks=0, snapshot_interval=cache.block_size)
        core.scheduler = Scheduler(replace(before.config, **changes), cache, self._max_model_len, core.make_guests)
        try:
            yield core.scheduler
            core.step()
        finally:
            core.scheduler = before
            before.reset_prefix_cache()  # its blocks were written over

    def _compare(
        self,
        name: str,
        outputs: Sequence[RequestOutput],
        detail: str = "",
        missed: str | None = None,
        numbers: Sequence[int] | None = None,
    ) -> Check:
        """Compare outputs with those of the probes alone: of these numbers, or of all probes in order."""
        values = differing = 0
        first: Difference | None = None
        for number, output in zip(range(len(self.probes)) if numbers is None else numbers, outputs, strict=True):
            probe, expected, got = self.probes[number], self._expected[number], result_of(output)
            assert expected.keys() == got.keys(), "the same request has the same kinds of results"
            for field, array in expected.items():
                values += array.size
                found = compare_bits(array, got[field])
                if found is not None:
                    first = first or Difference(number, probe.kind, len(probe.prompt), field, *found)
                    differing += found[3]
        return Check(name, len(outputs), values, differing, first, detail, missed)


def compare_bits(expected: np.ndarray, got: np.ndarray) -> _Found | None:
    """None if two arrays of one dtype have the same bits, else the fields of `Difference` from `index` on. Of arrays of
    different sizes all values differ."""
    if expected.shape != got.shape:
        return None, float(expected.size), float(got.size), max(expected.size, got.size), None
    bits = np.dtype(f"u{expected.itemsize}")
    where = np.flatnonzero(np.ascontiguousarray(expected).view(bits) != np.ascontiguousarray(got).view(bits))
    if not len(where):
        return None
    ours, theirs = expected.ravel()[where].astype(np.float64), got.ravel()[where].astype(np.float64)
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        largest = float(np.max(np.abs(ours - theirs)))
    return int(where[0]), float(ours[0]), float(theirs[0]), len(where), largest


def measure_cost(default: LLMEngine, invariant: LLMEngine, repeats: int) -> dict[str, dict[str, Any]]:
    """Time each workload `repeats` (>= 1) times in both idle engines, in alternating order, after one warm-up of each.
    By workload: its description, seconds of each run, and the runs' ratios, invariant to default."""
    engines = (default, invariant)
    draws = (random.Random(0), random.Random(0))
    result = {}
    for name, words in WORKLOADS.items():
        seconds: tuple[list[float], list[float]] = ([], [])
        for repeat in range(repeats + 1):
            for which in (0, 1) if repeat % 2 else (1, 0):
                requests = _requests(name, engines[which], draws[which])
                started = time.perf_counter()
                run_probes(engines[which], requests)
                seconds[which].append(time.perf_counter() - started)
        without, with_ = (each[1:] for each in seconds)
        ratios = [slow / fast for slow, fast in zip(with_, without, strict=True)]
        result[name] = {
            "workload": words,
            "default_seconds": without,
            "invariant_seconds": with_,
            "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
        }
    return result


def _requests(workload: str, engine: LLMEngine, rng: random.Random) -> list[Probe]:
    """Fresh random prompts, so that none is cached."""
    vocabulary = range(engine.model_config.vocab_size)
    count, length, max_tokens, ids = 8, 4, 16, None
    if workload == "scoring":
        count, length, max_tokens = 12, 40, 1
        ids = rng.sample(vocabulary, min(2, len(vocabulary)))
    fields = {"temperature": 0.0, "max_tokens": max_tokens, "logprob_token_ids": ids}
    length = max(1, min(length, engine.model_config.max_model_len - max_tokens))
    return [make_probe(rng.choices(vocabulary, k=length), workload, fields) for _ in range(count)]
