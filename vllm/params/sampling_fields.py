"""Fields of SamplingParams, their values and the endpoints that take them: the rows that annotate the class's
fields."""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any, Literal, NamedTuple

import numpy as np

from vllm import envs
from vllm.exceptions import VLLMValidationError, shown
from vllm.utils.checks import (
    MAX_INTEGER,
    check_boolean,
    check_id_sequence,
    check_integer,
    check_logit_bias,
    check_number,
    check_processors,
    check_texts,
    check_token_id_rows,
    check_token_ids,
    wrong_type,
)

MAX_LOGPROB_TOKEN_IDS = 128
"""Default cap on the length of `logprob_token_ids`; the engine argument `max_logprob_token_ids` raises it."""

MAX_STOP_STRINGS = 1024
MAX_TEMPERATURE = 1e30

MAX_SEQUENCES = 16384
"""Limit of `n` and `best_of`; VLLM_MAX_N_SEQUENCES may lower it."""

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
LOGPROBS_MODES: tuple[str, ...] = typing.get_args(LogprobsMode)


class At(Flag):
    """Endpoints that take a field. Offline, all fields are taken."""

    NONE = 0
    TEXTS = auto()  # /v1/completions, /v1/chat/completions
    IDS = auto()  # /inference/v1/generate
    HTTP = TEXTS | IDS


class Limits(NamedTuple):
    """The range of a number: [low, high], or (low, high] with `open_low`. Those that the model sets are narrower."""

    low: float
    high: float
    open_low: bool = False


@dataclass(frozen=True, kw_only=True)
class SamplingField:
    """A row; the field's name, type and default are the class's.

    Attributes:
        check: (name, value) to the value that is kept; VLLMValidationError where it cannot be.
        limits: of a number.
        least, most: lengths of a list.
        none_is_empty: None becomes an empty list.
        is_copied: by SamplingParams.clone.
        in_vocabulary: SamplingParams.verify looks at the ids; those of readings have a cap beside it.
        packed, unpacked: to what msgspec can encode, and back from what it has decoded.
        at: the endpoints that take it.
        about: its description in their schema.
        alias: another name of it in bodies.
        refusal: where others refuse it: the neutral values that they take, and why. None: they do not know it.
        ignored_at: the endpoints that take any value and ignore it.
        in_model: a model's generation_config.json may have a default of it.
        flag: help of its command-line flag, if there is one.
    """

    check: Callable[[str, Any], Any]
    limits: Limits | None = None
    least: int | None = None
    most: int | None = None
    none_is_empty: bool = False
    is_copied: bool = False
    in_vocabulary: bool = False
    packed: Callable[[Any], Any] | None = None
    unpacked: Callable[[Any], Any] | None = None
    at: At = At.HTTP
    about: str | None = None
    alias: str | None = None
    refusal: tuple[tuple[Any, ...], str] | None = None
    ignored_at: At = At.NONE
    in_model: bool = False
    flag: str | None = None


def rows_of(params: Any) -> dict[str, SamplingField]:
    """The rows of a class's public fields, by name. A field without one is a boolean."""
    hints = typing.get_type_hints(params, include_extras=True)
    names = (name for name in params.__struct_fields__ if not name.startswith("_"))
    return {name: next(iter(getattr(hints[name], "__metadata__", ())), boolean()) for name in names}


def number(
    low: float, high: float, open_low: bool = False, then: Callable[[float], float] | None = None, **more: Any
) -> SamplingField:
    """`then`: what a number within the limits becomes."""

    def check(name: str, value: Any) -> float:
        found = check_number(name, value, low, high, open_low)
        return found if then is None else then(found)

    return SamplingField(check=check, limits=Limits(low, high, open_low), **more)


def integer(
    low: int, high: int = MAX_INTEGER, then: Callable[[int], int | None] | None = None, **more: Any
) -> SamplingField:
    """As `number`, of an integer."""

    def check(name: str, value: Any) -> int | None:
        found = check_integer(name, value, low, high)
        return found if then is None else then(found)

    return SamplingField(check=check, limits=Limits(low, high), **more)


def count_of_sequences() -> SamplingField:
    def check(name: str, value: Any) -> int:
        return check_integer(name, value, 1, min(MAX_SEQUENCES, envs.max_sequences()))

    return SamplingField(check=check, limits=Limits(1, MAX_SEQUENCES))


def count_of_tokens(**more: Any) -> SamplingField:
    """At least 0, or None beside a default."""

    def check(name: str, value: Any) -> int | None:
        return None if value is None else check_integer(name, value, 0)

    return SamplingField(check=check, limits=Limits(0, MAX_INTEGER), **more)


def top_logprobs(**more: Any) -> SamplingField:
    """Number of the most likely tokens; -1: all."""

    def check(name: str, value: Any) -> int | None:
        # An older spelling: True meant one more than the token itself.
        if isinstance(value, bool):
            return 1 if value else None
        return check_integer(name, value, -1)

    return SamplingField(check=check, limits=Limits(-1, MAX_INTEGER), **more)


def boolean(**more: Any) -> SamplingField:
    def check(name: str, value: Any) -> Any:
        check_boolean(name, value)
        return value

    return SamplingField(check=check, **more)


def texts(most: int | None = None) -> SamplingField:
    def check(name: str, value: Any) -> list[str]:
        found = check_texts(name, value)
        if most is not None and len(found) > most:
            raise VLLMValidationError(
                f"{name} has {len(found)} strings, which is more than the limit of {most}", name, len(found)
            )
        return found

    return SamplingField(check=check, most=most, none_is_empty=True, is_copied=True)


def token_ids(**more: Any) -> SamplingField:
    """Distinct ids; none of them is None, or an empty list with `none_is_empty`, or with `least` an error."""

    def check(name: str, value: Any) -> list[int] | None:
        ids = check_token_ids(name, value)
        if not ids and row.least:
            raise VLLMValidationError(f"{name} must not be empty", name, [])
        return ids if ids or row.none_is_empty else None

    row = SamplingField(check=check, is_copied=True, **more)
    return row


def id_sequence(**more: Any) -> SamplingField:
    """Ids that may stand twice."""
    return SamplingField(check=lambda name, value: check_id_sequence(name, value) or None, is_copied=True, **more)


def id_rows(**more: Any) -> SamplingField:
    """Ids for all positions, or a row of ids for one position after another."""

    def packed(value: Any) -> Any:
        return (value.shape[1], value.tobytes()) if isinstance(value, np.ndarray) else value

    def unpacked(value: Any) -> Any:
        return np.frombuffer(value[1], np.int32).reshape(-1, value[0]) if isinstance(value[-1], bytes) else value

    return SamplingField(check=check_token_id_rows, is_copied=True, packed=packed, unpacked=unpacked, **more)


def biases() -> SamplingField:
    """By token id."""
    return SamplingField(check=lambda name, value: check_logit_bias(value), is_copied=True, in_vocabulary=True)


def processors(**more: Any) -> SamplingField:
    return SamplingField(check=lambda name, value: check_processors(name, value) or None, is_copied=True, **more)


def mapping(**more: Any) -> SamplingField:
    def check(name: str, value: Any) -> Any:
        if not isinstance(value, dict):
            raise wrong_type(name, value, "a dict")
        return value

    return SamplingField(check=check, is_copied=True, **more)


def mode() -> SamplingField:
    def check(name: str, value: Any) -> Any:
        if not (isinstance(value, str) and value in LOGPROBS_MODES):
            raise VLLMValidationError(
                f"{name} must be one of {', '.join(LOGPROBS_MODES)}, got {shown(value)}", name, value
            )
        return value

    return SamplingField(check=check)


def early_stopping(**more: Any) -> SamplingField:
    def check(name: str, value: Any) -> Any:
        if not isinstance(value, bool) and not (isinstance(value, str) and value == "never"):
            raise wrong_type(name, value, "True, False or 'never'")
        return value

    return SamplingField(check=check, **more)


def refused(
    is_neutral: Callable[[Any], bool], instead: str, refusal: tuple[tuple[Any, ...], str] | None = None
) -> SamplingField:
    """A field that is not implemented: None is taken, and what `is_neutral` holds for. `instead` ends the refusal
    offline."""

    def check(name: str, value: Any) -> Any:
        if value is not None and not is_neutral(value):
            raise VLLMValidationError(f"{name} is not supported by this engine: {instead}", name, value)
        return value

    return SamplingField(check=check, at=At.NONE, refusal=refusal)


def is_zero(value: Any) -> bool:
    """Whether an integer or a bool is 0."""
    return isinstance(value, int) and value == 0


# Fields that beam search cannot be combined with: field -> values that leave it alone, the normal one first.
BEAM_SEARCH_NEEDS: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "top_p": (1.0,),
    "top_k": (0,),
    "min_p": (0.0,),
    "stop": ([],),
    "logprobs": (None,),
    "logprob_token_ids": (None,),
    "prompt_logprobs": (None,),
    "prompt_logprob_token_ids": (None,),
    "grammar_readings": (False,),
    "choice_readings": (False,),
    "field_readings": (False,),
}

# The same for a given continuation: it is the one sequence there is, and nothing may end or change it.
TRACE_NEEDS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (None, 1),
    "use_beam_search": (False,),
    "bad_words": ([], None),
    "repetition_detection": (None,),
    "structured_outputs": (None,),
}


def check_needs(params: Any, what: str, needs: dict[str, tuple[Any, ...]]) -> None:
    """Refuse every value of `params` that `what` cannot be combined with."""
    for name, allowed in needs.items():
        value = getattr(params, name)
        if isinstance(value, np.ndarray) or value not in allowed:
            raise VLLMValidationError(f"{what} needs {name}={allowed[0]!r}, got {shown(value)}", name, value)
    if params.max_tokens == 0:
        raise VLLMValidationError(f"{what} needs max_tokens of at least 1, got 0", "max_tokens", 0)
