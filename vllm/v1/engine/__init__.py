"""The engine: requests in, outputs out."""

import enum
from typing import Literal

from vllm.v1.messages import EngineCoreOutput, EngineCoreRequest

PauseMode = Literal["abort", "wait", "keep"]
"""What becomes of running requests while generation pauses."""

FINISH_REASON_STRINGS = ("stop", "length", "abort", "error", "repetition")


class FinishReason(enum.IntEnum):
    """Why a sequence ended, as upstream numbers it. Outputs hold the word: `str(FinishReason.STOP)` is "stop"."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3
    REPETITION = 4

    def __str__(self) -> str:
        return FINISH_REASON_STRINGS[self.value]


__all__ = [
    "EngineCoreOutput",
    "EngineCoreRequest",
    "FINISH_REASON_STRINGS",
    "FinishReason",
    "PauseMode",
]
