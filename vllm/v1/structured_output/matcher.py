"""Compiled grammars of one tokenizer, by llguidance."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from vllm.config import ModelConfig
from vllm.exceptions import VLLMValidationError
from vllm.tokenizers.tokenizer import Tokenizer, get_tokenizer
from vllm.v1.structured_output.structural_tags import lark_of_tag, split_tag
from vllm.v1.structured_output.thinking import Completions, ThinkingMatcher, split_thinking

MAX_CACHED_CHARS = 2**20
"""Grammars are kept up to so many characters in all. They compile to 50 to 150 bytes a character."""

_NOT_ALLOWED = "a token that the grammar does not allow was generated: "
_HALF_REASON = 500  # characters that are shown of a reason's beginning and of its end


class Matcher:
    """Where an answer stands in its grammar."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.num_taken = 0
        """Tokens that it has taken."""

    def copy(self) -> Matcher:
        """Another one at the same place."""
        return Matcher(self._inner.deep_copy())

    def take(self, token_ids: Sequence[int]) -> str | None:
        """Go on by tokens, the end's included; why it cannot, or None."""
        self.num_taken += len(token_ids)
        # One by one, as several are not taken after the answer's end.
        if all(map(self._inner.consume_token, token_ids)):
            return None
        return _NOT_ALLOWED + self._error()

    def fill_mask(self, mask: np.ndarray) -> str | None:
        """Set the bits of allowed tokens, int32 [ceil(V / 32)], lowest first: the end tokens alone after the answer's
        end. Why it cannot, or None."""
        self._inner.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        return self._error() if self._inner.is_error() else None

    def forced(self) -> list[int]:
        """The tokens that follow whatever is drawn, each the only one that its mask would allow."""
        return self._inner.compute_ff_tokens()

    def _error(self) -> str:
        """Without the state and the grammar that follow it."""
        return (self._inner.get_error() or "no reason given").partition("\n")[0]


class Grammars:
    """Compiles grammars, each once as long as it is kept. Threads may share it."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        """
        Args:
            tokenizer_json: contents of a tokenizer.json.
            vocab_size: of the model's logits.
            eos_token_ids: tokens that may end an answer.

        Raises:
            VLLMValidationError: llguidance is missing or does not read the tokenizer, or nothing ends an answer.
        """
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise _unusable(f"llguidance is not installed ({error})") from None
        ends = sorted(eos_token_ids)
        if not ends:
            raise _unusable("the model has no end-of-sequence token to end an answer")
        try:
            self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=ends)
        except BaseException as error:
            # A panic of the library's is no Exception: of a vocabulary with words of a thousand bytes.
            if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
                raise
            raise _unusable(f"llguidance does not read this model's tokenizer: {error}") from None
        self._vocab_size, self._eos_token_ids = vocab_size, ends
        added = json.loads(tokenizer_json).get("added_tokens") or ()
        self._special = {
            each["content"]: each["id"]
            for each in added
            if each["id"] < vocab_size and self._tokenizer.is_special_token(each["id"])
        }
        self._completions = Completions(self._tokenizer, vocab_size)
        self._compiled: OrderedDict[str, Any] = OrderedDict()
        self._num_chars = 0
        self._lock = threading.Lock()

    def start(self, grammar: str) -> Matcher | ThinkingMatcher:
        """A matcher at the beginning of an answer. ValueError: why the grammar does not compile."""
        thinking, grammar = split_thinking(grammar)
        if thinking is None:
            return self._start_form(grammar)
        form = self._start_form(grammar) if grammar else None
        return ThinkingMatcher(thinking, form, self._tokenizer, self._completions, self._eos_token_ids)

    def _start_form(self, grammar: str) -> Matcher:
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is not None:
                self._compiled.move_to_end(grammar)
        if compiled is None:
            compiled = self._compile(grammar)
        return Matcher(compiled.deep_copy())

    def spell(self, text: str) -> list[int]:
        """The tokenizer's ids of a text that continues another; texts of special tokens are texts like any other."""
        ids = self._tokenizer.tokenize_str(text)
        if any(map(self._tokenizer.is_special_token, ids)):
            return self._tokenizer.greedy_tokenize(text)
        return ids

    def _first_error(self, matcher: Matcher) -> str | None:
        """Why an answer cannot go on at its beginning: some grammars are found to be too large only there."""
        mask = np.zeros(-(-self._vocab_size // 32), dtype=np.int32)
        for _ in range(2):
            if (reason := matcher.fill_mask(mask)) is not None or not mask.any():
                return reason
            word = int(np.flatnonzero(mask)[0])
            bit = (int(mask[word]) & -int(mask[word])).bit_length() - 1
            if (reason := matcher.take([32 * word + bit])) is not None:
                # A special token's text may be an answer's, whose mask allows what is not taken then.
                return None if "doesn't satisfy" in reason else reason.removeprefix(_NOT_ALLOWED)
        return None

    def _compile(self, grammar: str) -> Any:
        from llguidance import LLMatcher

        tag = split_tag(grammar)
        lark = grammar if tag is None else lark_of_tag(tag, self._special)
        # Without the interpreter's lock.
        compiled = LLMatcher(self._tokenizer, lark, log_level=0)
        reason = compiled.get_error() if compiled.is_error() else self._first_error(Matcher(compiled.deep_copy()))
        if reason is not None:
            reason = " ".join(reason.split())
            if len(reason) > 2 * _HALF_REASON:
                reason = f"{reason[:_HALF_REASON]} ... {reason[-_HALF_REASON:]}"
            raise ValueError(reason)
        with self._lock:
            if grammar not in self._compiled:
                self._compiled[grammar] = compiled
                self._num_chars += len(grammar)
                while self._num_chars > MAX_CACHED_CHARS and len(self._compiled) > 1:
                    dropped, _ = self._compiled.popitem(last=False)
                    self._num_chars -= len(dropped)
        return compiled


def all_bits_but(token_ids: Iterable[int], vocab_size: int) -> np.ndarray:
    """A mask, as Matcher.fill_mask has it, of all tokens but these."""
    allowed = np.arange(32 * -(-vocab_size // 32)) < vocab_size
    allowed[[each for each in token_ids if each < vocab_size]] = False
    return np.packbits(allowed, bitorder="little").view(np.int32)


def grammars_of(config: ModelConfig) -> Grammars:
    """The model's, one for all of this process. Errors as those of Grammars, and without a tokenizer."""
    if config.skip_tokenizer_init:
        raise _unusable("skip_tokenizer_init left the tokenizer out")
    ends = tuple(sorted(config.hf_config.eos_token_ids))
    with _READING:
        return _grammars(_options(config), config.vocab_size, ends)


def read_early(config: ModelConfig) -> None:
    """Begin to read what all grammars need, in a thread: it may take seconds, and nothing else of this process runs
    meanwhile. Whether it can be read is said to those that ask for a form."""
    if config.runner_type != "pooling" and not config.skip_tokenizer_init:
        threading.Thread(target=_read, args=(config,), name="grammars", daemon=True).start()


def _read(config: ModelConfig) -> None:
    with suppress(ValueError, OSError):
        grammars_of(config)


def share_tokenizer(config: ModelConfig, tokenizer: Tokenizer) -> None:
    """Let grammars use the model's tokenizer, as long as others do, instead of reading it again."""
    _TOKENIZERS[_options(config)] = tokenizer


_READING = threading.Lock()
_TOKENIZERS: WeakValueDictionary[tuple[Any, ...], Tokenizer] = WeakValueDictionary()


def _options(config: ModelConfig) -> tuple[Any, ...]:
    return config.tokenizer, config.tokenizer_mode, config.trust_remote_code, config.tokenizer_revision


@lru_cache(maxsize=4)
def _grammars(options: tuple[Any, ...], vocab_size: int, eos_token_ids: tuple[int, ...]) -> Grammars:
    name, mode, trust_remote_code, revision = options
    tokenizer = _TOKENIZERS.get(options)
    if tokenizer is None:
        tokenizer = get_tokenizer(name, tokenizer_mode=mode, trust_remote_code=trust_remote_code, revision=revision)
    backend = getattr(tokenizer, "backend", None)
    if backend is None:
        raise _unusable("this model's tokenizer is not one of the tokenizers library")
    return Grammars(backend.to_str(), vocab_size, eos_token_ids)


def _unusable(reason: str) -> VLLMValidationError:
    return VLLMValidationError(f"structured_outputs cannot be honoured: {reason}", "structured_outputs")
