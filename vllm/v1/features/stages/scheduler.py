"""Tells the stages before the last which tokens were sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from vllm.v1.core.guests import SchedulerGuest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request


@dataclass
class StepTokens:
    """The generated tokens that a step computes, but for drafts."""

    token_ids: dict[str, list[int]] = field(default_factory=dict)  # by request, the last of its tokens in the step


class SampledTokens(SchedulerGuest):
    """Adds to each step the tokens in it that were generated since their request was admitted: 4 bytes a row.

    Args:
        requests: the scheduler's, by id.
    """

    def __init__(self, requests: Mapping[str, Request]) -> None:
        self._requests = requests

    def fill(self, step: SchedulerOutput) -> None:
        found: dict[str, list[int]] = {}
        cached = step.scheduled_cached_reqs
        for request_id, num_computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            request = self._requests[request_id]
            end = num_computed + step.num_scheduled_tokens[request_id]
            if end > request.num_prompt_tokens:
                found[request_id] = request.token_ids[max(num_computed, request.num_prompt_tokens) : end]
        if found:
            step.parts.add(StepTokens(found))
