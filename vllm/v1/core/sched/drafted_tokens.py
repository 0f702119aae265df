"""Drafted tokens in the scheduler: they are computed after a request's known tokens, and count only when they turn out
to be right."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.messages import EngineCoreOutput
from vllm.v1.request import Request, RequestStatus


class DraftedTokens:
    """Schedules drafts and settles them. The KV slots of wrong ones stay the request's, whose next tokens take them."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._num_drafts = self._num_tokens = 0
        self._accepted: list[int] = []  # by place in the draft

    def grow(self, step: SchedulerOutput, request: Request, num_new: int, room: int) -> tuple[int, list[int] | None]:
        """KVCacheManager.grow for the request's next `num_new` known tokens and as many of its drafts as are of use and
        fit into the blocks and into `room`, the step's tokens for both. Returns how many tokens that is, and the blocks
        added or None."""
        drafts, request.draft_token_ids = self._usable(request, num_new, room), []
        if drafts:
            added = self._kv.grow(request, num_new + len(drafts))
            if added is not None:
                step.scheduled_spec_decode_tokens[request.request_id] = drafts
                return num_new + len(drafts), added
        return num_new, self._kv.grow(request, num_new)

    def _usable(self, request: Request, num_new: int, room: int) -> list[int]:
        """A step that computes all known tokens draws one token more than it has drafts. What ends the request is left
        to be drawn: nothing follows it. A state is saved where a step's known tokens end at a border."""
        if request.num_pending_tokens or request.num_computed_tokens + num_new < len(request.token_ids):
            return []
        most = min(request.length_limit - request.num_output_tokens - 1, room - num_new)
        if self._kv.snapshot_interval is not None:
            most = min(most, -len(request.token_ids) % self._kv.snapshot_interval - 1)
        drafts = request.draft_token_ids[: max(most, 0)]
        for index, token_id in enumerate(drafts):
            if token_id in request.end_token_ids:
                return drafts[:index]
        return drafts

    def settle(self, request: Request, step: SchedulerOutput, output: EngineCoreOutput) -> None:
        """A step has verified the request's drafts, and its tokens were appended: the last is
        to be computed next. A state that has taken wrong tokens is taken back to where the step began."""
        output.num_drafted = len(step.scheduled_spec_decode_tokens[request.request_id])
        self._num_drafts += 1
        self._num_tokens += output.num_drafted
        self._accepted += [0] * (output.num_drafted - len(self._accepted))
        for index in range(output.num_accepted):
            self._accepted[index] += 1
        if request.status is RequestStatus.RUNNING:
            if self._kv.has_states and output.num_accepted < output.num_drafted:
                request.num_computed_tokens -= step.num_scheduled_tokens[request.request_id]
            else:
                request.num_computed_tokens = len(request.token_ids) - 1
            self._kv.register_known(request)

    @staticmethod
    def take(requests: dict[str, Request], drafts: dict[str, list[int]]) -> None:
        """Keep a step's drafts for the next one."""
        for request_id, draft in drafts.items():
            if request_id in requests:
                requests[request_id].draft_token_ids = draft

    def counts(self) -> dict[str, Any]:
        """Fields of SchedulerStats."""
        return {
            "num_drafts": self._num_drafts,
            "num_draft_tokens": self._num_tokens,
            "num_accepted_tokens": sum(self._accepted),
            "num_accepted_tokens_per_pos": list(self._accepted),
        }
