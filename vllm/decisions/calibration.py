"""Calibrated probabilities: a temperature, and a bias an option.

With raw shares p of a question's options, the calibrated ones are the softmax of log(p) / temperature + bias
(temperature scaling: Guo et al. 2017, "On Calibration of Modern Neural Networks").

As JSON: {"temperature": 1.4, "bias": {"true": -0.2}} for all questions, and beside or instead of these
"types": {"predicate": {...}} and "names": {"urgent": {...}} with such objects for questions of a type or a name. A
name goes before a type, and a type before all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np

from vllm.decisions.types import Question, QuestionType
from vllm.exceptions import VLLMValidationError
from vllm.utils.checks import check_number, wrong_type

MAX_TEMPERATURE, MAX_BIAS = 1e3, 1e3


@dataclass(frozen=True)
class Scaling:
    """`temperature` in (0, 1000]; `bias` in nats by `Option.key`, 0 where it has none."""

    temperature: float = 1.0
    bias: Mapping[str, float] = field(default_factory=dict)

    def apply(self, shares: np.ndarray, keys: Sequence[str]) -> np.ndarray:
        """Calibrated shares, float64 [options], of raw ones; `keys`: the options'."""
        if self.temperature == 1.0 and not self.bias:
            return shares
        bias = np.asarray([self.bias.get(key, 0.0) for key in keys])
        with np.errstate(divide="ignore"):
            logits = np.log(shares) / self.temperature + bias
        weights = np.exp(logits - logits.max())
        return weights / weights.sum()

    def to_dict(self) -> dict[str, Any]:
        return {"temperature": self.temperature, "bias": dict(self.bias)}


@dataclass(frozen=True)
class Calibration:
    """Scalings of all questions, of those of a type, and of those of a name."""

    default: Scaling = field(default_factory=Scaling)
    types: Mapping[str, Scaling] = field(default_factory=dict)
    names: Mapping[str, Scaling] = field(default_factory=dict)

    @classmethod
    def from_dict(cls, value: Any, name: str = "calibration") -> Calibration:
        """From the JSON object. Raises VLLMValidationError, which names the wrong part."""
        fields = _object(name, value, ("temperature", "bias", "types", "names"))
        default = _scaling(name, {key: fields[key] for key in ("temperature", "bias") if key in fields})
        kinds = get_args(QuestionType)
        types = _scalings(f"{name}.types", fields.get("types"))
        unknown = sorted(set(types) - set(kinds))
        if unknown:
            message = f"{name}.types has {unknown[0]!r}; a question's type is one of {', '.join(kinds)}"
            raise VLLMValidationError(message, f"{name}.types", unknown[0])
        return cls(default, types, _scalings(f"{name}.names", fields.get("names")))

    def to_dict(self) -> dict[str, Any]:
        """The JSON object."""
        groups = {"types": self.types, "names": self.names}
        return self.default.to_dict() | {
            key: {name: own.to_dict() for name, own in group.items()} for key, group in groups.items() if group
        }

    def scaling_of(self, question: Question) -> Scaling:
        """The one that applies to the question."""
        if question.name is not None and question.name in self.names:
            return self.names[question.name]
        return self.types.get(question.type, self.default)


def _scalings(name: str, value: Any) -> dict[str, Scaling]:
    return {str(key): _scaling(f"{name}.{key}", own) for key, own in _object(name, value or {}).items()}


def _scaling(name: str, value: Any) -> Scaling:
    fields = _object(name, value, ("temperature", "bias"))
    temperature = fields.get("temperature")
    bias = _object(f"{name}.bias", fields.get("bias") or {})
    return Scaling(
        1.0
        if temperature is None
        else check_number(f"{name}.temperature", temperature, 0.0, MAX_TEMPERATURE, open_low=True),
        {str(key): check_number(f"{name}.bias.{key}", own, -MAX_BIAS, MAX_BIAS) for key, own in bias.items()},
    )


def _object(name: str, value: Any, known: Sequence[str] | None = None) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise wrong_type(name, value, "an object")
    unknown = [] if known is None else sorted(str(key) for key in value if key not in known)
    if unknown:
        message = f"{name} has an unknown field {unknown[0]!r}; known: {', '.join(known or ())}"
        raise VLLMValidationError(message, name, unknown[0])
    return value
