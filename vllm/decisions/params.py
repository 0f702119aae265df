"""How decisions are to be made: the options beside input and questions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from vllm.decisions.calibration import Calibration
from vllm.exceptions import VLLMValidationError
from vllm.utils.checks import check_encodable, check_integer, check_number, wrong_type

READS = ("auto", "labels", "values")

MAX_PERMUTATIONS = 64
"""Most orders of the options that one question is asked in."""


@dataclass(frozen=True)
class DecisionParams:
    """Options of a decision, all off by default.

    Attributes:
        read: "labels" = letters, digits or yes and no that stand for the options; "values" = the options' texts.
            None or "auto": of a small model (`prompts.answers_in_words`) the texts of choices and levels, else labels.
        permutations: orders of the options to average over, at most MAX_PERMUTATIONS; a question that has fewer
            different ones (2 of two options, otherwise twice their number) is asked in all of these.
        min_label_mass: a question with a smaller label mass gets a Refusal; in [0, 1].
        calibration: a Calibration, its JSON object, or the path of a file that holds it.
        chat_template: a Jinja template in place of the model's.
        chat_template_kwargs: variables of the template. enable_thinking is False when left out.
        cache_salt: shares cached prefixes with equal salts only.
        truncate_prompt_tokens: longest prompt, in tokens; -1 = as the context holds. In a longer one the input loses
            its beginning. None: it is an error.

    Raises:
        VLLMValidationError: a value out of range; names the field.
    """

    read: str | None = None
    permutations: int = 1
    min_label_mass: float = 0.0
    calibration: Calibration | Mapping[str, Any] | str | PathLike[str] | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    cache_salt: str | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.read not in READS and self.read is not None:
            raise VLLMValidationError(f"read must be one of {', '.join(READS)}, got {self.read!r}", "read", self.read)
        self._set("permutations", check_integer("permutations", self.permutations, 1, MAX_PERMUTATIONS))
        check_number("min_label_mass", self.min_label_mass, 0.0, 1.0)
        if isinstance(self.calibration, (str, PathLike)):
            self._set("calibration", Calibration.load(self.calibration))
        elif self.calibration is not None and not isinstance(self.calibration, Calibration):
            self._set("calibration", Calibration.from_dict(self.calibration))
        if self.chat_template is not None and not isinstance(self.chat_template, str):
            raise wrong_type("chat_template", self.chat_template, "a Jinja template as a string")
        if self.chat_template_kwargs is not None and not isinstance(self.chat_template_kwargs, Mapping):
            raise wrong_type("chat_template_kwargs", self.chat_template_kwargs, "a dict")
        if self.cache_salt is not None:
            if not isinstance(self.cache_salt, str):
                raise wrong_type("cache_salt", self.cache_salt, "a string")
            check_encodable("cache_salt", self.cache_salt)
        if self.truncate_prompt_tokens is not None:
            limit = check_integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1)
            self._set("truncate_prompt_tokens", limit)
            if limit == 0:
                message = "truncate_prompt_tokens must be -1 or at least 1, got 0"
                raise VLLMValidationError(message, "truncate_prompt_tokens", 0)

    def _set(self, name: str, value: Any) -> None:
        # The class is frozen.
        object.__setattr__(self, name, value)

    @property
    def scalings(self) -> Calibration:
        """The calibration; one that changes nothing when left out."""
        return self.calibration if isinstance(self.calibration, Calibration) else Calibration()
