"""Readings: of a step (`lists`), of a sequence (`flat`) and of one position (`position`)."""

from vllm.logprobs.flat import FlatLogprobs, PromptLogprobs, Readings, SampleLogprobs
from vllm.logprobs.position import Logprob, PositionLogprobs, TokenDecoder, WidePositionLogprobs

__all__ = [
    "FlatLogprobs",
    "Logprob",
    "PositionLogprobs",
    "PromptLogprobs",
    "Readings",
    "SampleLogprobs",
    "TokenDecoder",
    "WidePositionLogprobs",
]
