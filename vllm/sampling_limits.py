"""What SamplingParams' fields may hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from vllm import envs
from vllm.exceptions import VLLMValidationError, shown
from vllm.utils.checks import MAX_INTEGER

MAX_LOGPROB_TOKEN_IDS = 128
"""Default cap on the length of `logprob_token_ids`; the engine argument `max_logprob_token_ids` raises it."""

MAX_STOP_STRINGS = 1024
MAX_TEMPERATURE = 1e30
MIN_PENALTY, MAX_PENALTY = 1e-6, 1e6
"""Beyond these, float32 logits would overflow."""

MAX_SEQUENCES = 16384
"""Limit of `n` and `best_of`; VLLM_MAX_N_SEQUENCES may lower it."""

LogprobsMode = Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"]
LOGPROBS_MODES: tuple[str, ...] = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


class Limits(NamedTuple):
    """The range of a field: [low, high], or (low, high] with `open_low`."""

    low: float
    high: float
    open_low: bool = False


LIMITS = {
    "n": Limits(1, MAX_SEQUENCES),
    "best_of": Limits(1, MAX_SEQUENCES),
    "presence_penalty": Limits(-2.0, 2.0),
    "frequency_penalty": Limits(-2.0, 2.0),
    "repetition_penalty": Limits(MIN_PENALTY, MAX_PENALTY),
    "temperature": Limits(0.0, MAX_TEMPERATURE),
    "top_p": Limits(0.0, 1.0, open_low=True),
    "top_k": Limits(-1, 2**31 - 1),
    "min_p": Limits(0.0, 1.0),
    "length_penalty": Limits(-100.0, 100.0),
    "seed": Limits(-(2**63), 2**63 - 1),
    "max_tokens": Limits(0, MAX_INTEGER),
    "min_tokens": Limits(0, MAX_INTEGER),
    "truncate_prompt_tokens": Limits(-1, MAX_INTEGER),
    "logprobs": Limits(-1, MAX_INTEGER),
    "prompt_logprobs": Limits(-1, MAX_INTEGER),
    "prompt_logprob_start": Limits(0, MAX_INTEGER),
    "stream_interval": Limits(0, MAX_INTEGER),
}
"""Of single numbers. Those that the model sets are narrower."""


def integer_limits(name: str) -> tuple[int, int]:
    """The lowest and highest value of an integer field; VLLM_MAX_N_SEQUENCES sets the highest `n`."""
    low, high, _ = LIMITS[name]
    return int(low), min(int(high), envs.VLLM_MAX_N_SEQUENCES) if name in ("n", "best_of") else int(high)


NUMBERS = (
    "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p", "length_penalty",
)  # fmt: skip
INTEGERS = ("n", "top_k", "min_tokens")
OPTIONAL_INTEGERS = ("best_of", "seed", "max_tokens", "truncate_prompt_tokens", "stream_interval")


def _is_zero(value: Any) -> bool:
    return isinstance(value, int) and value == 0


def _asks_for_no_form(value: Any) -> bool:
    return hasattr(value, "all_constraints_none") and value.all_constraints_none()


_NO_GRAMMARS = (
    "grammars are not implemented; use allowed_token_ids for a choice of single tokens, LLM.score_labels for a choice "
    "of texts, or a logits processor"
)

# What is taken at its neutral value alone: field -> (whether a value other than None is neutral, what to do instead).
REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "watermarking": (_is_zero, "texts are not watermarked; leave it out"),
    "structured_outputs": (_asks_for_no_form, _NO_GRAMMARS),
    "guided_decoding": (_asks_for_no_form, _NO_GRAMMARS),
    "thinking_token_budget": (lambda value: False, "bound the whole output by max_tokens"),
    "routed_experts_prompt_start": (_is_zero, "routed experts are not returned"),
}

# What beam search cannot be combined with: field -> values that leave it alone, the normal one first.
BEAM_SEARCH_NEEDS: dict[str, tuple[Any, ...]] = {
    "temperature": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "top_p": (1.0,),
    "top_k": (0,),
    "min_p": (0.0,),
    "stop": ([],),
    "logprobs": (None,),
    "logprob_token_ids": (None,),
    "prompt_logprobs": (None,),
    "prompt_logprob_token_ids": (None,),
}

# The same for a given continuation: it is the one sequence there is, and nothing may end or change it.
TRACE_NEEDS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (None, 1),
    "use_beam_search": (False,),
    "bad_words": ([], None),
    "repetition_detection": (None,),
}


def check_needs(params: Any, what: str, needs: dict[str, tuple[Any, ...]]) -> None:
    """Refuse every value of `params` that `what` cannot be combined with."""
    for name, allowed in needs.items():
        value = getattr(params, name)
        if isinstance(value, np.ndarray) or value not in allowed:
            raise VLLMValidationError(f"{what} needs {name}={allowed[0]!r}, got {shown(value)}", name, value)
    if params.max_tokens == 0:
        raise VLLMValidationError(f"{what} needs max_tokens of at least 1, got 0", "max_tokens", 0)
