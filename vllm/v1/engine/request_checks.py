"""Checks of one request's parameters that need more than the parameters: the tokenizer, the grammars, the model."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.v1.structured_output.finite_values import MAX_VALUES, longest_enum
from vllm.v1.structured_output.grammar import schema_of
from vllm.v1.structured_output.matcher import grammars_of


def spell_bad_words(words: Sequence[str], tokenizer: Tokenizer | None, vocab_size: int) -> list[list[int]]:
    """The token sequences that write the words: each as at the start of a text, and as after a space, where that has
    another first token and equally many tokens. Spaces in front of a word are ignored. Sequences with an id of
    `vocab_size` or above can never be generated and are left out.

    Raises:
        VLLMValidationError: there is no tokenizer, or it has no token for a word.
    """
    if tokenizer is None:
        raise VLLMValidationError(
            "bad_words need a tokenizer, and skip_tokenizer_init left it out", "bad_words", list(words)
        )
    sequences: list[list[int]] = []
    for word in words:
        text = word.lstrip(" ") or word
        alone = tokenizer.encode(text, add_special_tokens=False)
        if not alone:
            raise VLLMValidationError(f"bad_words holds {word!r}, which has no token", "bad_words", word)
        sequences.append(alone)
        after_space = tokenizer.encode(f" {text}", add_special_tokens=False)
        if len(after_space) == len(alone) and after_space[0] != alone[0]:
            sequences.append(after_space)
    return [sequence for sequence in sequences if max(sequence) < vocab_size]


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


def check_readable(config: ModelConfig, params: SamplingParams, prompt_len: int) -> None:
    """Raises VLLMValidationError where `choice_readings` or `field_readings` of valid parameters cannot be honoured:
    for too many values, and for choices without a token or that the context does not hold."""
    form = params.structured_outputs
    if form is None or not (params.choice_readings or params.field_readings):
        return
    name = "choice_readings" if params.choice_readings else "field_readings"
    choices = form.choice or []
    count = len(choices) if params.choice_readings else longest_enum(schema_of(form))
    if count > MAX_VALUES:
        raise VLLMValidationError(f"{name} are of at most {MAX_VALUES} values, got {count}", name, count)
    spell = grammars_of(config).spell
    for text in choices:
        num_tokens = len(spell(text))
        if not num_tokens:
            raise VLLMValidationError(f"{name}: an empty choice has no token to read", name, text)
        if prompt_len + num_tokens - 1 > config.max_model_len:
            message = (
                f"{name}: the prompt has {prompt_len} tokens and choice {text!r} {num_tokens}; all but its last must "
                f"fit within max_model_len={config.max_model_len}"
            )
            raise VLLMValidationError(message, name, num_tokens)
