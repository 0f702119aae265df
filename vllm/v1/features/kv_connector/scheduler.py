"""A connector in the scheduler: a request begins after what the connector can load, and each step has its message."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.logger import init_logger, warn_once
from vllm.v1.core.block_pool import extend_block_hashes
from vllm.v1.core.guests import SchedulerGuest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.features.kv_connector.base import (
    KVCacheDescription,
    KVCacheGroup,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
)
from vllm.v1.features.kv_connector.factory import KVConnectorFactory
from vllm.v1.features.kv_connector.views import ConnectorBlocks, request_view, step_view
from vllm.v1.messages import EngineCoreOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

logger = init_logger(__name__)

# How long an engine that has nothing else to do waits before it asks a connector again, in seconds.
_PATIENCE = 0.002


class StepMessage(NamedTuple):
    """A step's message, and the requests that have ended since the last."""

    metadata: KVConnectorMetadata
    finished_req_ids: set[str]


class Connections(SchedulerGuest):
    """Offers a request's content to the cache while it is admitted, as far as the connector says that it can be loaded.
    What is brought so is content as any other: the step loads it before its forward pass."""

    def __init__(
        self, config: VllmConfig, scheduler: Any, layer_names: list[str], end_worker: Callable[[], Any]
    ) -> None:
        """
        Args:
            layer_names: the layers that have a cache.
            end_worker: called when the engine ends.
        """
        cache = scheduler.cache_config
        check_cache(cache.group_windows, cache.num_states is not None)
        described = KVCacheDescription(cache.num_blocks, [KVCacheGroup(layer_names, cache.block_size)])
        self.connector = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, described)
        self._kv, self._requests, self._end_worker = scheduler.kv, scheduler.requests, end_worker
        self._block_size = scheduler.kv.block_size
        self._undecided: dict[str, Request] = {}
        # Content that is offered to the request being admitted, by its place after the cached blocks.
        self._offered: dict[bytes, int] = {}
        self._num_brought = 0
        self._num_queried = self._num_hit = self._num_loaded = 0
        self._is_off = False

    # -- requests -----------------------------------------------------------------------------------------------------

    def prepares(self, request: Request) -> bool:
        if self._matched(request)[0] is not None:
            return False
        self._undecided[request.request_id] = request
        return True

    def prepared(self, is_idle: bool) -> Sequence[tuple[Request, str | None]]:
        known = [request for request in self._undecided.values() if self._matched(request)[0] is not None]
        if self._undecided and not known and is_idle:
            time.sleep(_PATIENCE)
        for request in known:
            del self._undecided[request.request_id]
        return [(request, None) for request in known]

    def _matched(self, request: Request) -> tuple[int | None, bool, int]:
        """The number of tokens that the connector has after the cached blocks (None: it cannot tell yet), whether it
        would load them between steps, and the number of cached blocks."""
        self._offered = {}
        if self._is_off or request.sampling_params.skip_reading_prefix_cache:
            return 0, False, 0
        cached = self._kv.find_prefix(request).num_blocks
        view = request_view(request)
        count, is_async = self.connector.get_num_new_matched_tokens(view, cached * self._block_size)
        return count, is_async, cached

    def ready(self, request: Request) -> str | None:
        count, is_async, cached = self._matched(request)
        self._num_brought = 0
        if not count:
            return None
        if is_async:
            return (
                f"kv_connector {type(self.connector).__name__} loads between steps (load_async), which is not done: "
                "get_num_new_matched_tokens must return False as its second value"
            )
        # The last token is always computed, as its logits are needed, and blocks are loaded whole.
        most = (request.num_tokens - 1) // self._block_size
        hashes = extend_block_hashes(request, self._block_size)[cached : min(cached + count // self._block_size, most)]
        self._offered = {key: place for place, key in enumerate(hashes, 1)}
        return None

    def holds(self, key: bytes) -> bool:
        return key in self._offered

    def bring(self, key: bytes, block_id: int, step: SchedulerOutput) -> bool:
        place = self._offered.get(key)
        if place is None:
            return False
        self._num_brought = max(self._num_brought, place)
        return True

    def admitted(self, request: Request) -> None:
        num_tokens = self._num_brought * self._block_size
        self._offered, self._num_brought = {}, 0
        if self._is_off:
            return
        if not request.num_preemptions:
            self._num_queried += request.num_tokens
            self._num_hit += num_tokens
        self._num_loaded += num_tokens // self._block_size
        blocks = ConnectorBlocks(self._kv.blocks_of(request.request_id))
        self.connector.update_state_after_alloc(request_view(request), blocks, num_tokens)

    def ended(self, request: Request) -> None:
        self._undecided.pop(request.request_id, None)
        if self._is_off:
            return
        owned = self._kv.owned.get(request.request_id)
        block_ids = [] if owned is None else self._kv.blocks_of(request.request_id)[0]
        is_delayed, params = self.connector.request_finished(request_view(request), block_ids)
        if is_delayed:
            raise NotImplementedError(
                f"kv_connector {type(self.connector).__name__} keeps a request's blocks after its end, which is not "
                "done: request_finished must return False, and wait_for_save return once blocks are saved"
            )
        if params:
            warn_once(logger, "kv_connector: parameters that request_finished returns are not passed on to callers")

    # -- steps --------------------------------------------------------------------------------------------------------

    def fill(self, step: SchedulerOutput) -> None:
        self._offered = {}
        if not self._is_off:
            view = step_view(step, self._requests)
            step.parts.add(StepMessage(self.connector.build_connector_meta(view), view.finished_req_ids))

    def update(self, step: SchedulerOutput, output: ModelRunnerOutput, outputs: list[EngineCoreOutput]) -> None:
        answer = output.parts.of(KVConnectorOutput)
        if answer is not None and not self._is_off:
            self.connector.update_connector_output(answer)

    def weights_changed(self) -> None:
        # The connector does not know which weights computed its blocks.
        if not self._is_off:
            warn_once(logger, "kv_connector: weights have changed, so blocks are neither loaded nor saved any more")
            self.connector.reset_cache()
        self._is_off = True

    def closed(self) -> None:
        self.connector.shutdown()
        self._end_worker()

    def counts(self) -> dict[str, Any]:
        return {
            "num_loaded_blocks": self._num_loaded,
            "num_external_queried_tokens": self._num_queried,
            "num_external_hit_tokens": self._num_hit,
        }


def check_cache(windows: Sequence[Any], has_states: bool) -> None:
    """ValueError: the model keeps what a connector does not see."""
    if has_states:
        raise ValueError("kv_transfer_config: the model has recurrent states, which connectors do not carry")
    if any(window is not None for window in windows or ()):
        raise ValueError("kv_transfer_config: layers see a window only, whose blocks connectors do not know")
