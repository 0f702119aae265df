"""Upstream's messages between its processes: ours are others."""

from __future__ import annotations

from typing import ClassVar

from vllm.utils.unserved import Unserved

_INSIDE = "it is a message of upstream's inside; AsyncLLM.generate and LLMEngine.step give RequestOutput"


class EngineCoreOutputs(Unserved):
    """A step's."""

    instead: ClassVar[str] = _INSIDE


class EngineCoreEvent(Unserved):
    """The kinds of events in a request's life."""

    instead: ClassVar[str] = _INSIDE


class EngineCoreRequestType(Unserved):
    """What a core is asked for."""

    instead: ClassVar[str] = _INSIDE
