"""Upstream's built-in processors, and how it builds them: here they are parts of the sampler."""

from __future__ import annotations

from typing import Any, ClassVar

from vllm.utils.unserved import Unserved, refuse

_SAMPLER = "it is a part of the sampler here; give logits_processors=[...] for processors of your own"


class LogitsProcessors(Unserved):
    """All of an engine's."""

    instead: ClassVar[str] = _SAMPLER


class MinPLogitsProcessor(Unserved):
    """SamplingParams.min_p."""

    instead: ClassVar[str] = _SAMPLER


class LogitBiasLogitsProcessor(Unserved):
    """SamplingParams.logit_bias."""

    instead: ClassVar[str] = _SAMPLER


class MinTokensLogitsProcessor(Unserved):
    """SamplingParams.min_tokens."""

    instead: ClassVar[str] = _SAMPLER


class BatchUpdateBuilder(Unserved):
    """Gathers a BatchUpdate."""

    instead: ClassVar[str] = _SAMPLER


def build_logitsprocs(*args: Any, **kwargs: Any) -> Any:
    """
    Raises:
        NotImplementedError: always.
    """
    refuse("build_logitsprocs", _SAMPLER)
