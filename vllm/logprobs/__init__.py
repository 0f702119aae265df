"""Readings: what the sampler hands up (`lists`), what users hold (`flat`), and one position of it (`position`)."""

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
