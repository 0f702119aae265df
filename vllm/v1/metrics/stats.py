"""Reports of a step to loggers of callers' own, in upstream's names."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm.v1.messages import FINISH_REASON_STRINGS, FinishReason


@dataclass
class PrefixCacheStats:
    """Lookups since the last step: requests that asked, tokens that they asked for, tokens that were there."""

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0


@dataclass
class MultiModalCacheStats:
    """As PrefixCacheStats, of prepared media; there is no such cache here."""

    reset: bool = False
    requests: int = 0
    queries: int = 0
    hits: int = 0


@dataclass
class SpecDecodingStats:
    """Drafts that were verified since the last step; `num_accepted_tokens_per_pos` by place in the draft."""

    num_spec_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)


@dataclass
class SchedulerStats:
    """The scheduler's holdings after a step.

    Attributes:
        kv_cache_usage: share of the KV cache in use, in [0, 1].
        prefix_cache_stats, spec_decoding_stats: since the last step; the second is None without speculation.
        running_lora_adapters, waiting_lora_adapters: names of adapters with such requests.
    """

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0
    encoder_cache_usage: float = 0.0
    prefix_cache_stats: PrefixCacheStats = field(default_factory=PrefixCacheStats)
    connector_prefix_cache_stats: PrefixCacheStats | None = None
    kv_cache_eviction_events: list[Any] = field(default_factory=list)
    spec_decoding_stats: SpecDecodingStats | None = None
    kv_connector_stats: dict[str, Any] | None = None
    waiting_lora_adapters: dict[str, int] = field(default_factory=dict)
    running_lora_adapters: dict[str, int] = field(default_factory=dict)
    cudagraph_stats: Any = None
    perf_stats: Any = None


@dataclass
class PromptTokenStats:
    """Tokens of the prompts that were completed in a step: computed, and found in the prefix cache."""

    computed: int = 0
    local_cache_hit: int = 0
    external_kv_transfer: int = 0
    cached_tokens: int = 0
    recomputed_tokens: int = 0
    total: int = 0

    def add(self, num_tokens: int, num_cached: int) -> None:
        """Count a prompt."""
        self.total += num_tokens
        self.computed += num_tokens - num_cached
        self.local_cache_hit += num_cached
        self.cached_tokens += num_cached


@dataclass
class FinishedRequestStats:
    """A sequence that has ended; times are in seconds."""

    finish_reason: FinishReason
    request_id: str | None = None
    e2e_latency: float = 0.0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    max_tokens_param: int | None = None
    queued_time: float = 0.0
    prefill_time: float = 0.0
    inference_time: float = 0.0
    decode_time: float = 0.0
    mean_time_per_output_token: float = 0.0
    is_corrupted: bool = False
    num_cached_tokens: int = 0

    @classmethod
    def dropped(cls, reason: str) -> FinishedRequestStats:
        """One without its last output."""
        return cls(FinishReason(FINISH_REASON_STRINGS.index(reason)))


@dataclass
class IterationStats:
    """Counts of the outputs of a step; an entry a sequence in lists, times in seconds.

    Attributes:
        iteration_timestamp: in Unix seconds.
        time_to_first_tokens_iter: of sequences that began in this step, from their arrival.
        inter_token_latencies_iter: of those that went on, since their token before.
        max_num_generation_tokens_iter, n_params_iter: of each request that has ended, generated tokens of its longest
            sequence, and n.
    """

    iteration_timestamp: float = field(default_factory=time.time)
    num_generation_tokens: int = 0
    prompt_token_stats: PromptTokenStats = field(default_factory=PromptTokenStats)
    num_preempted_reqs: int = 0
    finished_requests: list[FinishedRequestStats] = field(default_factory=list)
    max_num_generation_tokens_iter: list[int] = field(default_factory=list)
    n_params_iter: list[int] = field(default_factory=list)
    time_to_first_tokens_iter: list[float] = field(default_factory=list)
    inter_token_latencies_iter: list[float] = field(default_factory=list)
    num_corrupted_reqs: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompts that were completed, cached ones included."""
        return self.prompt_token_stats.total


class CoreCounts:
    """An engine core's counts, which only grow, as the difference that a step makes."""

    def __init__(self) -> None:
        self._before: Mapping[str, Any] = {}

    def step(self, now: Mapping[str, Any], iteration: IterationStats) -> SchedulerStats:
        """The counts of `now` (EngineCore.stats) since the last call; preemptions go into `iteration`."""
        before, self._before = self._before, now

        def since(name: str) -> int:
            return now.get(name, 0) - before.get(name, 0)

        iteration.num_preempted_reqs += since("num_preemptions")
        queries = since("num_prefix_queried_tokens")
        cache = PrefixCacheStats(
            requests=len(iteration.time_to_first_tokens_iter), queries=queries, hits=since("num_prefix_hit_tokens")
        )
        drafts = None
        if now.get("num_drafts"):
            by_position = now["num_accepted_tokens_per_pos"]
            earlier = before.get("num_accepted_tokens_per_pos") or [0] * len(by_position)
            drafts = SpecDecodingStats(
                len(by_position),
                since("num_drafts"),
                since("num_draft_tokens"),
                since("num_accepted_tokens"),
                [count - old for count, old in zip(by_position, earlier, strict=True)],
            )
        return SchedulerStats(
            num_running_reqs=now.get("num_running", 0),
            num_waiting_reqs=now.get("num_waiting", 0),
            kv_cache_usage=now.get("kv_cache_usage", 0.0),
            prefix_cache_stats=cache,
            spec_decoding_stats=drafts,
            waiting_lora_adapters=dict.fromkeys(now.get("waiting_adapters", ()), 1),
            running_lora_adapters=dict.fromkeys(now.get("running_adapters", ()), 1),
        )
