"""Drafted tokens in the scheduler: they are computed after a request's known tokens, and count only when they turn out
to be right."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.guests import SchedulerGuest
from vllm.v1.core.kv_cache_groups import Blocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.messages import EngineCoreOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus


class StepDrafts(dict[str, list[int]]):
    """By request id, the last tokens that a step computes of it: drafts, which follow all tokens that are known."""


class NextDrafts(dict[str, list[int]]):
    """By request id, new drafts, for the next step."""


class Drafts(SchedulerGuest):
    """Schedules drafts and settles them. The KV slots of wrong ones stay the request's, whose next tokens take them."""

    def __init__(self, scheduler: Any) -> None:
        self._kv, self._requests = scheduler.kv, scheduler.requests
        cache = scheduler.cache_config
        self._has_states = cache.num_states is not None
        self._save_interval = cache.snapshot_interval if self._has_states and cache.finds_prefixes else None
        self._next: dict[str, list[int]] = {}
        self._num_drafts = self._num_tokens = 0
        self._accepted: list[int] = []  # by place in the draft

    def grow(
        self, step: SchedulerOutput, request: Request, num_new: int, room: int
    ) -> tuple[int, Blocks | None] | None:
        """As many drafts as are of use and fit into the blocks and into `room`."""
        if not self._next or (drafts := self._next.pop(request.request_id, None)) is None:
            return None
        if drafts := self._usable(drafts, request, num_new, room):
            added = self._kv.grow(request, num_new + len(drafts))
            if added is not None:
                step.parts.made(StepDrafts)[request.request_id] = drafts
                return num_new + len(drafts), added
        return None

    def _usable(self, drafts: list[int], request: Request, num_new: int, room: int) -> list[int]:
        """The drafts that are of use. A step that computes all known tokens draws one token more than it has drafts.
        What ends the request is left to be drawn: nothing follows it. A state is saved where a step's known tokens end
        at a border."""
        if request.num_pending_tokens or request.num_computed_tokens + num_new < len(request.token_ids):
            return []
        most = min(request.length_limit - request.num_output_tokens - 1, room - num_new)
        if self._save_interval is not None:
            most = min(most, -len(request.token_ids) % self._save_interval - 1)
        drafts = drafts[: max(most, 0)]
        for index, token_id in enumerate(drafts):
            if token_id in request.end_token_ids:
                return drafts[:index]
        return drafts

    def preempted(self, request: Request, step: SchedulerOutput) -> None:
        self._next.pop(request.request_id, None)
        if (scheduled := step.parts.of(StepDrafts)) is not None:
            scheduled.pop(request.request_id, None)

    def ended(self, request: Request) -> None:
        self._next.pop(request.request_id, None)

    def update(self, step: SchedulerOutput, output: ModelRunnerOutput, outputs: list[EngineCoreOutput]) -> None:
        scheduled = step.parts.of(StepDrafts)
        if scheduled:
            for each in outputs:
                if each.request_id in scheduled and each.new_token_ids:
                    self._settle(each, step, len(scheduled[each.request_id]))
        for request_id, drafts in (output.parts.of(NextDrafts) or {}).items():
            if request_id in self._requests:
                self._next[request_id] = drafts

    def _settle(self, output: EngineCoreOutput, step: SchedulerOutput, num_drafted: int) -> None:
        """A step has verified the request's drafts, and its tokens were appended: the last is to be computed next. A
        state that has taken wrong tokens is taken back to where the step began."""
        output.num_drafted = num_drafted
        self._num_drafts += 1
        self._num_tokens += num_drafted
        self._accepted += [0] * (num_drafted - len(self._accepted))
        for index in range(output.num_accepted):
            self._accepted[index] += 1
        request = self._requests.get(output.request_id)
        if request is not None and request.status is RequestStatus.RUNNING:
            if self._has_states and output.num_accepted < num_drafted:
                request.num_computed_tokens -= step.num_scheduled_tokens[request.request_id]
            else:
                request.num_computed_tokens = len(request.token_ids) - 1
            self._kv.register_known(request)

    def counts(self) -> dict[str, Any]:
        return {
            "num_drafts": self._num_drafts,
            "num_draft_tokens": self._num_tokens,
            "num_accepted_tokens": sum(self._accepted),
            "num_accepted_tokens_per_pos": list(self._accepted),
        }
