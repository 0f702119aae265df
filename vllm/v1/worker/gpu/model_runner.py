"""The V2 model runner: one forward pass and one sampling pass a step, over slots."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from vllm.attention.select import select_backend
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.attention import attention_layers, use_backend, use_kv_scales
from vllm.layers.experts import asks_for_counts
from vllm.layers.kv_cache_spec import kv_cache_layout, kv_cache_specs, layer_kinds
from vllm.layers.state import allocate_states, state_layers
from vllm.lora.manager import AdapterManager
from vllm.ops.recording import can_record
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import PendingStep
from vllm.v1.worker.gpu.buffer_utils import upload
from vllm.v1.worker.gpu.cuda import GraphRecorder, graph_recorder, host_copies
from vllm.v1.worker.gpu.decode_graphs import DecodeGraphs, GreedyGraphs, ladder
from vllm.v1.worker.gpu.input_batch import InputBatch, PromptBatch, build_input_batch
from vllm.v1.worker.gpu.kv_swap import KVSwap
from vllm.v1.worker.gpu.piecewise_graphs import PiecewiseGraphs
from vllm.v1.worker.gpu.recorded_decode import RecordedDecode
from vllm.v1.worker.gpu.recorded_greedy import RecordedGreedy
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.prompt_logprob import (
    PromptLogprobsState,
    PromptReadings,
    PromptRows,
    num_tile_rows,
)
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.vocab_parallel import vocab_of
from vllm.v1.worker.gpu.spec_decode.make_drafter import make_speculator
from vllm.v1.worker.gpu.spec_decode.verify import VerifiedSamples, expand, verified, verify
from vllm.v1.worker.gpu.state_pools import StatePools
from vllm.v1.worker.gpu.states import BlockTables, KVCaches, RequestStates
from vllm.v1.worker.gpu.step_result import Sampled, StepResult
from vllm.v1.worker.state_memory import NO_STATES, StateSlots

if TYPE_CHECKING:
    from vllm.config.lora import LoRAConfig
    from vllm.v1.worker.gpu.spec_decode.drafter import CachedDrafter
    from vllm.v1.worker.gpu.spec_decode.mtp import MtpDrafter

# On a CPU a token of a larger batch takes the same time in one step or in several.
_MOST_ROWS_WITH_RUNS = 4


class GPUModelRunner:
    """Runs the model for a batch that is an index mapping into slots; the same code on CUDA and CPU. Slot state
    (RequestStates, BlockTables, the sampler's states) outlives a step; an InputBatch lives for one. Every rank of a
    tensor-parallel group runs the same steps and computes the same tokens."""

    records_steps: ClassVar[bool] = True
    """Whether steps of decoding may be recorded."""

    def __init__(self, config: VllmConfig, model: Any, device: torch.device) -> None:
        self.model, self.vllm_config = model, config
        self.device = device
        self.group = get_tp_group()
        self.model_config = model_config = config.model_config
        self.block_size = config.cache_config.block_size
        max_num_reqs = config.scheduler_config.max_num_seqs
        max_model_len = model_config.max_model_len
        self.states = RequestStates(max_num_reqs, max_model_len, device, config.scheduler_config.async_scheduling)
        self.block_tables = BlockTables(max_num_reqs, max_model_len, self.block_size, device)
        vocab = vocab_of(model_config.vocab_size, self.group)
        self.sampler = Sampler(config, device, vocab)
        self.prompt_logprobs = PromptLogprobsState(max_num_reqs, model_config.vocab_size, vocab)
        self.run_logprobs = PromptLogprobsState(max_num_reqs, model_config.vocab_size, vocab)
        # By slot, the requests that read what is appended undrawn.
        self._run_readers: dict[int, tuple[str, SamplingParams]] = {}
        self._kv_dtype = getattr(torch, config.kv_cache_dtype)
        sizes = getattr(torch, model_config.dtype), model_config.hf_config.head_dim, self.block_size
        layers = layer_kinds(model, model_config.hf_config, self.group)
        backend_name = _backend_name(model_config.attention_backend, model)
        self._backend = select_backend(backend_name, device, *sizes, self._kv_dtype, layers)
        use_backend(model, self._backend)
        if config.cache_config.float8_dtype:
            use_kv_scales(model)
        self._host_copies = host_copies(device, self.group)
        self._reading_clocks = (self.sampler.reading_clock, self.prompt_logprobs.reading_clock)
        self.kv_layout = kv_cache_layout(kv_cache_specs(model, model_config.hf_config, self.group), max_model_len)
        for layer, kv_group in zip(attention_layers(model), self.kv_layout.group_of_layer, strict=False):
            layer.kv_group = kv_group
        # Of the KV groups from the second on.
        self.other_block_tables = [
            BlockTables(max_num_reqs, max_model_len, self.block_size, device) for _ in self.kv_layout.windows[1:]
        ]
        self.speculator = make_speculator(config, model, self.states, self.block_tables, self.kv_layout.windows[0])
        self.kv_caches: KVCaches = []
        self._num_blocks = 0
        self.has_states = bool(state_layers(model))
        self._state_pools: StatePools | None = None
        records = self.records_steps and not model_config.enforce_eager
        captures = records and self._backend.can_be_captured and _can_capture_layers(model, device)
        captures = captures and not asks_for_counts(model)
        self._graph_recorder = graph_recorder(device, self.group) if captures else None
        # On the CPU collectives cannot be recorded.
        self._records_kernels = records and self.group.world_size == 1 and device.type == "cpu"
        self._recorded_decode: RecordedDecode | DecodeGraphs | None = None
        self._pieces: PiecewiseGraphs | None = None
        self._max_tokens = config.scheduler_config.max_num_batched_tokens
        self._greedy_graphs: GreedyGraphs | None = None
        self._recorded_greedy: RecordedGreedy | None = None
        self._packing_version = 0
        self._max_decode_rows = min(max_num_reqs, config.scheduler_config.max_num_batched_tokens)
        self.kv_swap: KVSwap | None = None
        # [blocks * block size, H], final hidden states of cached prompts; allocated at the first prompt readings.
        self._hidden_cache: Tensor | None = None
        self.adapters = None if config.lora_config is None else self._make_adapters(config.lora_config)
        cache = config.cache_config
        self._keeps_hidden = cache.enable_prefix_caching and cache.caches_hidden_states

    def _make_adapters(self, config: LoRAConfig) -> AdapterManager:
        adapters = AdapterManager(self.model, config, self.states.max_num_reqs, self._max_decode_rows)
        if self.follower is not None:
            self.follower.use_adapters = adapters.use
        return adapters

    def initialize_kv_cache(
        self, num_blocks: int, num_host_blocks: int = 0, state_slots: StateSlots = NO_STATES
    ) -> None:
        """Allocate the paged KV cache of every layer, the states of requests and the host blocks, untouched unless
        pinned. On CUDA, capture decode steps."""
        self._num_blocks = num_blocks
        if self.has_states:
            self._state_pools = StatePools(self.model, state_slots, self.device)
        self.kv_caches = self._make_kv_caches(num_blocks + self.num_extra_blocks)
        if self.draft_model is not None:
            self.draft_model.allocate(num_blocks)
        kept = [] if self.follower is None else self.follower.kept_in_blocks()
        self.kv_swap = KVSwap([*self.kv_caches, *kept], num_host_blocks)
        self._record_decode()

    def release_kv_cache(self) -> None:
        """Free the KV cache and what depends on it, until initialize_kv_cache. No request may have a slot."""
        self.kv_caches, self.kv_swap, self._hidden_cache, self._state_pools = [], None, None, None
        if self.draft_model is not None:
            self.draft_model.allocate(0)
        allocate_states(self.model, 0, self.device)
        self._recorded_decode = self._greedy_graphs = self._recorded_greedy = self._pieces = None

    def _record_decode(self) -> None:
        if self._graph_recorder is not None:
            self._record_graphs(self._num_blocks, self._graph_recorder)
        elif self._records_kernels and can_record(self.block_tables.tensor):
            self._recorded_decode = RecordedDecode(
                self.model,
                self.kv_caches,
                self.states,
                self.block_tables,
                self._max_decode_rows,
                len(self.kv_layout.windows),
            )
            # With async_scheduling, results outlive the next step's beginning.
            if self.states.last_sampled is None:
                self._recorded_greedy = RecordedGreedy(self.model, self.sampler, self.states)

    @property
    def draft_model(self) -> CachedDrafter | None:
        """What drafts, if that is a model."""
        return None if self.speculator is None else self.speculator.draft_model

    @property
    def follower(self) -> MtpDrafter | None:
        """What drafts, if it takes the target's hidden states."""
        return None if self.speculator is None else self.speculator.follower

    @property
    def num_extra_blocks(self) -> int:
        """KV blocks beyond the pool's: one for the padding rows of captured steps."""
        return 0 if self._graph_recorder is None else 1

    @torch.inference_mode()
    def _record_graphs(self, scratch_block: int, recorder: GraphRecorder) -> None:
        max_model_len = self.model_config.max_model_len
        limit = min(self.model_config.max_seq_len_to_capture or max_model_len, max_model_len)
        sizes = ladder(self._max_decode_rows)
        tables = self.block_tables, *self.other_block_tables
        scratch_state = 0 if self._state_pools is None else self._state_pools.padding_row
        scratch = scratch_block, limit, scratch_state
        graphs = DecodeGraphs(self.model, self.kv_caches, self.states, tables, sizes, *scratch)
        graphs.record(recorder)
        self._recorded_decode = graphs
        self._greedy_graphs = GreedyGraphs(self.model, self.sampler, self.states, recorder)
        self._greedy_graphs.record(graphs.steps)
        if self._state_pools is None:
            # A step's rows, which states go by, are not those of a graph of some number of tokens.
            self._pieces = PiecewiseGraphs(self.model, self._backend, self.kv_caches, self.device, self._max_tokens)
            self._pieces.record(recorder, len(tables))

    def _make_kv_caches(self, num_blocks: int) -> KVCaches:
        """A pair for each layer, or one tensor; layers that lie in the same cache have the same ones."""
        caches: KVCaches = []
        for spec in self.kv_layout.caches:
            shapes = spec.cache_shapes(self._backend, num_blocks, self.block_size)
            caches.append(tuple(torch.empty(shape, dtype=self._kv_dtype, device=self.device) for shape in shapes))
        return [caches[index] for index in self.kv_layout.cache_of_layer]

    @contextlib.contextmanager
    def scratch_cache(self) -> Iterator[None]:
        """For steps whose results are discarded, before `initialize_kv_cache`: a cache of one block, number 0, and one
        request's state for all; nothing is recorded or replayed."""
        kept = self.kv_caches, self.kv_swap, self._recorded_decode, self._pieces, self._hidden_cache
        self.kv_caches, self.kv_swap = self._make_kv_caches(1), None
        kept_blocks, self._num_blocks = self._num_blocks, 1
        allocate_states(self.model, 1, self.device)
        self._recorded_decode = self._pieces = self._hidden_cache = None
        try:
            yield
        finally:
            self.kv_caches, self.kv_swap, self._recorded_decode, self._pieces, self._hidden_cache = kept
            self._num_blocks = kept_blocks
            allocate_states(self.model, 0, self.device)

    def max_logits_bytes(self) -> int:
        """The most bytes of logits in a step: a float32 row a sequence, a copy of it for processing, another in the
        order of custom processors' batch if there are any, and a tile of prompt positions."""
        num_copies = 3 if self.model_config.logits_processors else 2
        num_rows = num_copies * self.states.max_num_reqs
        if self.speculator is not None:
            num_rows *= 1 + self.speculator.num_tokens
        num_rows += num_tile_rows(self.model_config.vocab_size)
        return 4 * self.model_config.vocab_size * num_rows

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> PendingStep:
        """Dispatch one step. Requests whose prefill is not complete after it get no token yet. With async_scheduling,
        the next step may be dispatched before this one's result is taken."""
        self._check_weights()
        if self.kv_swap is not None:
            self.kv_swap.run(scheduler_output)
        if self.follower is not None:
            self.follower.forget(scheduler_output)
        self._update_states(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            return StepResult([], [], self.states, None, None, self._reading_clocks)
        if self._state_pools is not None:
            self._state_pools.load(scheduler_output, self.states)
        tables = self.block_tables, self.prompt_logprobs, self.other_block_tables, self.run_logprobs
        batch = build_input_batch(scheduler_output, self.states, *tables)
        if self._state_pools is not None and batch.expanded_np is not None:
            rows, num_drafts = batch.expanded_np
            self._state_pools.back_up(batch.idx_mapping_np[rows[num_drafts > 0]], self.states)
        if self.follower is not None:
            batch.need_all_hidden()
        hidden = self._forward(batch)
        if self.follower is not None:
            self.follower.keep(batch, hidden)
        if self._state_pools is not None:
            self._state_pools.save(scheduler_output, self.states)
        self.states.num_computed_tokens[batch.idx_mapping_np] += batch.num_scheduled_np
        return self._finish_step(batch, hidden)

    def _finish_step(self, batch: InputBatch, hidden: Tensor) -> PendingStep:
        """From the final hidden states of `batch.hidden_rows_np`, [M, H], to results."""
        rows = batch.sampling_rows_np if batch.expanded_np is None else batch.expanded_np[0]
        slots = batch.idx_mapping_np[rows]
        sampled: Sampled | VerifiedSamples | None = None
        if len(slots):
            sampled = (self._sample if batch.expanded_np is None else self._verify)(batch, slots, hidden)
        readings = None if batch.prompts is None else self._read_prompts(batch.prompts, hidden)
        req_ids, silent = ([batch.req_ids[row] for row in each] for each in (rows, batch.silent_rows_np))
        result = StepResult(req_ids, silent, self.states, sampled, readings, self._reading_clocks)
        result.runs = None if batch.runs is None else self._read_runs(batch.runs, hidden)
        result.append_runs = self._append_runs if self.sampler.grammars.in_use else None
        result.draft = None if self.speculator is None else self._draft
        return result

    def _draft(self, sampled: Sampled | VerifiedSamples) -> dict[int, list[int]]:
        """See StepResult."""
        assert self.speculator is not None
        if isinstance(sampled, VerifiedSamples):
            slots, drafted, accepted = sampled.judged()
            if self._state_pools is not None:
                self._state_pools.restore(slots[accepted < drafted], self.states)
            self.speculator.observe(slots, drafted, accepted)
        rows = np.flatnonzero(sampled.draws)
        return {int(rows[index]): draft for index, draft in self.speculator.propose(sampled.slots[rows]).items()}

    def _append_runs(self, sampled: Sampled | VerifiedSamples) -> dict[int, list[int]]:
        """See StepResult."""
        if self.device.type == "cpu" and len(sampled.slots) > _MOST_ROWS_WITH_RUNS:
            return {}
        # Of slots with other requests by now nothing is asked.
        rows = np.flatnonzero(sampled.draws & (self.states.owners[sampled.slots] == sampled.owners))
        runs = self.sampler.forced_runs(sampled.slots[rows], self.states)
        found = {}
        for index, run in runs.items():
            slot = int(sampled.slots[rows[index]])
            start = int(self.states.total_len[slot])
            self.states.append_run(slot, run)
            if slot in self._run_readers:
                self.run_logprobs.add_run(slot, *self._run_readers[slot], start - 1, start - 1 + len(run))
            found[int(rows[index])] = run
        return found

    def _read_runs(self, rows: PromptRows, hidden: Tensor) -> PromptReadings:
        """Read tokens that were appended undrawn, like a prompt's."""
        readings = PromptReadings(self._host_copies)
        if len(rows.slots):
            self.run_logprobs.read(hidden, rows, *self._head(), self.states, readings)
            self.run_logprobs.remove_read(np.unique(rows.slots))
        return readings

    def _head(self) -> tuple[Callable[[Tensor, np.ndarray], Tensor], Tensor | None]:
        """What gives the logits of hidden states [L, H] and their requests' slots, int64 [L]; and the weight that
        suffices for them."""
        if self.adapters is None or not self.adapters.changes_head:
            return lambda hidden, _: self.model.compute_logits(hidden), self.model.lm_head.plain_weight
        return self._adapted_logits, None

    def _adapted_logits(self, hidden: Tensor, slots: np.ndarray) -> Tensor:
        assert self.adapters is not None
        self.adapters.use(slots)
        return self.model.compute_logits(hidden)

    def _check_weights(self) -> None:
        """Steps are recorded anew where weights have moved: a recording holds addresses."""
        updater = self.model.weight_updater
        updater.complete()
        version = updater.packing_version + (0 if self.adapters is None else self.adapters.version)
        if version != self._packing_version:
            self._packing_version = version
            self._record_decode()

    def _forward(self, batch: InputBatch) -> Tensor:
        if self.adapters is not None:
            self._use_adapters(self.adapters, batch)
        decodes = self._replays_decode(batch)
        is_replayed = decodes or (self._pieces is not None and self._pieces.takes(batch) and not batch.has_adapters)
        if is_replayed and self._host_copies is not None:
            # Graphs share memory: this one may overwrite the last one's results.
            self._host_copies.fence()
        if self._recorded_decode is not None and decodes:
            return self._recorded_decode(batch)
        inputs = batch.to_device(self.states)
        if self.has_states and self._state_pools is None and inputs.attn.state_slots is not None:
            # In a scratch cache.
            inputs.attn.state_slots.zero_()
        if self._pieces is not None and is_replayed:
            return self._pieces(inputs)
        return self.model(inputs.input_ids, inputs.positions, self.kv_caches, inputs.attn, inputs.hidden_rows)

    def _use_adapters(self, adapters: AdapterManager, batch: InputBatch) -> None:
        """Say which adapters the step's rows go through."""
        if self._records_kernels and batch.is_decode and len(batch.req_ids) <= self._max_decode_rows:
            batch.has_adapters = adapters.use_recorded(batch.idx_mapping_np)
        else:
            hidden_slots = batch.token_slots_np[batch.hidden_rows_np]
            logits_slots = hidden_slots if batch.logits_rows_np is None else hidden_slots[batch.logits_rows_np]
            batch.has_adapters = adapters.use(batch.token_slots_np, hidden_slots, logits_slots)

    def _replays_decode(self, batch: InputBatch) -> bool:
        """Whether the step is one that was recorded. CUDA graphs and steps with drafts have no adapters."""
        steps = self._recorded_decode
        if steps is None or not steps.takes(batch):
            return False
        if not batch.has_adapters or self.adapters is None:
            return True
        can_record = isinstance(steps, RecordedDecode) and batch.is_decode
        return can_record and self.adapters.can_record(batch.idx_mapping_np)

    def _sample(self, batch: InputBatch, slots: np.ndarray, hidden: Tensor) -> Sampled:
        """Sample the requests of `slots` and start the copy of the results to the host."""
        output = self._replay_greedy(batch, slots)
        if output is None:
            output = self.sampler(self._logits(batch, hidden), slots, self.states)
            if self.states.last_sampled is not None:
                self.states.keep_sampled(upload(slots, self.device), output.sampled_token_ids)
        draws = self.states.samples[slots]
        places = None if self.states.last_sampled is None else self.states.reserve(slots[draws])
        take_output = (lambda: output) if self._host_copies is None else self._host_copies.start(output)
        return Sampled(slots, draws, take_output, places, self.states.owners[slots])

    def _logits(self, batch: InputBatch, hidden: Tensor) -> Tensor:
        rows = batch.logits_rows_np
        return self.model.compute_logits(hidden if rows is None else hidden.index_select(0, upload(rows, self.device)))

    def _verify(self, batch: InputBatch, slots: np.ndarray, hidden: Tensor) -> VerifiedSamples:
        """As `_sample`, where requests have drafts."""
        assert batch.expanded_np is not None
        rows = expand(slots, batch.expanded_np[1], self.states)
        output = self._replay_greedy(batch, rows.expanded_idx_mapping)
        if output is not None:
            return verified(rows, output, self.states)
        start = None if self._host_copies is None else self._host_copies.start
        return verify(self.sampler, self._logits(batch, hidden), rows, self.states, start)

    def _replay_greedy(self, batch: InputBatch, slots: np.ndarray) -> SamplerOutput | None:
        """Sample all tokens of a replayed step, of the requests in `slots`, by another replay; None: this step or its
        sampling cannot be replayed."""
        graphs, steps = self._greedy_graphs, self._recorded_decode
        if steps is None or not self._replays_decode(batch):
            return None
        if self.sampler.is_followed or len(slots) < len(batch.input_ids_np):
            return None
        if isinstance(steps, RecordedDecode):
            step = steps.step_for(batch)
            return None if step is None or self._recorded_greedy is None else self._recorded_greedy(step, slots)
        if graphs is None:
            return None
        widths = graphs.widths(slots)
        return None if widths is None else graphs(steps.step_for(batch), slots, widths)

    def _read_prompts(self, prompts: PromptBatch, hidden: Tensor) -> PromptReadings:
        """Read prompt positions: first those of cached prefixes, whose hidden states may be kept in this same step,
        then those that the step computed."""
        self._keep_hidden(prompts, hidden)
        readings = PromptReadings(self._host_copies)
        for source, rows in ((self._hidden_cache, prompts.cached), (hidden, prompts.computed)):
            if len(rows.slots):
                assert source is not None, "a cached prefix without the cache"
                self.prompt_logprobs.read(source, rows, *self._head(), self.states, readings)
        return readings

    def _keep_hidden(self, prompts: PromptBatch, hidden: Tensor) -> None:
        """Keep final hidden states beside the prefix cache."""
        if not self._keeps_hidden:
            return
        if self._hidden_cache is None:
            num_slots = (self._num_blocks + self.num_extra_blocks) * self.block_size
            self._hidden_cache = hidden.new_empty((num_slots, hidden.shape[1]))
        kept_rows, kept_slots = upload(prompts.kept_rows, self.device), upload(prompts.kept_slots, self.device)
        self._hidden_cache.index_copy_(0, kept_slots, hidden.index_select(0, kept_rows))

    def _update_states(self, step: SchedulerOutput) -> None:
        for req_id in (*step.finished_req_ids, *step.preempted_req_ids):
            slot = self.states.remove_request(req_id)
            if slot is not None:
                self.sampler.remove_request(slot)
                self.prompt_logprobs.remove_request(slot)
                self.run_logprobs.remove_request(slot)
                self._run_readers.pop(slot, None)
                if self.adapters is not None:
                    self.adapters.remove_request(slot)
                if self.speculator is not None:
                    self.speculator.remove_request(slot)
        for new in step.scheduled_new_reqs:
            params = new.sampling_params
            samples = params.max_tokens != 0
            reads_next = samples or params.num_logprobs is not None
            prompt_len = new.num_prompt_tokens - (params._beam_length or 0)
            slot = self.states.add_request(
                new.req_id, new.prefill_token_ids, prompt_len, new.num_computed_tokens, samples, reads_next
            )
            if self.adapters is not None:
                self.adapters.add_request(slot, new.lora_request)
            self.block_tables.set_row(slot, new.block_ids)
            for table, ids in zip(self.other_block_tables, new.other_block_ids, strict=True):
                table.set_row(slot, ids)
            self.sampler.add_request(slot, params, new.req_id)
            self.prompt_logprobs.add_request(slot, new.req_id, params, new.num_prompt_tokens, new.next_prompt_row)
            if params.grammar is not None and params.reads_generated:
                self._run_readers[slot] = new.req_id, params
            if self.speculator is not None:
                self.speculator.add_request(slot, params)
        for req_id, drafts in step.scheduled_spec_decode_tokens.items():
            self.states.place_drafts(self.states.req_id_to_slot[req_id], drafts)
        cached = step.scheduled_cached_reqs
        for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids:
                self.block_tables.append(self.states.req_id_to_slot[req_id], block_ids)
        for req_id, added in cached.other_new_block_ids.items():
            for table, ids in zip(self.other_block_tables, added, strict=True):
                table.append(self.states.req_id_to_slot[req_id], ids)
        for table in (self.block_tables, *self.other_block_tables):
            table.apply_staged_writes()
        self.sampler.apply_staged_writes()


def _backend_name(name: str, model: Any) -> str:
    """The backend to select. ValueError: layers are latent, which our kernels alone attend to, and another is named."""
    if not any(layer.is_latent for layer in attention_layers(model)):
        return name
    if name not in ("auto", "paged"):
        raise ValueError(
            f"attention_backend={name!r} cannot be used: this model's attention is latent, which runs on our kernels; "
            "leave it 'auto' or 'paged'"
        )
    return "paged"


def _can_capture_layers(model: Any, device: torch.device) -> bool:
    """Turing attends to latents in PyTorch, which waits for the device."""
    is_latent = any(layer.is_latent for layer in attention_layers(model))
    return not is_latent or device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
