"""The V2 model runner: one forward pass and one sampling pass a step, over slots."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from vllm.attention.select import select_backend
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.attention import attention_layers, use_backend, use_kv_scales
from vllm.layers.kv_cache_spec import layer_kinds, stage_cache_layout
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import PendingStep
from vllm.v1.worker.gpu.buffer_utils import upload
from vllm.v1.worker.gpu.cuda import host_copies
from vllm.v1.worker.gpu.guests import CacheSizes, Completion, RunnerGuest, Samples, hooks
from vllm.v1.worker.gpu.input_batch import InputBatch, PromptBatch, build_input_batch
from vllm.v1.worker.gpu.replay.make import Replay, ReplayMaker
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsState, PromptReadings, num_tile_rows
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.vocab_parallel import vocab_of
from vllm.v1.worker.gpu.states import BlockCopies, BlockTables, KVCaches, RequestStates
from vllm.v1.worker.gpu.step_result import Sampled, StepResult

Guest = TypeVar("Guest", bound=RunnerGuest)


class GPUModelRunner:
    """Runs the model for a batch that is an index mapping into slots; the same code on CUDA and CPU. Slot state
    (RequestStates, BlockTables, the sampler's states) outlives a step; an InputBatch lives for one. Every rank of a
    tensor-parallel group runs the same steps and computes the same tokens.

    A step is: begin, batch, forward, sample, end; between these the guests are called (`guests.py`)."""

    records_steps: ClassVar[bool] = True
    """Whether steps of decoding may be recorded."""

    def __init__(
        self,
        config: VllmConfig,
        model: Any,
        device: torch.device,
        make_guests: Callable[[GPUModelRunner], Sequence[RunnerGuest]] = lambda runner: (),
    ) -> None:
        """`make_guests` is called with the runner once it has slots, a sampler and a model."""
        self.model, self.vllm_config = model, config
        self.device = device
        self.group = get_tp_group()
        self.model_config = model_config = config.model_config
        self.block_size = config.cache_config.block_size
        max_num_reqs, max_model_len = config.scheduler_config.max_num_seqs, model_config.max_model_len
        self.states = RequestStates(max_num_reqs, max_model_len, device, config.scheduler_config.async_scheduling)
        vocab = vocab_of(model_config.vocab_size, self.group)
        self.sampler = Sampler(config, device, vocab)
        self.prompt_logprobs = PromptLogprobsState(max_num_reqs, model_config.vocab_size, vocab)
        self._kv_dtype = getattr(torch, config.kv_cache_dtype)
        sizes = getattr(torch, model_config.dtype), model_config.hf_config.head_dim, self.block_size
        layers = layer_kinds(model, model_config.hf_config, self.group)
        backend_name = _backend_name(model_config.attention_backend, model)
        self._backend = select_backend(backend_name, device, *sizes, self._kv_dtype, layers)
        use_backend(model, self._backend)
        if config.cache_config.float8_dtype:
            use_kv_scales(model)
        self.host_copies = host_copies(device, self.group)
        self._reading_clocks = (self.sampler.reading_clock, self.prompt_logprobs.reading_clock)
        self.kv_layout = stage_cache_layout(
            model, model_config.hf_config, self.group, max_model_len, config.has_one_block_table
        )
        for layer, kv_group in zip(attention_layers(model), self.kv_layout.group_of_layer, strict=False):
            layer.kv_group = kv_group
        # One for each KV group.
        self.block_tables = tuple(
            BlockTables(max_num_reqs, max_model_len, self.block_size, device) for _ in self.kv_layout.windows
        )
        self.kv_caches: KVCaches = []
        self._block_copies: BlockCopies | None = None
        self._sizes = CacheSizes()
        self.max_tokens = config.scheduler_config.max_num_batched_tokens
        self.max_decode_rows = min(max_num_reqs, self.max_tokens)
        # On the CPU collectives cannot be recorded.
        records = self.records_steps and not model_config.enforce_eager
        self.records_kernels = records and self.group.world_size == 1 and device.type == "cpu"
        self.guests: tuple[RunnerGuest, ...] = ()
        self.use_guests(make_guests(self))
        self.replay_maker = ReplayMaker(self, self._backend)
        self.replay = Replay()
        self._recorded_version = 0

    def use_guests(self, guests: Sequence[RunnerGuest]) -> None:
        """Call these from now on. No request may have a slot."""
        self.guests = tuple(guests)
        self._on_reset, self._on_version = hooks(guests, "reset"), hooks(guests, "version")
        self._on_remove, self._on_add = hooks(guests, "remove"), hooks(guests, "add")
        self._on_begin, self._before_batch = hooks(guests, "begin"), hooks(guests, "before_batch")
        self._before_forward, self._after_forward = hooks(guests, "before_forward"), hooks(guests, "after_forward")
        self._on_sample, self._after_sample = hooks(guests, "sample"), hooks(guests, "after_sample")
        self._changes_head = hooks(guests, "changes_head")
        self._before_rows, self._before_request = hooks(guests, "before_rows"), hooks(guests, "before_request")

    def guest(self, kind: type[Guest]) -> Guest | None:
        """The guest of this class, if there is one."""
        return next((guest for guest in self.guests if isinstance(guest, kind)), None)

    # -- memory -------------------------------------------------------------------------------------------------------

    def initialize_kv_cache(self, sizes: CacheSizes) -> None:
        """Allocate the paged KV cache of every layer, untouched, and what guests keep. On CUDA, capture decode
        steps."""
        self.kv_caches = self._make_kv_caches(sizes.num_blocks + self.num_extra_blocks)
        self._reset(sizes)
        self.replay = self.replay_maker.make(sizes)

    def release_kv_cache(self) -> None:
        """Free the KV cache and what depends on it, until initialize_kv_cache. No request may have a slot."""
        self.replay, self.kv_caches = Replay(), []
        self._reset(CacheSizes())

    def _reset(self, sizes: CacheSizes) -> None:
        self._sizes, self._block_copies = sizes, None
        for reset in self._on_reset:
            reset(sizes)

    @property
    def num_extra_blocks(self) -> int:
        """KV blocks beyond the pool's: one for the padding rows of captured steps."""
        return self.replay_maker.num_extra_blocks

    @property
    def block_copies(self) -> BlockCopies:
        """Copies blocks, with all that lies in them."""
        if self._block_copies is None:
            in_blocks = [group for guest in self.guests for group in guest.in_blocks()]
            self._block_copies = BlockCopies([*self.kv_caches, *in_blocks])
        return self._block_copies

    def _make_kv_caches(self, num_blocks: int) -> KVCaches:
        """A pair for each layer, or one tensor; layers that lie in the same cache have the same ones."""
        caches: KVCaches = []
        for spec in self.kv_layout.caches:
            shapes = spec.cache_shapes(self._backend, num_blocks, self.block_size)
            # One piece of memory, so that who carries blocks elsewhere can see a layer's as one tensor.
            whole = torch.empty((len(shapes), *shapes[0]), dtype=self._kv_dtype, device=self.device)
            caches.append(whole.unbind())
        return [caches[index] for index in self.kv_layout.cache_of_layer]

    @contextlib.contextmanager
    def scratch_cache(self) -> Iterator[None]:
        """For steps whose results are discarded: a cache of one block, number 0; nothing is recorded or replayed. What
        guests keep of requests is forgotten."""
        sizes, kept, self.replay = self._sizes, self.kv_caches, Replay()
        self.kv_caches = self._make_kv_caches(1)
        self._reset(CacheSizes(num_blocks=1, is_scratch=True))
        try:
            yield
        finally:
            self.kv_caches = kept
            self._reset(sizes)
            if sizes.num_blocks:
                self.replay = self.replay_maker.make(sizes)

    def max_logits_bytes(self) -> int:
        """The most bytes of logits in a step: a float32 row a sequence, a copy of it for processing, another in the
        order of custom processors' batch if there are any, and a tile of prompt positions."""
        num_copies = 3 if self.model_config.logits_processors else 2
        num_rows = num_copies * self.states.max_num_reqs
        num_rows *= max((guest.logits_rows for guest in self.guests), default=1)
        num_rows += num_tile_rows(self.model_config.vocab_size)
        return 4 * self.model_config.vocab_size * num_rows

    # -- a step -------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> PendingStep:
        """Dispatch one step. Requests whose prefill is not complete after it get no token yet. With async_scheduling,
        the next step may be dispatched before this one's result is taken."""
        self._begin(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            return StepResult([], [], self.states, None, None, self._reading_clocks)
        batch = build_input_batch(scheduler_output, self.states, self.block_tables, self.prompt_logprobs)
        for before_forward in self._before_forward:
            before_forward(scheduler_output, batch)
        hidden = self._forward(batch)
        for after_forward in self._after_forward:
            after_forward(scheduler_output, batch, hidden)
        self.states.num_computed_tokens[batch.idx_mapping_np] += batch.num_scheduled_np
        return self._finish_step(batch, hidden)

    def _begin(self, step: SchedulerOutput) -> None:
        """Bring weights, blocks and slots up to the step's."""
        self._check_weights()
        for begin in self._on_begin:
            begin(step)
        if step.block_copies:
            self.block_copies.copy(step.block_copies)
        self._update_states(step)
        for before_batch in self._before_batch:
            before_batch(step)

    def _check_weights(self) -> None:
        """Steps are recorded anew where weights have moved: a recording holds addresses."""
        updater = self.model.weight_updater
        updater.complete()
        version = updater.packing_version
        for of_guest in self._on_version:
            version += of_guest()
        if version != self._recorded_version:
            self._recorded_version = version
            if self._sizes.num_blocks and not self._sizes.is_scratch:
                self.replay = self.replay_maker.make(self._sizes)

    def _update_states(self, step: SchedulerOutput) -> None:
        for req_id in (*step.finished_req_ids, *step.preempted_req_ids):
            slot = self.states.remove_request(req_id)
            if slot is not None:
                self.sampler.remove_request(slot)
                self.prompt_logprobs.remove_request(slot)
                for remove in self._on_remove:
                    remove(slot)
        for new in step.scheduled_new_reqs:
            params = new.sampling_params
            samples = params.max_tokens != 0
            reads_next = samples or params.num_logprobs is not None
            prompt_len = new.num_prompt_tokens - (params._beam_length or 0)
            slot = self.states.add_request(
                new.req_id, new.prefill_token_ids, prompt_len, new.num_computed_tokens, samples, reads_next
            )
            for table, ids in zip(self.block_tables, new.block_ids, strict=True):
                table.set_row(slot, ids)
            self.sampler.add_request(slot, params, new.req_id)
            self.prompt_logprobs.add_request(slot, new.req_id, params, new.num_prompt_tokens, new.next_prompt_row)
            for add in self._on_add:
                add(slot, new, step)
        cached = step.scheduled_cached_reqs
        for req_id, added in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if added:
                slot = self.states.req_id_to_slot[req_id]
                for table, ids in zip(self.block_tables, added, strict=True):
                    table.append(slot, ids)
        for table in self.block_tables:
            table.apply_staged_writes()
        self.sampler.apply_staged_writes()

    def _forward(self, batch: InputBatch) -> Tensor:
        if self.replay.takes(batch):
            if self.host_copies is not None:
                # Graphs share memory: this one may overwrite the last one's results.
                self.host_copies.fence()
            return self.replay.forward(batch)
        inputs = batch.to_device(self.states)
        hidden: Tensor = self.model(inputs.input_ids, inputs.positions, self.kv_caches, inputs.attn, inputs.hidden_rows)
        return hidden

    def _finish_step(self, batch: InputBatch, hidden: Tensor) -> PendingStep:
        """From the final hidden states of `batch.hidden_rows_np`, [M, H], to results."""
        rows = batch.sampling_rows_np if batch.expanded_np is None else batch.expanded_np[0]
        sampled = self._sample(batch, hidden) if len(rows) else None
        readings = None if batch.prompts is None else self._read_prompts(batch.prompts, hidden)
        completions = self._completions(batch, hidden)
        req_ids, silent = ([batch.req_ids[row] for row in each] for each in (rows, batch.silent_rows_np))
        return StepResult(req_ids, silent, self.states, sampled, readings, self._reading_clocks, completions)

    def _completions(self, batch: InputBatch, hidden: Tensor) -> list[Completion]:
        """The guests' completions of the results."""
        made = [after_sample(batch, hidden) for after_sample in self._after_sample]
        return [complete for complete in made if complete is not None]

    # -- sampling and readings ----------------------------------------------------------------------------------------

    def _sample(self, batch: InputBatch, hidden: Tensor) -> Samples:
        """Sample the batch's requests and start the copy of the results to the host."""
        for sample in self._on_sample:
            samples: Samples | None = sample(batch, hidden)
            if samples is not None:
                return samples
        slots = batch.idx_mapping_np[batch.sampling_rows_np]
        output = self.replay.sample(batch, slots)
        if output is None:
            output = self.sampler(self.logits(batch, hidden), slots, self.states)
            if self.states.last_sampled is not None:
                self.states.keep_sampled(upload(slots, self.device), output.sampled_token_ids)
        draws = self.states.samples[slots]
        places = None if self.states.last_sampled is None else self.states.reserve(slots[draws])
        take_output = _taken(output) if self.host_copies is None else self.host_copies.start(output)
        return Sampled(slots, draws, take_output, places, self.states.owners[slots])

    def logits(self, batch: InputBatch, hidden: Tensor) -> Tensor:
        """This rank's logits of the batch's logits rows, [L, V] where it is alone."""
        rows = batch.logits_rows_np
        logits: Tensor = self.model.compute_logits(
            hidden if rows is None else hidden.index_select(0, upload(rows, self.device))
        )
        return logits

    def head(self) -> tuple[Callable[[Tensor, np.ndarray], Tensor], Tensor | None]:
        """The function that gives the logits of hidden states [L, H] and their requests' slots, int64 [L]; and the
        weight that suffices for them."""
        if any(changes() for changes in self._changes_head):
            return self._changed_logits, None
        return lambda hidden, _: self.model.compute_logits(hidden), self.model.lm_head.plain_weight

    def _changed_logits(self, hidden: Tensor, slots: np.ndarray) -> Tensor:
        self.before_rows(slots)
        logits: Tensor = self.model.compute_logits(hidden)
        return logits

    def before_rows(self, slots: np.ndarray) -> None:
        """Call it before the model's embeddings or its head take rows of these slots, int64 [L], apart from a step."""
        for before_rows in self._before_rows:
            before_rows(slots)

    def _read_prompts(self, prompts: PromptBatch, hidden: Tensor) -> PromptReadings:
        readings = PromptReadings(self.host_copies)
        for source, rows in prompts.parts(hidden):
            self.prompt_logprobs.read(source, rows, *self.head(), self.states, readings)
        return readings


def _taken(output: SamplerOutput) -> Callable[[], SamplerOutput]:
    return lambda: output


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


class StageRunner(GPUModelRunner):
    """The steps of a generating or pooling model, whose rows the model itself sends to the next stage. Tokens that were
    sampled come with the next step of their request."""

    def _finish_step(self, batch: InputBatch, hidden: Tensor) -> PendingStep:
        return StepResult([], [], self.states, None, None, ())
