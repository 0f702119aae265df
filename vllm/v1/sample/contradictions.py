"""Constraints of one request that leave it no token to begin with."""

from __future__ import annotations

from collections.abc import Collection

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams


def check_a_token_is_left(params: SamplingParams, eos_token_ids: Collection[int], vocab_size: int) -> None:
    """Check that the first token can be any. What completes a longer bad word, or what processors do, shows later.

    Args:
        params: from the input processor, with `bad_words_token_ids`.
        eos_token_ids: the model's, which min_tokens forbids beside `stop_token_ids`.

    Raises:
        VLLMValidationError: allowed_token_ids, bad_words and min_tokens together rule out every token.
    """
    bad_words = {word[0] for word in params.bad_words_token_ids or () if len(word) == 1}
    ends = {*eos_token_ids, *(params.stop_token_ids or ())} if params.min_tokens else set()
    ruled_out = bad_words | ends
    allowed: Collection[int] = params.allowed_token_ids or range(vocab_size)
    if len(ruled_out) < len(allowed) or any(each not in ruled_out for each in allowed):
        return
    rules: dict[str, object] = {}
    if params.allowed_token_ids:
        rules["allowed_token_ids"] = params.allowed_token_ids
    if not bad_words.isdisjoint(allowed):
        rules["bad_words"] = params.bad_words
    if any(each not in bad_words for each in allowed):
        rules["min_tokens"] = params.min_tokens
    *others, last = names = list(rules)
    message = f"{', '.join(others)} and {last}" if others else last
    message += " leave no token to generate"
    if "min_tokens" in rules:
        message += f": min_tokens={params.min_tokens} rules out what ends a sequence (stop_token_ids, end of sequence)"
    raise VLLMValidationError(message, names[0], rules[names[0]])
