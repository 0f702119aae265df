"""A request as the scheduler sees it: tokens, lengths, hashes of its blocks; no logprobs and no text."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.params.structured import RepetitionDetectionParams
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from vllm.inputs.embeds import PromptEmbeds
    from vllm.inputs.images import PromptImages
    from vllm.lora.request import LoRARequest


class RequestStatus(enum.Enum):
    """The state of a request."""

    PREPARING = "preparing"
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


def check_sequence_repetition(token_ids: Sequence[int], params: RepetitionDetectionParams) -> bool:
    """Whether the tokens end with a pattern of an allowed size, `min_count` times in a row."""
    count = params.min_count
    if count < 2:
        return False
    for size in range(max(params.min_pattern_size, 1), params.max_pattern_size + 1):
        if size * count > len(token_ids):
            return False
        tail = token_ids[len(token_ids) - size * count :]
        if tail[-1] == tail[-1 - size] and tail[size:] == tail[:-size]:
            return True
    return False


def repeats_itself(token_ids: Sequence[int], num_prompt_tokens: int, params: RepetitionDetectionParams | None) -> bool:
    """The same of a request's generated tokens, which follow the prompt's; None: nothing is looked for."""
    if params is None:
        return False
    longest = params.max_pattern_size * params.min_count
    return check_sequence_repetition(token_ids[max(num_prompt_tokens, len(token_ids) - longest) :], params)


class Request:
    """A sequence in the scheduler."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        eos_token_ids: frozenset[int] = frozenset(),
        arrival_time: float = 0.0,
        priority: int = 0,
        cache_salt: str | None = None,
        pooling_params: PoolingParams | None = None,
        lora_request: LoRARequest | None = None,
        prompt_embeds: PromptEmbeds | None = None,
        images: PromptImages | None = None,
        session_id: str | None = None,
        kv_hints: Any = None,
    ) -> None:
        if sampling_params.max_tokens is None:
            raise ValueError(f"request {request_id}: max_tokens must be set when it reaches the scheduler")
        self.request_id = request_id
        self.sampling_params = sampling_params  # of a pooling model's: what its tokens are read for
        self.pooling_params = pooling_params
        self.lora_request = lora_request
        self.prompt_embeds = prompt_embeds  # the ids at its positions say nothing
        self.images = images
        self.session_id, self.kv_hints = session_id, kv_hints  # for who reads requests; the engine does not
        self.lane: Any = None  # where it waits; None: with all others
        self.content_number = 0  # a part of its block hashes: what computes other values than the model has another
        self.content_name = ""  # the same, where that is known, for other processes
        self.eos_token_ids = frozenset() if sampling_params.ignore_eos else eos_token_ids
        self.stop_token_ids = frozenset(sampling_params.stop_token_ids or ())
        self.end_token_ids = self.eos_token_ids | self.stop_token_ids  # these end it, from min_tokens on
        self.repetition = sampling_params.repetition_detection
        self.reads_logprobs = sampling_params.num_logprobs is not None
        self.max_tokens = sampling_params.max_tokens
        self.length_limit = self.max_tokens  # tokens to generate; once queued, limited by the context, too
        self.min_tokens = sampling_params.min_tokens
        # Before min_tokens, if its grammar leaves nothing but an end.
        self.may_end_early = sampling_params.grammar is not None
        self.num_pending_tokens = 0  # drawn by steps in flight, not known yet
        # Processed on the host from all its tokens: its next step must not begin before the last one is known.
        own = sampling_params
        self.needs_known_tokens = bool(own.bad_words or own.logits_processors or own.grammar)
        self.arrival_time = arrival_time
        self.arrival_index = 0  # its number among the scheduler's requests, set when it is queued
        self.priority = priority
        self.cache_salt = self.given_salt = cache_salt  # guests add to the first what blocks depend on
        self.status = RequestStatus.WAITING
        self.token_ids = list(prompt_token_ids)  # prompt and generated tokens
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0  # leading tokens whose KV is written, or is being written by the step in flight
        self.num_cached_tokens = -1  # prompt tokens from the prefix cache at first admission; -1 before it
        self.scheduled_time: float | None = None  # of the first admission, in seconds on the monotonic clock
        self.num_preemptions = 0
        # First prompt position whose logits are still to be read for the next token's logprobs; None: no such position.
        self.next_prompt_row: int | None = None
        self._advance_to(sampling_params.first_prompt_row)
        # `next_prompt_row` at the last admission: final hidden states are kept from there to the prompt's end.
        self.hidden_from: int | None = None
        self.block_hashes: list[bytes] = []  # content hashes of its leading full blocks, computed on demand

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
    def kv_transfer_params(self) -> dict[str, Any] | None:
        """The request's parameters for the connector that carries its KV blocks."""
        return (self.sampling_params.extra_args or {}).get("kv_transfer_params")

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

    def drop_last(self, count: int, block_size: int) -> None:
        """Forget the last `count` known tokens."""
        del self.token_ids[len(self.token_ids) - count :]
        del self.block_hashes[len(self.token_ids) // block_size :]

    def sort_key(self) -> tuple[int, float, int]:
        """Order under the priority policy: lower runs earlier, ties by arrival; unique within a scheduler."""
        return (self.priority, self.arrival_time, self.arrival_index)

    def __repr__(self) -> str:
        return f"Request({self.request_id}, {self.status.value}, {self.num_computed_tokens}/{self.num_tokens} tokens)"
