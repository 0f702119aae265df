"""Calibrated probabilities: a temperature, and a bias an option.

With raw shares p of a question's options, the calibrated ones are the softmax of log(p) / temperature + bias
(temperature scaling: Guo et al. 2017, "On Calibration of Modern Neural Networks").

As JSON: {"temperature": 1.4, "bias": {"true": -0.2}} for all questions, and beside or instead of these
"types": {"predicate": {...}} and "names": {"urgent": {...}} with such objects for questions of a type or a name. A
name goes before a type, and a type before all. An object may hold the "labels" that it was fitted for, which are the
texts of the question's options: a question with other options is then an error. "version" is 1, also when left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, get_args

import numpy as np

from vllm.decisions.types import Question, QuestionType
from vllm.exceptions import VLLMValidationError
from vllm.utils.checks import check_integer, check_number, check_texts, wrong_type

MAX_TEMPERATURE, MAX_BIAS = 1e3, 1e3
VERSION = 1
"""The version of the JSON object."""

_FIELDS = ("temperature", "bias", "labels")


@dataclass(frozen=True)
class Scaling:
    """`temperature` in (0, 1000]; `bias` in nats by `Option.key`, 0 where it has none; `labels`: texts of the options
    that it is for, None = any."""

    temperature: float = 1.0
    bias: Mapping[str, float] = field(default_factory=dict)
    labels: Sequence[str] | None = None

    def apply(self, shares: np.ndarray, keys: Sequence[str]) -> np.ndarray:
        """Calibrated shares, float64 [..., options], of raw ones; `keys`: the options'."""
        if self.temperature == 1.0 and not self.bias:
            return shares
        bias = np.asarray([self.bias.get(key, 0.0) for key in keys])
        with np.errstate(divide="ignore"):
            logits = np.log(shares) / self.temperature + bias
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    def fits(self, question: Question) -> bool:
        """Whether the question has the options that this is for; those of a choice in any order."""
        if self.labels is None:
            return True
        own, others = list(self.labels), [option.text for option in question.options]
        return own == others if question.type == "score" else sorted(own) == sorted(others)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        labels = {} if self.labels is None else {"labels": list(self.labels)}
        return {"temperature": self.temperature, "bias": dict(self.bias), **labels}


@dataclass(frozen=True)
class Calibration:
    """Scalings of all questions, of those of a type, and of those of a name."""

    default: Scaling = field(default_factory=Scaling)
    types: Mapping[str, Scaling] = field(default_factory=dict)
    names: Mapping[str, Scaling] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, value: Any, name: str = "calibration") -> Calibration:
        """From the JSON object. Raises VLLMValidationError, which names the wrong part."""
        fields = _object(name, value, ("version", *_FIELDS, "types", "names"))
        if fields.get("version") is not None:
            check_integer(f"{name}.version", fields["version"], VERSION, VERSION)
        default = _scaling(name, {key: fields[key] for key in _FIELDS if key in fields})
        kinds = get_args(QuestionType)
        types = _scalings(f"{name}.types", fields.get("types"))
        unknown = sorted(set(types) - set(kinds))
        if unknown:
            message = f"{name}.types has {unknown[0]!r}; a question's type is one of {', '.join(kinds)}"
            raise VLLMValidationError(message, f"{name}.types", unknown[0])
        return cls(default, types, _scalings(f"{name}.names", fields.get("names")))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Calibration:
        """From a JSON file. Raises VLLMValidationError, which names the file and the wrong part."""
        source = Path(path)
        try:
            value = json.loads(source.read_text(encoding="utf-8"))
        except OSError as error:
            reason = error.strerror or error
            raise VLLMValidationError(
                f"calibration: cannot read {source}: {reason}", "calibration", str(path)
            ) from None
        except (ValueError, RecursionError) as error:
            message = f"calibration: {source} is not JSON: {error}"
            raise VLLMValidationError(message, "calibration", str(path)) from None
        return cls.from_dict(value, f"calibration ({source.name})")

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        groups = {"types": self.types, "names": self.names}
        return (
            {"version": VERSION}
            | self.default.to_dict()
            | {key: {name: own.to_dict() for name, own in group.items()} for key, group in groups.items() if group}
        )

    def scaling_of(self, question: Question) -> Scaling:
        """The one that applies to the question."""
        if question.name is not None and question.name in self.names:
            return self.names[question.name]
        return self.types.get(question.type, self.default)

    def check(self, questions: Sequence[Question]) -> None:
        """Raises VLLMValidationError if what applies to a question was fitted for other options; names both."""
        for index, question in enumerate(questions):
            scaling = self.scaling_of(question)
            if not scaling.fits(question):
                name = f"questions[{index}]" + (f" ({question.name!r})" if question.name else "")
                own, others = list(scaling.labels or ()), [option.text for option in question.options]
                message = f"calibration is for the labels {own}, and {name} has {others}; {{}} is no calibration"
                raise VLLMValidationError(message, "calibration", own)


def _scalings(name: str, value: Any) -> dict[str, Scaling]:
    return {str(key): _scaling(f"{name}.{key}", own) for key, own in _object(name, value or {}).items()}


def _scaling(name: str, value: Any) -> Scaling:
    fields = _object(name, value, _FIELDS)
    temperature = fields.get("temperature")
    bias = _object(f"{name}.bias", fields.get("bias") or {})
    return Scaling(
        1.0
        if temperature is None
        else check_number(f"{name}.temperature", temperature, 0.0, MAX_TEMPERATURE, open_low=True),
        {str(key): check_number(f"{name}.bias.{key}", own, -MAX_BIAS, MAX_BIAS) for key, own in bias.items()},
        None if fields.get("labels") is None else check_texts(f"{name}.labels", fields["labels"]),
    )


def _object(name: str, value: Any, known: Sequence[str] | None = None) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise wrong_type(name, value, "an object")
    unknown = [] if known is None else sorted(str(key) for key in value if key not in known)
    if unknown:
        message = f"{name} has an unknown field {unknown[0]!r}; known: {', '.join(known or ())}"
        raise VLLMValidationError(message, name, unknown[0])
    return value
