"""What a user asks of a beam search, and what it returns."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from vllm.logprobs import FlatLogprobs
from vllm.utils.checks import check_boolean, check_integer, check_number, wrong_type

MAX_BEAM_WIDTH = 16384

_MAX_LOG_DIVISOR = 600.0  # within it neither the divisor nor the quotient leaves the range of a float64


def beam_search_score(cum_logprob: float, length: int, length_penalty: float) -> float:
    """What sequences are ranked by: cum_logprob / length ** length_penalty, the divisor kept in [e-600, e600].

    Args:
        cum_logprob: sum of the generated tokens' logprobs.
        length: number of generated tokens, the one that ends the sequence included; at least 1.
        length_penalty: above 0 favours long sequences, below 0 short ones.
    """
    exponent = length_penalty * math.log(length)
    return cum_logprob / math.exp(max(-_MAX_LOG_DIVISOR, min(exponent, _MAX_LOG_DIVISOR)))


@dataclass
class BeamSearchParams:
    """Parameters of `LLM.beam_search`. Field names, defaults and meanings are vLLM's; `skip_special_tokens` and
    `early_stopping` (True, False or "never", as in transformers) are additions.

    `temperature` divides the logits, 0 leaves them as they are. Sequences are ranked by
    cumulative logprob / generated length ** `length_penalty`. `include_stop_str_in_output` is about the text: the
    token that ended a sequence is among its tokens in any case.

    Raises:
        VLLMValidationError: a field's type or range is wrong; names the field, the value and the limit.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        self.beam_width = check_integer("beam_width", self.beam_width, low=1, high=MAX_BEAM_WIDTH)
        self.max_tokens = check_integer("max_tokens", self.max_tokens, low=1)
        self.temperature = check_number("temperature", self.temperature, 0.0, math.inf)
        self.length_penalty = check_number("length_penalty", self.length_penalty, -100.0, 100.0)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            check_boolean(name, getattr(self, name))
        if self.early_stopping != "never" and not isinstance(self.early_stopping, bool):
            raise wrong_type("early_stopping", self.early_stopping, "True, False or 'never'")


@dataclass
class BeamSearchSequence:
    """One sequence that a beam search found.

    Attributes:
        tokens: the prompt's ids and the generated ones, the token that ended it included.
        logprobs: for each generated token `{token_id: Logprob}`, over numpy arrays: the token itself first, then the
            most likely ones that it was chosen from.
        cum_logprob: sum of the generated tokens' logprobs.
        score: what sequences are ranked by: beam_search_score of cum_logprob and the generated length.
        text: of all tokens, the prompt's included; None without a tokenizer.
        finish_reason: "stop" or "length".
        stop_reason: the stop token id that ended it; None for the end-of-sequence token.
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
        sequences: best first, `beam_width` of them; fewer where fewer sequences exist.
        error: what went wrong with this prompt, whose sequences are then empty; None otherwise.
    """

    sequences: list[BeamSearchSequence]
    error: str | None = None
