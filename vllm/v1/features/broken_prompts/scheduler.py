"""Forgets the blocks of broken prompts."""

from __future__ import annotations

from typing import Any, NamedTuple

from vllm.v1.core.guests import SchedulerGuest
from vllm.v1.messages import EngineCoreOutput
from vllm.v1.outputs import ModelRunnerOutput


class BrokenPrompts(NamedTuple):
    """The requests of which a step has computed keys and values that are not finite, and no logits."""

    req_ids: frozenset[str]


class BrokenBlocks(SchedulerGuest):
    """The request itself goes on: whether it fails is for its logits to say, which do not depend on how its prompt was
    cut into steps."""

    def __init__(self, scheduler: Any) -> None:
        self._requests, self._kv = scheduler.requests, scheduler.kv

    def begin_update(self, output: ModelRunnerOutput) -> dict[str, EngineCoreOutput]:
        # Before those without readings end and give their blocks back.
        part = output.parts.of(BrokenPrompts)
        for request_id in part.req_ids if part is not None else ():
            if (request := self._requests.get(request_id)) is not None:
                self._kv.forget_broken(request)
        return {}
