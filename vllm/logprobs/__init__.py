"""Readings: of a step (`lists`), of a sequence (`flat`) and of one position (`position`)."""

from vllm.logprobs.editable import (
    append_logprobs_for_next_position,
    create_prompt_logprobs,
    create_sample_logprobs,
)
from vllm.logprobs.flat import FlatLogprobs, PromptLogprobs, Readings, SampleLogprobs
from vllm.logprobs.position import Logprob, PositionLogprobs, TokenDecoder, WidePositionLogprobs

LogprobsOnePosition = dict[int, Logprob]
"""A position's entries as callers write them down."""

__all__ = [
    "FlatLogprobs",
    "Logprob",
    "LogprobsOnePosition",
    "PositionLogprobs",
    "PromptLogprobs",
    "Readings",
    "SampleLogprobs",
    "TokenDecoder",
    "WidePositionLogprobs",
    "append_logprobs_for_next_position",
    "create_prompt_logprobs",
    "create_sample_logprobs",
]
