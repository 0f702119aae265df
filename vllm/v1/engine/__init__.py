"""The engine: requests in, outputs out."""

from typing import Literal

from vllm.v1.messages import FINISH_REASON_STRINGS, EngineCoreOutput, EngineCoreRequest, FinishReason

PauseMode = Literal["abort", "wait", "keep"]
"""The fate of running requests while generation pauses."""

__all__ = [
    "EngineCoreOutput",
    "EngineCoreRequest",
    "FINISH_REASON_STRINGS",
    "FinishReason",
    "PauseMode",
]
