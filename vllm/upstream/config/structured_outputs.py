"""Answers bound to a grammar."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from vllm.config.unserved import UnservedConfig, choice

StructuredOutputsBackend = Literal["auto", "xgrammar", "guidance", "outlines", "lm-format-enforcer"]


@dataclass
class StructuredOutputsConfig(UnservedConfig):
    """Which library is to bind answers to a grammar, and how strictly."""

    instead: ClassVar[str] = "grammars run by llguidance; a request's structured_outputs say the rest"

    backend: StructuredOutputsBackend = choice("auto", "auto", "guidance", "xgrammar", "outlines", "lm-format-enforcer")
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    reasoning_parser: str = ""
    reasoning_parser_plugin: str = ""
    enable_in_reasoning: bool = False
