"""Upstream's `tokenization_kwargs` for texts: the names are those of transformers' tokenizers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from vllm.exceptions import VLLMValidationError, shown
from vllm.utils.checks import asks_for_nothing, check_boolean, check_integer, check_neutral

_P = TypeVar("_P")

_FIELD = "tokenization_kwargs"
_KNOWN = ("add_special_tokens", "truncate_prompt_tokens", "truncation", "max_length", "truncation_side")
# Options of transformers and upstream; at other values they ask for padding, or for other outputs than ids.
_NEUTRAL = {
    "padding": "do_not_pad", "pad_prompt_tokens": None, "pad_to_multiple_of": None, "stride": None,
    "is_split_into_words": None, "return_tensors": None, "return_attention_mask": None, "return_token_type_ids": None,
    "return_length": None, "return_offsets_mapping": None, "return_overflowing_tokens": None,
    "return_special_tokens_mask": None, "do_lower_case": None, "needs_detokenization": None, "verbose": True,
}  # fmt: skip
_WHOLE = (False, "do_not_truncate")
# Both strategies are the same for one text. For a pair only the first lets either text go.
_CUTS = (True, "longest_first", "only_first")


@dataclass(frozen=True)
class TextOptions:
    """How texts become tokens.

    Attributes:
        add_special_tokens: whether texts get what the tokenizer puts around them.
        has_truncation: whether `truncate_to` holds in place of the parameters' truncate_prompt_tokens.
        truncate_to: as truncate_prompt_tokens.
        truncation_side: the side that goes; None: the left one where the model generates, else the right one.
    """

    add_special_tokens: bool = True
    has_truncation: bool = False
    truncate_to: int | None = None
    truncation_side: Literal["left", "right"] | None = None

    def applied(self, params: _P) -> _P:
        """SamplingParams or PoolingParams as the options say; anything else as it is."""
        if not self.has_truncation or not hasattr(params, "truncate_prompt_tokens"):
            return params
        own: Any = params.clone()  # type: ignore[attr-defined]
        own.truncate_prompt_tokens = self.truncate_to
        return own


DEFAULT_TEXT_OPTIONS = TextOptions()


def text_options(tokenization_kwargs: Mapping[str, Any] | None, *, of_pairs: bool = False) -> TextOptions:
    """The options that the kwargs stand for.

    Args:
        of_pairs: the texts are pairs, which lose their ends.

    Raises:
        VLLMValidationError: an unknown key, a value that cannot be honoured, or two that contradict each other.
    """
    if tokenization_kwargs is not None and not isinstance(tokenization_kwargs, Mapping):
        raise VLLMValidationError(f"{_FIELD} must be a dict, got {shown(tokenization_kwargs)}", _FIELD)
    given = {name: value for name, value in (tokenization_kwargs or {}).items() if value is not None}
    for name, value in given.items():
        if name in _NEUTRAL:
            is_neutral = isinstance(value, bool | str) and value == _NEUTRAL[name]
            check_neutral(name, None if is_neutral else value, "prompts are ids without padding")
        elif name not in _KNOWN and not asks_for_nothing(value):
            message = f"{_FIELD} takes {', '.join(_KNOWN)}; got {shown(name)}"
            raise VLLMValidationError(message, _FIELD, name)
    special = given.get("add_special_tokens", True)
    check_boolean("add_special_tokens", special)
    side = given.get("truncation_side")
    sides = ("right",) if of_pairs else ("left", "right")
    if side not in (None, *sides):
        raise VLLMValidationError(f"truncation_side must be {' or '.join(sides)}, got {shown(side)}", _FIELD, side)
    return TextOptions(bool(special), *_truncation(given, of_pairs), truncation_side=side)


def _truncation(given: Mapping[str, Any], of_pairs: bool) -> tuple[bool, int | None]:
    """Whether the kwargs say how long prompts may be, and how long."""
    truncation, limits = given.get("truncation"), {}
    for name, least in (("truncate_prompt_tokens", -1), ("max_length", 1)):
        if name in given:
            limits[name] = check_integer(name, given[name], least)
    if limits.get("truncate_prompt_tokens") == 0:
        message = "truncate_prompt_tokens must be -1 or at least 1, got 0"
        raise VLLMValidationError(message, "truncate_prompt_tokens", 0)
    if truncation is None and "max_length" in limits:
        # transformers cuts here with a warning, and upstream does not.
        message = (
            "max_length needs truncation=True, which cuts longer prompts, or False, which leaves them whole; "
            "truncate_prompt_tokens=N cuts without it"
        )
        raise VLLMValidationError(message, _FIELD, limits["max_length"])
    if truncation is not None and truncation not in (*_WHOLE, *(_CUTS[:2] if of_pairs else _CUTS)):
        message = f"truncation must be true or false, got {shown(truncation)}: a strategy for pairs does not apply here"
        raise VLLMValidationError(message, _FIELD, truncation)
    if truncation in _WHOLE:
        if "truncate_prompt_tokens" in limits:
            message = f"truncation={shown(truncation)} and truncate_prompt_tokens contradict each other"
            raise VLLMValidationError(message, _FIELD, limits["truncate_prompt_tokens"])
        return True, None
    if len(set(limits.values())) > 1:
        message = "max_length and truncate_prompt_tokens are two lengths of one prompt: give one"
        raise VLLMValidationError(message, _FIELD, limits["max_length"])
    if truncation is None and not limits:
        return False, None
    return True, next(iter(limits.values()), -1)
