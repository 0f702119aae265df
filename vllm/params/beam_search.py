"""Parameters and results of a beam search."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from vllm.exceptions import VLLMValidationError
from vllm.logprobs import FlatLogprobs
from vllm.params.structured import StructuredOutputsParams, check_structured
from vllm.utils.checks import (
    check_boolean,
    check_integer,
    check_number,
    check_token_ids,
    raised_temperature,
    wrong_type,
)

MAX_BEAM_WIDTH = 16384

_MAX_LOG_DIVISOR = 600.0  # within it neither the divisor nor the quotient leaves the range of a float64


def beam_search_score(cum_logprob: float, length: int, length_penalty: float) -> float:
    """The rank criterion cum_logprob / length ** length_penalty, the divisor clamped to [e^-600, e^600].

    Args:
        length: generated tokens, the one that ends the sequence included; at least 1.
        length_penalty: above 0 favours long sequences, below 0 short ones.
    """
    exponent = length_penalty * math.log(length)
    return cum_logprob / math.exp(max(-_MAX_LOG_DIVISOR, min(exponent, _MAX_LOG_DIVISOR)))


@dataclass
class BeamSearchParams:
    """Parameters of `LLM.beam_search`: vLLM's, with `early_stopping` (True, False or "never", as transformers has it).

    Sequences are ranked by `beam_search_score` of the logprobs that their tokens have in the model, over the whole
    vocabulary. `temperature` divides the logits first; 0 leaves them unchanged, and others are at least 0.01. Sequences
    are made of `allowed_token_ids` alone, and have the form of `structured_outputs`; what the engine's logits
    processors add to a logit adds to the rank.
    `include_stop_str_in_output` concerns the text; the tokens always include the one that ended the sequence.

    Raises:
        VLLMValidationError: a field's type or range is wrong, or `watermarking` asks for something.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    skip_special_tokens: bool = True
    watermarking: bool | None = None
    allowed_token_ids: list[int] | None = None
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        self.beam_width = check_integer("beam_width", self.beam_width, low=1, high=MAX_BEAM_WIDTH)
        self.max_tokens = check_integer("max_tokens", self.max_tokens, low=1)
        self.temperature = raised_temperature(check_number("temperature", self.temperature, 0.0, math.inf))
        self.length_penalty = check_number("length_penalty", self.length_penalty, -100.0, 100.0)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            check_boolean(name, getattr(self, name))
        if self.early_stopping != "never" and not isinstance(self.early_stopping, bool):
            raise wrong_type("early_stopping", self.early_stopping, "True, False or 'never'")
        self.structured_outputs = check_structured("structured_outputs", self.structured_outputs)
        if self.watermarking:
            message = "watermarking cannot be honoured: texts are not watermarked"
            raise VLLMValidationError(message, "watermarking", self.watermarking)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = check_token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise VLLMValidationError("allowed_token_ids must not be empty", "allowed_token_ids", [])


@dataclass
class BeamSearchSequence:
    """One sequence found by a beam search.

    Attributes:
        tokens: the prompt's ids and the generated ones, with the token that ended it.
        logprobs: for each generated token `{token_id: Logprob}`, over numpy arrays: the token, then the candidates that
            it was chosen from; as the engine's `logprobs_mode` says.
        cum_logprob: sum of the generated tokens' logprobs; in a processed mode, of the processed ones.
        score: `beam_search_score` of what the sequence was ranked by.
        text: of all tokens, the prompt's included; None without a tokenizer.
        finish_reason: "stop" or "length".
        stop_reason: the stop token id; None for the end-of-sequence token.
    """

    tokens: list[int]
    logprobs: FlatLogprobs = field(default_factory=FlatLogprobs)
    cum_logprob: float = 0.0
    score: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The result of a beam search.

    Attributes:
        sequences: best first, `beam_width` of them or as many as exist.
        error: why this prompt has no sequences; None without an error.
    """

    sequences: list[BeamSearchSequence]
    error: str | None = None
