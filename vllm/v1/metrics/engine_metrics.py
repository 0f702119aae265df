"""An engine's work since it started: counts, and distributions of times and lengths."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import prometheus_client
from prometheus_client import CollectorRegistry, Counter

from vllm.logprobs.lists import LogprobsRows
from vllm.sampling_params import SamplingParams
from vllm.v1.messages import FINISH_REASON_STRINGS, EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats

PROMPT_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
FINISH_REASONS = ("stop", "length", "abort", "error")

# Upstream's, so that dashboards made for it show the same.
REQUEST_SECONDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
FIRST_TOKEN_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_SECONDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
STEP_TOKENS = tuple(2**exponent for exponent in (0, *range(3, 15)))
NUM_SEQUENCES = (1, 2, 5, 10, 20)


def token_bounds(max_model_len: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 ... up to max_model_len."""
    series = (digit * 10**exponent for exponent in range(len(str(max_model_len))) for digit in (1, 2, 5))
    return tuple(bound for bound in series if bound <= max_model_len)


class Histogram(prometheus_client.Histogram):
    """The client library's, with an `observe` that takes a count and finds the bucket by bisection."""

    def observe(self, amount: float, exemplar: dict[str, str] | None = None, count: int = 1) -> None:
        self._sum.inc(amount * count)
        self._buckets[bisect_left(self._upper_bounds, amount)].inc(count)


@dataclass(slots=True)
class SequenceRecord:
    """The state of an unfinished sequence."""

    arrival_time: float
    num_prompt_tokens: int
    max_tokens: int
    num_token_ids: int  # read at every generated position
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0
    scheduled_time: float = 0.0
    first_token_time: float = 0.0
    last_token_time: float | None = None  # None: no output yet


News = tuple[SequenceRecord, EngineCoreOutput, str | None]
"""A sequence, its output of a step, and its finish reason (None: it goes on)."""


class EngineMetrics:
    """Counters and histograms of one engine; `registry` holds them, without labels for the model and the replica.

    A request for several sequences counts once for each of them, except in `request_longest_sequence` and
    `request_num_sequences`. Times of a step are the core's, so that a late event loop does not distort them; those that
    a client sees (to the first token, of the whole request) end when the event loop receives the outputs. All are on
    the monotonic clock, which the processes of a machine share. Belongs to one thread.

    Attributes:
        iteration: what has come since it was set, for loggers; None: there are none.
    """

    iteration: IterationStats | None = None

    def __init__(self, max_model_len: int) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", help_text, labels, registry=self.registry)

        def histogram(name: str, help_text: str, bounds: Sequence[float]) -> Histogram:
            return Histogram(f"vllm:{name}", help_text, buckets=bounds, registry=self.registry)

        self.num_prompt_tokens = counter("prompt_tokens", "Prompt tokens of completed prompts, cached ones included")
        self.num_cached_prompt_tokens = counter("prompt_tokens_cached", "Those of them that came from the prefix cache")
        self.num_prompt_tokens_by_source = counter(
            "prompt_tokens_by_source", "The same, by where they came from", "source"
        )
        for source in PROMPT_SOURCES:
            self.num_prompt_tokens_by_source.labels(source)
        self.num_generated_tokens = counter("generation_tokens", "Tokens generated")
        self.num_rows_read = counter("logprob_rows_read", "Prompt and generated positions read for logprobs")
        self.num_token_ids_read = counter("logprob_token_ids_read", "Token ids read, one for each id and position")
        self.num_finished = counter("request_success", "Sequences that ended, by reason", "finished_reason")
        for reason in FINISH_REASONS:
            self.num_finished.labels(reason)  # exported from the start
        tokens = token_bounds(max_model_len)
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "Arrival to first token or reading", FIRST_TOKEN_SECONDS
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between tokens of a sequence", TOKEN_SECONDS
        )
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds", "A sequence's mean time of a further token", TOKEN_SECONDS
        )
        self.e2e_latency = histogram("e2e_request_latency_seconds", "Arrival to last token", REQUEST_SECONDS)
        self.queue_time = histogram("request_queue_time_seconds", "Arrival to first step", REQUEST_SECONDS)
        self.prefill_time = histogram("request_prefill_time_seconds", "First step to first token", REQUEST_SECONDS)
        self.decode_time = histogram("request_decode_time_seconds", "First token to last token", REQUEST_SECONDS)
        self.inference_time = histogram("request_inference_time_seconds", "First step to last token", REQUEST_SECONDS)
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a sequence", tokens)
        self.request_computed_prompt_tokens = histogram(
            "request_prefill_kv_computed_tokens", "Uncached prompt tokens of a sequence", tokens
        )
        self.request_generated_tokens = histogram("request_generation_tokens", "Generated tokens of a sequence", tokens)
        self.request_longest_sequence = histogram(
            "request_max_num_generation_tokens", "Generated tokens of each request in its longest sequence", tokens
        )
        self.request_max_tokens = histogram("request_params_max_tokens", "max_tokens of a sequence", tokens)
        self.request_num_sequences = histogram("request_params_n", "n of each request", NUM_SEQUENCES)
        self.step_tokens = histogram(
            "iteration_tokens_total", "Tokens that a step completed: computed prompts and generated tokens", STEP_TOKENS
        )

    def start(self, params: SamplingParams, num_prompt_tokens: int, arrival_time: float) -> SequenceRecord:
        """A record for a queued sequence."""
        assert params.max_tokens is not None, "a queued request has max_tokens"
        num_token_ids = len(params.logprob_token_ids or ())
        return SequenceRecord(arrival_time, num_prompt_tokens, params.max_tokens, num_token_ids)

    def listen(self) -> None:
        """Keep `iteration`, too."""
        self.iteration = IterationStats()

    def take_iteration(self) -> IterationStats:
        """`iteration`, which begins anew."""
        assert self.iteration is not None, "someone listens"
        found, self.iteration = self.iteration, IterationStats()
        return found

    def observe_step(self, news: Sequence[News], step_time: float, now: float) -> None:
        """Count a step that ended at `step_time` and was received at `now`. `news`: at most one entry a sequence."""
        gaps: dict[float, int] = {}  # by the time of the last token, which is the same for most sequences of a step
        num_generated = num_computed = num_rows = num_token_ids = 0
        for record, output, finish_reason in news:
            if output.prompt_logprobs is not None:
                self._count_prompt_rows(output.prompt_logprobs)
                if not output.new_token_ids and finish_reason is None:
                    continue
            if finish_reason == "error":
                self.observe_dropped(1, "error")
                continue
            last = record.last_token_time
            if last is None:
                num_computed += self._begin(record, output, step_time, now)
            else:
                gaps[last] = gaps.get(last, 0) + 1
            record.last_token_time = step_time
            num_new = len(output.new_token_ids)
            num_generated += num_new
            record.num_generated_tokens += num_new
            if output.logprobs is not None:
                num_rows += len(output.logprobs)
                num_token_ids += len(output.logprobs) * record.num_token_ids
            if finish_reason is not None:
                self._finish(record, finish_reason, step_time, now)
        for last, count in gaps.items():
            self.inter_token_latency.observe(step_time - last, count=count)
            if self.iteration is not None:
                self.iteration.inter_token_latencies_iter += [step_time - last] * count
        if self.iteration is not None:
            self.iteration.num_generation_tokens += num_generated
        self.num_generated_tokens.inc(num_generated)
        self.num_rows_read.inc(num_rows)
        self.num_token_ids_read.inc(num_token_ids)
        if num_generated + num_computed:
            self.step_tokens.observe(num_generated + num_computed)

    def observe_request(self, num_sequences: int, longest: int) -> None:
        """A request has ended, whose longest sequence has `longest` generated tokens."""
        self.request_num_sequences.observe(num_sequences)
        self.request_longest_sequence.observe(longest)
        if self.iteration is not None:
            self.iteration.n_params_iter.append(num_sequences)
            self.iteration.max_num_generation_tokens_iter.append(longest)

    def observe_dropped(self, num_sequences: int, reason: str) -> None:
        """Sequences ended without their last output; `reason`: "abort" or "error"."""
        self.num_finished.labels(reason).inc(num_sequences)
        if self.iteration is not None:
            self.iteration.finished_requests += [FinishedRequestStats.dropped(reason) for _ in range(num_sequences)]

    def _begin(self, record: SequenceRecord, output: EngineCoreOutput, step_time: float, now: float) -> int:
        """The prompt is computed; returns how many of its tokens were not cached."""
        assert output.scheduled_time is not None, "what gave a token was scheduled"
        record.scheduled_time = output.scheduled_time
        record.first_token_time = step_time
        record.num_cached_tokens = output.num_cached_tokens
        self.num_prompt_tokens.inc(record.num_prompt_tokens)
        self.num_cached_prompt_tokens.inc(output.num_cached_tokens)
        computed, cached, _ = PROMPT_SOURCES
        self.num_prompt_tokens_by_source.labels(computed).inc(record.num_prompt_tokens - output.num_cached_tokens)
        self.num_prompt_tokens_by_source.labels(cached).inc(output.num_cached_tokens)
        self.time_to_first_token.observe(now - record.arrival_time)
        if self.iteration is not None:
            self.iteration.prompt_token_stats.add(record.num_prompt_tokens, output.num_cached_tokens)
            self.iteration.time_to_first_tokens_iter.append(now - record.arrival_time)
        return record.num_prompt_tokens - output.num_cached_tokens

    def _finish(self, record: SequenceRecord, reason: str, step_time: float, now: float) -> None:
        self.num_finished.labels(reason).inc()
        num_later = record.num_generated_tokens - 1
        decode_time = step_time - record.first_token_time
        ended = FinishedRequestStats(
            FinishReason(FINISH_REASON_STRINGS.index(reason)),
            e2e_latency=now - record.arrival_time,
            num_prompt_tokens=record.num_prompt_tokens,
            num_generation_tokens=record.num_generated_tokens,
            max_tokens_param=record.max_tokens,
            queued_time=record.scheduled_time - record.arrival_time,
            prefill_time=record.first_token_time - record.scheduled_time,
            inference_time=step_time - record.scheduled_time,
            decode_time=decode_time,
            mean_time_per_output_token=decode_time / num_later if num_later > 0 else 0.0,
            num_cached_tokens=record.num_cached_tokens,
        )
        self.e2e_latency.observe(ended.e2e_latency)
        self.queue_time.observe(ended.queued_time)
        self.prefill_time.observe(ended.prefill_time)
        self.decode_time.observe(ended.decode_time)
        self.inference_time.observe(ended.inference_time)
        if num_later > 0:
            self.time_per_output_token.observe(ended.mean_time_per_output_token)
        self.request_prompt_tokens.observe(record.num_prompt_tokens)
        self.request_computed_prompt_tokens.observe(record.num_prompt_tokens - record.num_cached_tokens)
        self.request_generated_tokens.observe(record.num_generated_tokens)
        self.request_max_tokens.observe(record.max_tokens)
        if self.iteration is not None:
            self.iteration.finished_requests.append(ended)

    def _count_prompt_rows(self, readings: Iterable[LogprobsRows]) -> None:
        for each in readings:
            num_rows = each.rows.stop - each.rows.start
            self.num_rows_read.inc(num_rows)
            self.num_token_ids_read.inc(num_rows * each.num_token_ids - each.num_padding)
