"""What a user asks of one request: sampling, stopping, and which logprobs to return."""

from __future__ import annotations

import copy
import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cached_property
from typing import Any, Literal

import numpy as np

from vllm.exceptions import VLLMValidationError

MAX_LOGPROB_TOKEN_IDS = 128
"""Default cap on the length of `logprob_token_ids`; the engine argument `max_logprob_token_ids` raises it."""

MAX_STOP_STRINGS = 1024
SAMPLING_EPS = 1e-5
"""Temperatures below this are greedy."""

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
LOGPROBS_MODES: tuple[str, ...] = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


class RequestOutputKind(Enum):
    """Which part of the output each RequestOutput carries."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass
class SamplingParams:
    """Parameters of one request. Field names, defaults and meanings are vLLM's.

    Readings: `logprobs=k` returns, at every generated position, the sampled token and the k most likely ones
    (-1: the whole vocabulary). `logprob_token_ids` returns the sampled token and exactly these ids. Both together
    return the sampled token, the top k and the ids. `logprobs_mode` (None: the engine's) says what is read:
    "raw_logprobs" / "raw_logits" before any processing, "processed_logprobs" / "processed_logits" after penalties,
    bias, temperature and truncation.

    Raises:
        VLLMValidationError: a field's type or range is wrong; names the field, the value and the limit. Limits that
            depend on the model (vocabulary, context, caps) are checked by `verify` when the request is queued.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    logprobs_mode: LogprobsMode | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    extra_args: dict[str, Any] | None = field(default=None)

    def __post_init__(self) -> None:
        self._normalise_numbers()
        self._normalise_stops()
        self.logprob_token_ids = _token_id_list("logprob_token_ids", self.logprob_token_ids) or None
        self._normalise_bias()
        self._check_combinations()

    # The checks run in this order so that the first complaint is about the field's type, then its range.

    def _normalise_numbers(self) -> None:
        self.n = _integer("n", self.n, low=1)
        self.presence_penalty = _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self.frequency_penalty = _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self.repetition_penalty = _number("repetition_penalty", self.repetition_penalty, 0.0, 2.0, open_low=True)
        self.temperature = _number("temperature", self.temperature, 0.0, math.inf)
        self.top_p = _number("top_p", self.top_p, 0.0, 1.0, open_low=True)
        self.top_k = max(_integer("top_k", self.top_k, low=-1, high=2**31 - 1), 0)
        self.min_p = _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            # -1 is upstream's spelling of "no seed".
            seed = _integer("seed", self.seed, low=_INT64_MIN, high=_INT64_MAX)
            self.seed = None if seed == -1 else seed
        if self.max_tokens is not None:
            self.max_tokens = _integer("max_tokens", self.max_tokens, low=1)
        self.min_tokens = _integer("min_tokens", self.min_tokens, low=0)
        if self.logprobs is True:
            # An older spelling: True meant the sampled token and one more.
            self.logprobs = 1
        elif self.logprobs is False:
            self.logprobs = None
        if self.logprobs is not None:
            self.logprobs = _integer("logprobs", self.logprobs, low=-1)
        if self.logprobs_mode is not None and self.logprobs_mode not in LOGPROBS_MODES:
            raise VLLMValidationError(
                f"logprobs_mode must be one of {', '.join(LOGPROBS_MODES)}, got {self.logprobs_mode!r}",
                parameter="logprobs_mode",
                value=self.logprobs_mode,
            )
        for name in (
            "include_stop_str_in_output",
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
        ):
            _boolean(name, getattr(self, name))
        if not isinstance(self.output_kind, RequestOutputKind):
            raise _wrong("output_kind", self.output_kind, "a RequestOutputKind")

    def _normalise_stops(self) -> None:
        if self.stop is None:
            self.stop = []
        elif isinstance(self.stop, str):
            self.stop = [self.stop]
        elif isinstance(self.stop, Iterable):
            self.stop = list(self.stop)
        else:
            raise _wrong("stop", self.stop, "a string or a list of strings")
        for text in self.stop:
            if not isinstance(text, str):
                raise _wrong("stop", text, "a string or a list of strings")
            if not text:
                raise VLLMValidationError("stop cannot contain an empty string", parameter="stop", value=text)
            if any("\ud800" <= char <= "\udfff" for char in text):
                raise VLLMValidationError("stop cannot contain a lone surrogate", parameter="stop", value=text)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise VLLMValidationError(
                f"stop has {len(self.stop)} strings, which is more than the limit of {MAX_STOP_STRINGS}",
                parameter="stop",
                value=len(self.stop),
            )
        self.stop_token_ids = _token_id_list("stop_token_ids", self.stop_token_ids)

    def _normalise_bias(self) -> None:
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, dict):
                raise _wrong("logit_bias", self.logit_bias, "a dict of token id to bias")
            self.logit_bias = {
                _bias_key(key): _number("logit_bias", value, -100.0, 100.0) for key, value in self.logit_bias.items()
            } or None
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _token_id_list("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise VLLMValidationError(
                    "allowed_token_ids must not be empty", parameter="allowed_token_ids", value=[]
                )
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            raise _wrong("extra_args", self.extra_args, "a dict")

    def _check_combinations(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise VLLMValidationError(
                f"min_tokens must be at most max_tokens={self.max_tokens}, got {self.min_tokens}",
                parameter="min_tokens",
                value=self.min_tokens,
            )
        if self.stop and not self.detokenize:
            raise VLLMValidationError(
                "stop strings need detokenize=True, or nothing is there to search them in",
                parameter="stop",
                value=self.stop,
            )
        if self.is_greedy and self.n > 1:
            raise VLLMValidationError(
                f"n must be 1 when sampling is greedy (temperature 0), got {self.n}", parameter="n", value=self.n
            )

    @property
    def num_logprobs(self) -> int | None:
        """How many readings a position has beside the sampled token's: `logprobs`, else the number of
        `logprob_token_ids`, else None. Whether it is None is all that decides if readings exist."""
        if self.logprobs is not None:
            return self.logprobs
        return len(self.logprob_token_ids) if self.logprob_token_ids else None

    @property
    def is_greedy(self) -> bool:
        """True when the most likely token is taken, without randomness."""
        return self.temperature < SAMPLING_EPS

    @cached_property
    def logprob_token_ids_np(self) -> np.ndarray:
        """The ids as a read-only int32 array [num ids]; empty when none were asked for."""
        array = np.asarray(self.logprob_token_ids or [], dtype=np.int32)
        array.flags.writeable = False
        return array

    def verify(self, vocab_size: int, max_logprobs: int, max_logprob_token_ids: int) -> None:
        """Check what depends on the model and the engine.

        Args:
            vocab_size: number of token ids of the model.
            max_logprobs: cap on `logprobs`; -1 means the vocabulary.
            max_logprob_token_ids: cap on the length of `logprob_token_ids`; -1 means the vocabulary.

        Raises:
            VLLMValidationError: a cap is exceeded, or a token id is outside [0, vocab_size).
        """
        cap = vocab_size if max_logprobs == -1 else max_logprobs
        asked = vocab_size if self.logprobs == -1 else self.logprobs
        if asked is not None and asked > min(cap, vocab_size):
            raise VLLMValidationError(
                f"Requested logprobs of {asked}, which is greater than max allowed: {min(cap, vocab_size)}",
                parameter="logprobs",
                value=self.logprobs,
            )
        ids = self.logprob_token_ids or []
        cap = vocab_size if max_logprob_token_ids == -1 else max_logprob_token_ids
        if len(ids) > cap:
            raise VLLMValidationError(
                f"Requested logprob_token_ids of length {len(ids)}, which is greater than max allowed: {cap}",
                parameter="logprob_token_ids",
                value=len(ids),
            )
        _check_vocabulary("logprob_token_ids", ids, vocab_size)
        _check_vocabulary("stop_token_ids", self.stop_token_ids or [], vocab_size)
        _check_vocabulary("allowed_token_ids", self.allowed_token_ids or [], vocab_size)
        _check_vocabulary("logit_bias", list(self.logit_bias or ()), vocab_size)

    def clone(self) -> SamplingParams:
        """A copy that shares no mutable field with this one; already validated, so nothing is checked again."""
        twin = copy.copy(self)
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, (list, dict)):
                setattr(twin, item.name, copy.copy(value))
        return twin

    def child(self, index: int) -> SamplingParams:
        """The parameters of sample `index` of an n > 1 request: n = 1, and a seed of its own."""
        twin = self.clone()
        twin.n = 1
        if self.seed is not None:
            twin.seed = (self.seed + index + 2**63) % 2**64 - 2**63
        return twin


def _wrong(name: str, value: Any, expected: str) -> VLLMValidationError:
    return VLLMValidationError(f"{name} must be {expected}, got {type(value).__name__}", parameter=name, value=value)


def _boolean(name: str, value: Any) -> None:
    if not isinstance(value, (bool, np.bool_)):
        raise _wrong(name, value, "a bool")


def _integer(name: str, value: Any, low: int, high: int | None = None) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise _wrong(name, value, "an integer")
    try:
        number = operator.index(value)
    except TypeError:
        raise _wrong(name, value, "an integer") from None
    if number < low or (high is not None and number > high):
        limits = f"at least {low}" if high is None else f"between {low} and {high}"
        raise VLLMValidationError(f"{name} must be {limits}, got {number}", parameter=name, value=value)
    return number


def _number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> float:
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise _wrong(name, value, "a number")
    number = float(value)
    too_low = number <= low if open_low else number < low
    if math.isnan(number) or math.isinf(number) or too_low or number > high:
        left = "(" if open_low else "["
        right = ")" if math.isinf(high) else "]"
        raise VLLMValidationError(
            f"{name} must be in {left}{low:g}, {high:g}{right}, got {number:g}", parameter=name, value=value
        )
    return number


def _token_id_list(name: str, values: Any) -> list[int]:
    """A list of distinct non-negative Python ints in the order given. Lists, tuples, sets, ranges and one-dimensional
    integer arrays (or tensors) are accepted; bools, floats and strings are not, nor are such elements."""
    if values is None:
        return []
    if isinstance(values, range):
        ids = list(values)
    elif isinstance(values, (str, bytes, dict)) or not isinstance(values, Iterable):
        raise _wrong(name, values, "a list of integers")
    else:
        elements = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(elements, Iterable):
            raise _wrong(name, values, "a list of integers")
        ids = [_token_id(name, element) for element in elements]
    if ids and min(ids) < 0:
        raise VLLMValidationError(f"{name} must not be negative, got {min(ids)}", parameter=name, value=min(ids))
    return list(dict.fromkeys(ids))


def _token_id(name: str, value: Any) -> int:
    if type(value) is int:
        return value
    if isinstance(value, (bool, np.bool_)):
        raise VLLMValidationError(f"{name} must hold integers, got bool {value!r}", parameter=name, value=value)
    try:
        return operator.index(value)
    except TypeError:
        raise VLLMValidationError(
            f"{name} must hold integers, got {type(value).__name__} {value!r}", parameter=name, value=value
        ) from None


def _bias_key(key: Any) -> int:
    # JSON objects have string keys only, so digits are accepted as OpenAI's clients send them.
    if isinstance(key, str) and key.isascii() and key.isdigit():
        return int(key)
    token_id = _token_id("logit_bias", key)
    if token_id < 0:
        raise VLLMValidationError(
            f"logit_bias token ids must not be negative, got {token_id}", parameter="logit_bias", value=key
        )
    return token_id


def _check_vocabulary(name: str, ids: list[int], vocab_size: int) -> None:
    if not ids:
        return
    highest = max(ids)
    if highest >= vocab_size:
        raise VLLMValidationError(
            f"{name} must be in [0, {vocab_size}), the model's vocabulary; got {highest}",
            parameter=name,
            value=highest,
        )
