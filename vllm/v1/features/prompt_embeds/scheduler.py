"""Embeddings of prompts in the scheduler: they go to the workers with their request's slot."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.inputs.embeds import PromptEmbeds
from vllm.v1.core.guests import SchedulerGuest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request


class StepEmbeds(dict[str, PromptEmbeds]):
    """By id, the embeddings of the requests that get slots in a step."""


class EmbeddedPrompts(SchedulerGuest):
    """Keeps their cached blocks apart from those of other content."""

    def __init__(self, requests: Mapping[str, Request]) -> None:
        """`requests`: the scheduler's."""
        self._requests = requests

    def queued(self, request: Request) -> None:
        if request.prompt_embeds is not None:
            # The ids at embedded positions say nothing; all blocks of a request depend on its whole content, then.
            request.cache_salt = f"\0{request.prompt_embeds.digest}\0{request.cache_salt or ''}"

    def fill(self, step: SchedulerOutput) -> None:
        embeds = StepEmbeds()
        for new in step.scheduled_new_reqs:
            if (own := self._requests[new.req_id].prompt_embeds) is not None:
                embeds[new.req_id] = own
        if embeds:
            step.parts.add(embeds)
