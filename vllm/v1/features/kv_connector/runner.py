"""A connector in the worker: it loads into the cache before a step's forward pass, and saves from it afterwards."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from vllm.distributed.parallel_state import tensor_parallel
from vllm.distributed.stages import get_stage
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.features.kv_connector.base import (
    KVCacheDescription,
    KVCacheGroup,
    KVConnectorBase_V1,
    KVConnectorOutput,
    KVConnectorRole,
)
from vllm.v1.features.kv_connector.factory import KVConnectorFactory
from vllm.v1.features.kv_connector.scheduler import LostStep, RankAnswers, StepMessage
from vllm.v1.features.kv_connector.views import ConnectorContext, LayerCache, StepAttention
from vllm.v1.worker.gpu.guests import CacheSizes, Completion, RunnerGuest, StepOutcome
from vllm.v1.worker.gpu.input_batch import InputBatch

Answer = TypeVar("Answer")

HIDDEN_STATES = "model.hidden_states"
"""The name of the target's final hidden states, [blocks, block_size, size], where drafts follow from them."""


class ConnectedLayers(RunnerGuest):
    """Calls the connector as upstream's worker does, except that all layers are loaded before the first one is
    computed, and saved after the last one is."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._stage = runner, get_stage()
        self._connector: KVConnectorBase_V1 | None = None
        self._layers: dict[str, Tensor] = {}
        self._attention: dict[str, StepAttention] = {}
        self._answer = KVConnectorOutput()  # since it was last taken
        self._answers = RankAnswers([])  # of the step
        self._is_lost = False
        self._recomputes = runner.vllm_config.kv_transfer_config.recomputes

    @property
    def layer_names(self) -> list[str]:
        """Names of all that lies in blocks here, once there are any: of the layers with a cache of their own, in the
        model's order, and of the final hidden states that drafts follow from."""
        return list(self._layers)

    def reset(self, sizes: CacheSizes) -> None:
        if not sizes.num_blocks or sizes.is_scratch:
            self._layers = {}
            return
        first: dict[int, int] = {}
        begin = 0 if self._stage.layers is None else self._stage.layers.start
        for layer, cache in enumerate(self._runner.kv_layout.cache_of_layer, begin):
            first.setdefault(cache, layer)
        own = {group[0].data_ptr(): _whole(group, self._runner.block_size) for group in self._runner.kv_caches}
        names = [f"model.layers.{layer}.self_attn.attn" for layer in first.values()]
        self._layers = dict(zip(names, own.values(), strict=True))
        # Guests that keep something in blocks come before this one, and have allocated it.
        for guest in self._runner.guests:
            for (rows,) in guest.in_blocks():
                self._layers[HIDDEN_STATES] = rows
        if self._connector is None:
            group = KVCacheGroup(self.layer_names, self._runner.block_size)
            described = KVCacheDescription(sizes.num_blocks, [group])
            config = self._runner.vllm_config
            # Its class may ask for the rank.
            with tensor_parallel(self._runner.group):
                self._connector = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, described)
        self._connector.register_kv_caches(dict(self._layers))

    def begin(self, step: SchedulerOutput) -> None:
        message = step.parts.of(StepMessage)
        if message is None or self._connector is None:
            return
        self._connector.handle_preemptions(message.metadata)
        if not step.total_num_scheduled_tokens:
            self._connector.bind_connector_metadata(message.metadata)
            self._load(None)
            self._end(message)

    def run_empty(self, message: StepMessage) -> KVConnectorOutput:
        """Do the work of a step without tokens. The connector's answer since the last call."""
        nothing = SchedulerOutput([], CachedRequestData(), {}, 0, [], [])
        nothing.parts.add(message)
        self.begin(nothing)
        return self.take_answer()

    def before_forward(self, step: SchedulerOutput, batch: InputBatch) -> None:
        message = step.parts.of(StepMessage)
        if message is None or self._connector is None:
            return
        attention = StepAttention(
            len(batch.positions_np),
            torch.from_numpy(batch.slot_mappings_np[0]),
            torch.from_numpy(batch.seq_lens_np),
            torch.from_numpy(batch.query_start_loc_np),
        )
        self._attention = dict.fromkeys(self._layers, attention)
        self._connector.bind_connector_metadata(message.metadata)
        self._load(self._attention)
        for name in self._layers:
            self._connector.wait_for_layer_load(name)
        self._is_lost = False
        self._check_loads(message, self._of_ranks(self._take_failed()))

    def _take_failed(self) -> set[int]:
        """Blocks that could not be loaded since the last call, here."""
        assert self._connector is not None
        failed = self._connector.get_block_ids_with_load_errors()
        self._answer.invalid_block_ids |= failed
        return failed

    def _of_ranks(self, own: Answer) -> list[Answer]:
        """Every rank gets what each has to say: a step goes on alike on all."""
        group = self._runner.group
        if group.world_size == 1:
            return [own]
        data = _pickled(own)
        sizes = group.all_gather(torch.tensor([len(data)])).flatten().tolist()
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(data)] = data
        rows = group.all_gather(padded)
        return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes, strict=True)]

    def _after_stages(self, own: list[KVConnectorOutput]) -> list[KVConnectorOutput]:
        """The answers of this stage's ranks and of those of the stages before it, which come behind the step's rows."""
        stage = self._stage
        if not stage.is_first:
            size = int(stage.receive(torch.empty(1, dtype=torch.int64)))
            own = own + pickle.loads(stage.receive(torch.empty(size, dtype=torch.uint8)).numpy().tobytes())
        if not stage.is_last:
            data = _pickled(own)
            stage.send(torch.tensor([len(data)]))
            stage.send(data)
        return own

    def _check_loads(self, message: StepMessage, failed: Sequence[set[int]]) -> None:
        """RuntimeError: blocks that the step reads could not be loaded on some rank, and are not to be computed."""
        # Requests that were scheduled meanwhile may share them, so none of the step's can go on.
        lost = set().union(*failed) - message.loading
        if lost and not self._recomputes:
            # They are free with the step's end, and may be loaded for another request before this is heard.
            self._answer.invalid_block_ids -= lost
            raise RuntimeError(
                f"kv_connector {type(self._connector).__name__} could not load the blocks {sorted(lost)}; the "
                "step's requests end (kv_load_failure_policy='fail')"
            )
        self._is_lost |= bool(lost)

    def _load(self, attention: dict[str, StepAttention] | None) -> None:
        assert self._connector is not None
        layers = {name: LayerCache(cache) for name, cache in self._layers.items()}
        self._connector.start_load_kv(ConnectorContext(attention, layers))

    def after_forward(self, step: SchedulerOutput, batch: InputBatch, hidden: Tensor) -> None:
        message = step.parts.of(StepMessage)
        if message is None or self._connector is None:
            return
        for name, cache in self._layers.items():
            self._connector.save_kv_layer(name, cache, self._attention[name])
        self._connector.wait_for_save()
        failed = self._end(message)
        answers, all_failed = zip(*self._of_ranks((self._answer, failed)), strict=True)
        # The answer of a step that fails comes with the next one's.
        self._check_loads(message, all_failed)
        self.take_answer()
        self._answers = RankAnswers(self._after_stages(list(answers)))

    def _end(self, message: StepMessage) -> set[int]:
        """Ask what has finished; returns the blocks that could not be loaded."""
        assert self._connector is not None
        sent, received = self._connector.get_finished(message.finished_req_ids)
        self._connector.clear_connector_metadata()
        answer = self._answer
        # A step without tokens has no results that could take its answer along.
        answer.finished_sending = (answer.finished_sending or set()) | (sent or set()) or None
        answer.finished_recving = (answer.finished_recving or set()) | (received or set()) or None
        return self._take_failed()

    def take_answer(self) -> KVConnectorOutput:
        """The connector's answer since the last call."""
        answer, self._answer = self._answer, KVConnectorOutput()
        return answer

    def after_sample(self, batch: InputBatch, hidden: Tensor) -> Completion | None:
        if self._connector is None:
            return None
        answers, is_lost = self._answers, self._is_lost
        self._answers = RankAnswers([])

        def complete(outcome: StepOutcome) -> None:
            outcome.output.parts.add(answers)
            if is_lost:
                outcome.output.parts.add(LostStep())
                outcome.unsound.update(batch.req_ids)
                outcome.errors.clear()

        return complete

    def shut_down(self) -> None:
        """The engine ends."""
        if self._connector is not None:
            self._connector.shutdown()


def _pickled(content: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)


def _whole(group: tuple[Tensor, ...], block_size: int) -> Tensor:
    """A layer's cache as one tensor: [2, blocks, heads, block_size, head_dim] of keys and values, which lie one behind
    the other; or the rows of a latent layer, [blocks, block_size, size]."""
    first = group[0]
    if len(group) == 1:
        return first
    distance = group[1].storage_offset() - first.storage_offset()
    both = first.as_strided((2, *first.shape), (distance, *first.stride()))
    return both.view(2, first.shape[0], first.shape[1], block_size, -1)
