"""Defaults of requests' structured_outputs, and the library."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from vllm.config.unserved import UnservedConfig, as_config, check_neutral, choice
from vllm.exceptions import VLLMValidationError
from vllm.params.structured import StructuredOutputsParams

StructuredOutputsBackend = Literal["auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer"]

_ARGUMENT = "structured_outputs_config"
_SERVED = ("auto", "guidance")


@dataclass
class StructuredOutputsConfig(UnservedConfig):
    """
    Attributes:
        backend: "auto" or "guidance": llguidance. It is named otherwise only to be refused.
        disable_any_whitespace: JSON has no white space between its parts, unless a request says what may stand there.
        disable_additional_properties: JSON objects have their schema's properties only.
        reasoning_parser: of thoughts that a form is to leave free; refused.
        reasoning_parser_plugin: as that.
        enable_in_reasoning: as it is: an answer has its form from its first token on.
        disable_fallback: as it is: there is one library to try.
    """

    instead: ClassVar[str] = "a form binds the whole text; the server's --reasoning-parser parts thoughts from answers"
    harmless: ClassVar[frozenset[str]] = frozenset(
        {
            "backend",
            "disable_any_whitespace",
            "disable_additional_properties",
            "enable_in_reasoning",
            "disable_fallback",
        }
    )

    backend: StructuredOutputsBackend = choice("auto", "auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer")
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    reasoning_parser: str = ""
    reasoning_parser_plugin: str = ""
    enable_in_reasoning: bool = False
    disable_fallback: bool = False

    def applied(self, form: StructuredOutputsParams) -> StructuredOutputsParams:
        """A request's form, with these defaults where it says nothing else."""
        is_tight = self.disable_any_whitespace and form.whitespace_pattern is None
        return replace(
            form,
            disable_any_whitespace=form.disable_any_whitespace or is_tight,
            disable_additional_properties=form.disable_additional_properties or self.disable_additional_properties,
        )


def as_structured_outputs_config(value: Any, backend: str = "auto", tight: bool = False) -> StructuredOutputsConfig:
    """The argument as a configuration; `backend` and `tight` (disable_any_whitespace) come by their older arguments.

    Raises:
        VLLMValidationError: a field that is not known, or that asks for what is not done.
    """
    config = as_config(_ARGUMENT, StructuredOutputsConfig, value) or StructuredOutputsConfig()
    check_neutral(_ARGUMENT, StructuredOutputsConfig, config)
    for name in (config.backend, backend):
        if name not in (None, *_SERVED):
            message = (
                f"{_ARGUMENT}: backend={name!r} is not supported: llguidance compiles all structured_outputs; leave it "
                "out, or name it 'auto' or 'guidance'"
            )
            raise VLLMValidationError(message, _ARGUMENT, name)
    return replace(config, disable_any_whitespace=bool(config.disable_any_whitespace) or tight)
