"""Answers through a matcher without a model: whether a text is one, and random ones."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from byte_tokenizer import (
    EOS,
    FIRST_BYTE,
    VOCAB_SIZE,
    WORDS,
    byte_id,
    make_byte_tokenizer,
    token_bytes,
)

from vllm.v1.structured_output.matcher import Grammars, Matcher

TOKENS = {byte_id(byte): bytes([byte]) for byte in range(256)}
TOKENS |= {FIRST_BYTE + 256 + index: text for index, text in enumerate(map(token_bytes, WORDS))}
# Bytes that bring an answer nearer to its end.
_CLOSING = {byte_id(byte) for byte in b'"}]'}
_COMMA = byte_id(ord(","))


def byte_grammars(folder: Path) -> Grammars:
    """Grammars over the byte tokenizer."""
    return Grammars(make_byte_tokenizer(folder).backend.to_str(), VOCAB_SIZE, [EOS])


def allowed_tokens(matcher: Matcher) -> list[int]:
    """The tokens that are allowed at the next position."""
    mask = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.int32)
    assert matcher.fill_mask(mask) is None
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def accepts(matcher: Matcher, text: str, *, longest: bool = False) -> bool:
    """Whether a whole answer has the form: the tokens that spell it, the shortest or the longest that are allowed, and
    then the end. Where only one text can follow, the grammar allows the tokenizer's own spelling alone."""
    rest = text.encode()
    while True:
        allowed = allowed_tokens(matcher)
        if not rest:
            return EOS in allowed and matcher.take([EOS]) is None
        fitting = [each for each in allowed if each in TOKENS and rest.startswith(TOKENS[each])]
        if not fitting:
            return False
        taken = (max if longest else min)(fitting, key=lambda each: len(TOKENS[each]))
        assert matcher.take([taken]) is None
        rest = rest[len(TOKENS[taken]) :]


def random_answer(matcher: Matcher, rng: random.Random, most: int = 400) -> str | None:
    """An answer of random allowed tokens, mostly short ones; None: it has not ended after `most` tokens."""
    said = b""
    for step in range(most):
        allowed = allowed_tokens(matcher)
        if EOS in allowed and (len(allowed) == 1 or rng.random() < 0.5):
            return said.decode()
        choices = [each for each in allowed if each != EOS]
        closing = [each for each in choices if each in _CLOSING]
        if closing and rng.random() < 0.3 + step / 200:
            choices = closing
        elif len(choices) > 1 and step > 60:
            choices = [each for each in choices if each != _COMMA] or choices
        token = rng.choice(choices)
        assert matcher.take([token]) is None
        said += TOKENS[token]
    return None
