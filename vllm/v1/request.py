"""A request as the scheduler sees it: tokens, lengths, hashes of its blocks; no logprobs and no text."""

from __future__ import annotations

import enum

from vllm.sampling_params import SamplingParams


class RequestStatus(enum.Enum):
    """The state of a request."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class Request:
    """One sequence.

    Attributes:
        token_ids: the prompt and the generated tokens, in order.
        num_computed_tokens: leading tokens whose KV is written, or is being written by the step in flight.
        block_hashes: content hashes of its leading full blocks, computed on demand.
        end_token_ids: any of these ends it, from min_tokens on.
        next_prompt_row: the first prompt position whose logits are still to be read, for the logprobs of the token
            after it; None when no prompt logprobs are asked for, or all are there.
        hidden_from: `next_prompt_row` when the request got its blocks: final hidden states are kept from there to the
            prompt's end.
        length_limit: most tokens that it may generate, by max_tokens and, once it is queued, by the context.
        num_pending_tokens: tokens that steps in flight draw for it, not known yet.
        needs_known_tokens: it is processed on the host, from all its tokens: its next step must not begin before the
            last one's token is known.
        arrival_index: its number among the scheduler's requests, set when it is queued.
        num_cached_tokens: prompt tokens that the prefix cache gave at first admission; -1 before it.
        scheduled_time: time of the first admission, in seconds on the monotonic clock; None before it.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        eos_token_ids: frozenset[int] = frozenset(),
        arrival_time: float = 0.0,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> None:
        if sampling_params.max_tokens is None:
            raise ValueError(f"request {request_id}: max_tokens must be set when it reaches the scheduler")
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.eos_token_ids = frozenset() if sampling_params.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset(sampling_params.stop_token_ids or ())
        self.end_token_ids = self.eos_token_ids | self.stop_token_ids
        self.reads_logprobs = sampling_params.num_logprobs is not None
        self.max_tokens = sampling_params.max_tokens
        self.length_limit = self.max_tokens
        self.min_tokens = sampling_params.min_tokens
        self.num_pending_tokens = 0
        self.needs_known_tokens = bool(sampling_params.bad_words or sampling_params.logits_processors)
        self.arrival_time = arrival_time
        self.arrival_index = 0
        self.priority = priority
        self.cache_salt = cache_salt
        self.status = RequestStatus.WAITING
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = -1
        self.scheduled_time: float | None = None
        self.num_preemptions = 0
        self.next_prompt_row: int | None = None
        self.hidden_from: int | None = None
        self._advance_to(sampling_params.first_prompt_row)
        self.block_hashes: list[bytes] = []

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and generated."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens_to_compute(self) -> int:
        """Tokens that may be computed by now, pending ones included; the last generated token never is."""
        known = len(self.token_ids) + self.num_pending_tokens
        return min(known, self.num_prompt_tokens + max(self.length_limit - 1, 0))

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    def keeps_hidden(self, block_index: int, block_size: int) -> bool:
        """Whether the final hidden states of all tokens of its block are kept."""
        first = self.hidden_from
        start, end = block_index * block_size, (block_index + 1) * block_size
        return first is not None and first <= start and end <= self.num_prompt_tokens

    def note_prompt_rows_read(self, count: int) -> None:
        """`count` further prompt positions have been read."""
        assert self.next_prompt_row is not None
        self._advance_to(self.next_prompt_row + count)

    def _advance_to(self, row: int | None) -> None:
        # The prompt's last row predicts no token of the prompt.
        self.next_prompt_row = row if row is not None and row < self.num_prompt_tokens - 1 else None

    def sort_key(self) -> tuple[int, float, int]:
        """Order under the priority policy: lower runs earlier, ties by arrival; unique within a scheduler."""
        return (self.priority, self.arrival_time, self.arrival_index)

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.status.value}, {self.num_computed_tokens}/{self.num_tokens} tokens)"
