"""When a request ends."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.params.structured import RepetitionDetectionParams


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
