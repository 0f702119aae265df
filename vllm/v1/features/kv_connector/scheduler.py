"""A connector in the scheduler: a request begins after what the connector can load, and each step has its message."""

from __future__ import annotations

import operator
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, NamedTuple

from vllm.config import VllmConfig
from vllm.logger import init_logger, warn_once
from vllm.v1.core.block_pool import extend_block_hashes
from vllm.v1.core.content_names import ContentNames
from vllm.v1.core.guests import SchedulerGuest
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.features.kv_connector.base import (
    KVCacheDescription,
    KVCacheGroup,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.features.kv_connector.factory import KVConnectorFactory
from vllm.v1.features.kv_connector.views import ConnectorBlocks, ConnectorRequest, ended_names, request_view, step_view
from vllm.v1.messages import EngineCoreOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

logger = init_logger(__name__)

# How long an engine that has nothing else to do waits before it asks a connector again, in seconds: first so long, and
# each time in which it hears nothing twice as long, up to the longest.
_PATIENCE, _LONGEST_PATIENCE = 0.001, 0.02
# How long what it has begun may take before the cache is emptied or freed.
_END_SECONDS = 60.0


class StepMessage(NamedTuple):
    """A step's message, the requests that have ended since the last, and the blocks that are loaded beside steps."""

    metadata: KVConnectorMetadata
    finished_req_ids: set[str]
    loading: frozenset[int]


class LostStep(NamedTuple):
    """Blocks could not be loaded that a step has read: its results do not count."""


@dataclass
class Load:
    """Blocks that are being loaded for a request, which is in no queue meanwhile."""

    request: Request
    blocks: list[int]  # of its beginning
    hashes: list[bytes]  # of their content
    num_cached: int  # leading ones that had it before
    failed: set[int] = field(default_factory=set)  # blocks that could not be loaded, as far as is known


class RankAnswers(NamedTuple):
    """The answers of the connectors of all ranks, in their order."""

    of_ranks: list[KVConnectorOutput]


class Side(NamedTuple):
    """Calls of the worker's side: what it has said since the last call, the same after it has done what a step without
    tokens does, and its end."""

    take_answer: Callable[[], RankAnswers]
    run_empty: Callable[[StepMessage], RankAnswers]
    shut_down: Callable[[], Any]


class Connections(SchedulerGuest):
    """Offers a request's content to the cache while it is admitted, as far as the connector says that it can be loaded.
    What is brought so is content as any other: the step loads it before its forward pass. What is loaded beside steps
    goes into blocks that are kept for it, and is content as any other before the request is queued."""

    def __init__(self, config: VllmConfig, scheduler: Any, layer_names: list[str], worker: Side) -> None:
        """`layer_names`: of the layers that have a cache."""
        cache = scheduler.cache_config
        if cache.num_states is not None:
            raise ValueError(
                "kv_transfer_config: the model has recurrent states, which lie in no blocks that a connector could "
                "carry; kv_store keeps them"
            )
        described = KVCacheDescription(cache.num_blocks, [KVCacheGroup(layer_names, cache.block_size)])
        self.connector = KVConnectorFactory.create_connector(config, KVConnectorRole.SCHEDULER, described)
        self._scheduler, self._worker = scheduler, worker
        self._kv, self._requests = scheduler.kv, scheduler.requests
        self._block_size = scheduler.kv.block_size
        assert config.kv_transfer_config is not None
        self._recomputes = config.kv_transfer_config.recomputes
        self._undecided: dict[str, Request] = {}
        # Requests whose blocks are to be loaded beside steps, those being loaded, and those that are done, with why
        # they cannot go on.
        self._to_load: dict[str, Request] = {}
        self._loads: dict[str, Load] = {}
        self._loaded: list[tuple[Request, str | None]] = []
        self._kept: dict[str, list[int]] = {}  # blocks that are loaded, until their request is admitted
        # Requests for which no more is loaded: all that there was, or what failed.
        self._done: set[str] = set()
        self._sending: dict[str, list[int]] = {}  # blocks of requests that have ended
        self._params: dict[str, dict[str, Any]] = {}  # what the connector says at a request's end
        # Requests of whose end the worker's side does not know yet, and those of which a step has told it since.
        self._untold, self._told = set[str](), set[str]()
        self._met = set[str]()  # those of which the connector was asked
        self._step: SchedulerOutput | None = None  # the latest
        self._is_empty = False  # the latest step has no tokens, and no other one has had results since
        # Content that is offered to the request being admitted, by its place after the cached blocks.
        self._offered: dict[bytes, int] = {}
        self._num_brought = 0
        self._num_queried = self._num_hit = self._num_loaded = 0
        # A request adds to these when it is admitted: so much, while its step has no results.
        self._counted: dict[str, tuple[int, int, int]] = {}
        self._patience = _PATIENCE
        self._content = ContentNames(self._block_size)
        # How many ranks have sent, and received, what a request has.
        self._num_sent, self._num_received = Counter[str](), Counter[str]()
        self._is_off = False

    # -- requests -----------------------------------------------------------------------------------------------------

    def queued(self, request: Request) -> None:
        # Its first step does not wait.
        self._patience = 0.0

    def prepares(self, request: Request) -> bool:
        count, is_async, _ = self._matched(request)
        if count is None:
            self._undecided[request.request_id] = request
        elif count and is_async:
            self._to_load[request.request_id] = request
        else:
            return False
        return True

    def prepared(self, is_idle: bool) -> Sequence[tuple[Request, str | None]]:
        self._untold -= self._told
        self._told.clear()
        if self.transfers() and self._is_empty:
            # Such a step's answer does not come with results.
            self._hear(self._worker.take_answer())
        for name, request in list(self._undecided.items()):
            count, is_async, _ = self._matched(request)
            if count is None:
                continue
            del self._undecided[name]
            if count and is_async:
                self._to_load[name] = request
            else:
                self._loaded.append((request, None))
        found, self._loaded = self._loaded, []
        if found or not (is_idle or self._is_empty):
            self._patience = _PATIENCE
        elif self._undecided or self.transfers():
            self._scheduler.rest(self._patience)
            self._patience = min(max(2 * self._patience, _PATIENCE), _LONGEST_PATIENCE)
        return found

    def _matched(self, request: Request) -> tuple[int | None, bool, int]:
        """The number of tokens that the connector has after the cached blocks (None: it cannot tell yet), whether it
        would load them between steps, and the number of cached blocks."""
        self._offered = {}
        if self._is_name_taken(request):
            return None, False, 0
        self._met.add(request.request_id)
        is_done = self._is_off or request.request_id in self._done or not self._content.has_name(request)
        # Final hidden states, which prompt logprobs need, are not carried.
        reads_prompt = request.next_prompt_row is not None
        if is_done or reads_prompt or request.sampling_params.skip_reading_prefix_cache:
            return 0, False, 0
        cached = self._kv.find_prefix(request).num_blocks
        view = self._view(request)
        count, is_async = self.connector.get_num_new_matched_tokens(view, cached * self._block_size)
        return count, is_async, cached

    def _is_name_taken(self, request: Request) -> bool:
        """Whether the connector still has to do with an earlier request of this one's name."""
        name = request.request_id
        load = self._loads.get(name)
        if self._is_off:
            # Steps tell it nothing any more.
            return False
        return name in self._sending or name in self._untold or (load is not None and load.request is not request)

    def ready(self, request: Request) -> str | None:
        count, is_async, cached = self._matched(request)
        self._num_brought = 0
        # After a preemption what is loaded beside steps is computed.
        if count and not is_async:
            hashes = self._loadable(request, cached, count)[cached:]
            self._offered = {key: place for place, key in enumerate(hashes, 1)}
        return None

    def _view(self, request: Request) -> ConnectorRequest:
        return request_view(request, self._content)

    def _loadable(self, request: Request, cached: int, count: int) -> list[bytes]:
        """The content of the leading blocks that `count` tokens after the cached ones end. The last token is always
        computed, as its logits are needed, and blocks are loaded whole."""
        most = (request.num_tokens - 1) // self._block_size
        return extend_block_hashes(request, self._block_size)[: min(cached + count // self._block_size, most)]

    def holds(self, key: bytes) -> bool:
        return key in self._offered

    def bring(self, key: bytes, block_id: int, step: SchedulerOutput) -> bool:
        place = self._offered.get(key)
        if place is None:
            return False
        self._num_brought = max(self._num_brought, place)
        return True

    def preempted(self, request: Request, step: SchedulerOutput) -> None:
        self._content.begins_anew(request)

    def admitted(self, request: Request) -> None:
        num_tokens = self._num_brought * self._block_size
        self._offered, self._num_brought = {}, 0
        self._release(self._kept, request.request_id)
        if self._is_off:
            return
        before = self._num_queried, self._num_loaded, self._num_hit
        if not request.num_preemptions:
            self._num_queried += request.num_tokens
        self._count(num_tokens // self._block_size, request)
        after = self._num_queried, self._num_loaded, self._num_hit
        self._counted[request.request_id] = tuple(map(operator.sub, after, before))
        blocks = ConnectorBlocks(self._kv.blocks_of(request.request_id))
        self.connector.update_state_after_alloc(self._view(request), blocks, num_tokens)

    def _count(self, num_blocks: int, request: Request) -> None:
        self._num_loaded += num_blocks
        if not request.num_preemptions:
            self._num_hit += num_blocks * self._block_size

    def ended(self, request: Request) -> None:
        name = request.request_id
        self._done.discard(name)
        self._counted.pop(name, None)
        self._release(self._kept, name)
        for waiting in (self._undecided, self._to_load):
            waiting.pop(name, None)
        self._loaded = [each for each in self._loaded if each[0] is not request]
        # A step that told of an earlier one's end may have been discarded since this one began.
        is_met = name in self._met
        self._met.discard(name)
        if self._is_off or (self._is_name_taken(request) and not is_met):
            self._content.forget(request)
            return
        if (load := self._loads.get(name)) is not None:
            block_ids = load.blocks
        else:
            block_ids = self._kv.blocks_of(name)[0] if name in self._kv.owned else []
        self._untold.add(name)
        view = self._view(request)
        if isinstance(self.connector, SupportsHMA):
            is_delayed, params = self.connector.request_finished_all_groups(view, (block_ids,))
        else:
            is_delayed, params = self.connector.request_finished(view, block_ids)
        if is_delayed and block_ids:
            self._kv.pool.share(block_ids)
            self._sending[name] = list(block_ids)
        self._content.forget(request)
        if params:
            self._params[name] = dict(params)

    # -- blocks that are kept beside requests -----------------------------------------------------------------------

    def transfers(self) -> bool:
        are_kept = self._to_load or self._loads or self._kept or self._sending
        return bool(are_kept or self._untold & self._undecided.keys())

    def _release(self, kept: dict[str, list[int]], name: str) -> None:
        """Give back a request's blocks, the end first, as it is useful to the fewest."""
        self._kv.pool.release(reversed(kept.pop(name, [])))

    def _begin_load(self, request: Request, step: SchedulerOutput) -> None:
        """Have the connector load blocks for a request, or let it be queued as it is; later, where too few blocks are
        free."""
        pool, scheduler = self._kv.pool, self._scheduler
        if len(scheduler.running) + len(self._loads) + len(self._kept) >= scheduler.config.max_num_seqs:
            return
        count, is_async, cached = self._matched(request)
        # Blocks that another guest holds are loaded, too.
        found = takewhile(lambda block: block is not None, map(pool.find, request.block_hashes[:cached]))
        cached_blocks = [block for block in found if block is not None]
        if count is not None and len(cached_blocks) < cached:
            count += (cached - len(cached_blocks)) * self._block_size
        hashes = self._loadable(request, len(cached_blocks), count or 0)
        num_new = len(hashes) - len(cached_blocks)
        if count is None or not is_async or num_new <= 0:
            del self._to_load[request.request_id]
            if count is None:
                self._undecided[request.request_id] = request
            else:
                self._loaded.append((request, None))
            return
        if num_new > pool.num_free - sum(map(pool.is_evictable, cached_blocks)):
            return
        del self._to_load[request.request_id]
        pool.share(cached_blocks)
        blocks = [*cached_blocks, *pool.allocate(num_new)]
        step.brought_blocks += blocks[len(cached_blocks) :]
        self._loads[request.request_id] = Load(request, blocks, hashes, len(cached_blocks))
        view = ConnectorBlocks((blocks,))
        self.connector.update_state_after_alloc(self._view(request), view, num_new * self._block_size)

    def _end_load(self, load: Load) -> None:
        name = load.request.request_id
        end = load.num_cached
        while end < len(load.blocks) and load.blocks[end] not in load.failed:
            self._kv.pool.register(load.blocks[end], load.hashes[end])
            end += 1
        self._kept[name] = load.blocks
        self._count(end - load.num_cached, load.request)
        if self._requests.get(name) is not load.request:
            self._release(self._kept, name)
            return
        error = None
        if end < len(load.blocks) and not self._recomputes:
            error = self._failure(load.failed)
        self._done.add(name)
        self._loaded.append((load.request, error))

    def _failure(self, failed: set[int]) -> str:
        return (
            f"kv_connector {type(self.connector).__name__} could not load the blocks {sorted(failed)} "
            "(kv_load_failure_policy='fail')"
        )

    def _hear(self, answers: RankAnswers) -> None:
        """Take what the worker's side has said."""
        answer = self._of_all(answers.of_ranks)
        if answer != KVConnectorOutput():
            self._patience = min(self._patience, _PATIENCE)
        for each in self._loads.values():
            # A connector may tell of these in any step up to the one in which it names the request.
            each.failed |= answer.invalid_block_ids.intersection(each.blocks)
        for name in answer.finished_recving or ():
            if (load := self._loads.pop(name, None)) is not None:
                self._end_load(load)
        for name in answer.finished_sending or ():
            self._release(self._sending, name)
        if not self._is_off:
            self.connector.update_connector_output(answer)

    def _of_all(self, answers: list[KVConnectorOutput]) -> KVConnectorOutput:
        """One answer of all ranks: a request is sent or received once each of them has said so."""
        whole = KVConnectorOutput()
        if not answers:
            return whole
        for count, name in ((self._num_sent, "finished_sending"), (self._num_received, "finished_recving")):
            for each in answers:
                count.update(getattr(each, name) or ())
            done = {request_id for request_id, number in count.items() if number >= len(answers)}
            for request_id in done:
                del count[request_id]
            setattr(whole, name, done or None)
        whole.invalid_block_ids = set().union(*(each.invalid_block_ids for each in answers))
        return whole

    def let_go(self) -> None:
        """RuntimeError: the connector does not end what it has begun, and may still read or write the blocks."""
        self._loaded += [(request, None) for request in self._to_load.values()]
        self._to_load.clear()
        self._release_kept()
        deadline = time.monotonic() + _END_SECONDS
        while self._loads or self._sending:
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"kv_connector {type(self.connector).__name__} still loads or sends the blocks of "
                    f"{', '.join(sorted({*self._loads, *self._sending}))} after {_END_SECONDS:.0f} s"
                )
            nothing = SchedulerOutput([], CachedRequestData(), {}, 0, [], [])
            self._hear(self._worker.run_empty(self._message(nothing)))
            self._release_kept()
            time.sleep(_PATIENCE)

    def _release_kept(self) -> None:
        for name in list(self._kept):
            self._release(self._kept, name)

    # -- steps --------------------------------------------------------------------------------------------------------

    def fill(self, step: SchedulerOutput) -> None:
        self._offered, self._step, self._is_empty = {}, step, not step.total_num_scheduled_tokens
        if self._is_off:
            return
        if step.preempted_req_ids or (self._scheduler.waiting and not step.total_num_scheduled_tokens):
            # Others need blocks: what is loaded may be used as any other content, or be computed.
            self._release_kept()
        for request in list(self._to_load.values()):
            self._begin_load(request, step)
        step.parts.add(self._message(step))

    def _message(self, step: SchedulerOutput) -> StepMessage:
        view = step_view(step, self._requests, self._content)
        loading = frozenset(block for load in self._loads.values() for block in load.blocks[load.num_cached :])
        self._told |= self._untold
        return StepMessage(self.connector.build_connector_meta(view), view.finished_req_ids, loading)

    def begin_update(self, output: ModelRunnerOutput) -> dict[str, EngineCoreOutput]:
        if output.parts.of(LostStep) is not None:
            assert self._step is not None
            warn_once(logger, "kv_connector: blocks could not be loaded, and are computed")
            # Otherwise it would be asked for the same again.
            self._done.update(new.req_id for new in self._step.scheduled_new_reqs)
            self._scheduler.repeat_step(self._step)
        return {}

    def discarded(self, step: SchedulerOutput) -> None:
        # The next step tells of them.
        self._untold |= ended_names(step, self._requests)
        self._told.clear()
        for new in step.scheduled_new_reqs:
            queried, loaded, hit = self._counted.pop(new.req_id, (0, 0, 0))
            self._num_queried -= queried
            self._num_loaded -= loaded
            self._num_hit -= hit

    def heard(self, output: ModelRunnerOutput) -> None:
        answers = output.parts.of(RankAnswers)
        if answers is not None:
            self._hear(answers)

    def update(self, step: SchedulerOutput, output: ModelRunnerOutput, outputs: list[EngineCoreOutput]) -> None:
        if step.total_num_scheduled_tokens:
            # Over stages an empty step may be in flight, while the next one has something to compute.
            self._is_empty = False
        for new in step.scheduled_new_reqs:
            self._counted.pop(new.req_id, None)
        self.heard(output)
        for each in outputs if self._params else ():
            if each.finish_reason is not None:
                each.kv_transfer_params = self._params.pop(each.request_id, None)
        # No one asks for those of aborted requests.
        self._params.clear()

    def weights_changed(self) -> None:
        # The connector does not know which weights computed its blocks.
        if not self._is_off:
            warn_once(logger, "kv_connector: weights have changed, so blocks are neither loaded nor saved any more")
            self.connector.reset_cache()
        self._is_off = True

    def closed(self) -> None:
        self.connector.shutdown()
        try:
            self._worker.shut_down()
        except RuntimeError as error:
            # Such as where a rank has failed.
            logger.warning("kv_connector: the workers' connectors were not shut down: %s", error)

    def counts(self) -> dict[str, Any]:
        return {
            "num_loaded_blocks": self._num_loaded,
            "num_external_queried_tokens": self._num_queried,
            "num_external_hit_tokens": self._num_hit,
        }
