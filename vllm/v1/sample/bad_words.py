"""bad_words as token ids."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.exceptions import VLLMValidationError
from vllm.tokenizers.tokenizer import Tokenizer


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
