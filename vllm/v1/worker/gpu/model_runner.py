"""The V2 model runner: slots in, one forward pass and one sampling pass a step, arrays out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm.config import VllmConfig
from vllm.distributed.communicator import split_kv_heads
from vllm.distributed.parallel_state import get_tp_group
from vllm.logprobs import LogprobsRow
from vllm.ops.kv_cache import kv_cache_shape
from vllm.ops.recording import can_record
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import NO_TOKEN, ModelRunnerOutput
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.buffer_utils import upload
from vllm.v1.worker.gpu.input_batch import InputBatch, PromptBatch, build_input_batch
from vllm.v1.worker.gpu.recorded_decode import RecordedDecode
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.prompt_logprob import UNSOUND_PROMPT, PromptLogprobsState, PromptReadings, num_tile_rows
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.vocab_parallel import vocab_of
from vllm.v1.worker.gpu.states import RequestStates


class GPUModelRunner:
    """Runs the model for a batch that is an index mapping into slots; the same code on CUDA and CPU.

    Slot state (RequestStates, BlockTables, the sampler's states) outlives a step; an InputBatch lives for one. Every
    rank of a tensor-parallel group runs the same steps, and all of them come to the same tokens.
    """

    def __init__(self, config: VllmConfig, model: Any, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.group = get_tp_group()
        self.model_config = config.model_config
        self.block_size = config.cache_config.block_size
        max_num_reqs = config.scheduler_config.max_num_seqs
        max_model_len = config.model_config.max_model_len
        self.states = RequestStates(max_num_reqs, max_model_len, device)
        self.block_tables = BlockTables(max_num_reqs, max_model_len, self.block_size)
        vocab_size = config.model_config.vocab_size
        vocab = vocab_of(vocab_size, self.group)
        self.sampler = Sampler(config, device, vocab)
        self.prompt_logprobs = PromptLogprobsState(max_num_reqs, vocab_size, vocab)
        self._reading_clocks = (self.sampler.reading_clock, self.prompt_logprobs.reading_clock)
        self.kv_caches: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._recorded_decode: RecordedDecode | None = None
        # Final hidden states of cached prompts by KV cache slot, made when a request first reads its prompt.
        self._hidden_cache: torch.Tensor | None = None  # [blocks * block size, H]
        self._keeps_hidden = config.cache_config.enable_prefix_caching

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocate the paged KV cache of every layer. Pages are touched when first written, not here."""
        hf = self.model_config.hf_config
        num_kv_heads = len(split_kv_heads(hf.num_key_value_heads, self.group.world_size)[self.group.rank])
        shape = kv_cache_shape(num_blocks, self.block_size, num_kv_heads, hf.head_dim)
        dtype = getattr(torch, self.model_config.dtype)
        self.kv_caches = [
            (torch.empty(shape, dtype=dtype, device=self.device), torch.empty(shape, dtype=dtype, device=self.device))
            for _ in range(hf.num_hidden_layers)
        ]
        # A recording holds kernels, no collectives.
        alone = self.group.world_size == 1
        if alone and can_record(self.kv_caches[0][0]) and not self.model_config.enforce_eager:
            self._recorded_decode = RecordedDecode(self.model, self.kv_caches, self.block_tables.table.shape[1])

    def max_logits_bytes(self) -> int:
        """Bytes of logits that a step holds at most: one float32 row for each sequence and a copy of it for
        processing, another in the order of the processors' batch where there are custom ones, and a tile of prompt
        positions."""
        num_copies = 3 if self.model_config.logits_processors else 2
        num_rows = num_copies * self.states.max_num_reqs + num_tile_rows(self.model_config.vocab_size)
        return 4 * self.model_config.vocab_size * num_rows

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step. Requests whose prefill is not complete after it get no token yet."""
        self._update_states(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            return ModelRunnerOutput([], np.empty(0, dtype=np.int32), [])
        batch = build_input_batch(
            scheduler_output.num_scheduled_tokens,
            self.states,
            self.block_tables,
            self.prompt_logprobs,
            self.device,
        )
        hidden = self._forward(batch)
        self.states.num_computed_tokens[batch.idx_mapping_np] += batch.num_scheduled_np
        slots = batch.idx_mapping_np[batch.sampling_rows_np]
        sampled: SamplerOutput | None = None
        if len(slots):
            chosen = hidden if batch.logits_rows is None else hidden.index_select(0, batch.logits_rows)
            sampled = self.sampler(self.model.compute_logits(chosen), slots, self.states)
        readings = None if batch.prompts is None else self._read_prompts(batch.prompts, hidden)
        output = self._finish(batch, slots, sampled, readings)
        # The results are on the host: what was timed is over.
        output.readings_seconds = sum(clock.take() for clock in self._reading_clocks)
        return output

    def _forward(self, batch: InputBatch) -> torch.Tensor:
        if self._recorded_decode is not None and self._recorded_decode.takes(batch):
            return self._recorded_decode(batch)
        return self.model(batch.input_ids, batch.positions, self.kv_caches, batch.attn, batch.hidden_rows)

    def _read_prompts(self, prompts: PromptBatch, hidden: torch.Tensor) -> PromptReadings:
        """Read prompt positions: first those whose hidden states a cached prefix has, which may be kept in this very
        step, then those that the step computed."""
        if self._keeps_hidden:
            if self._hidden_cache is None:
                num_slots = self.kv_caches[0][0].shape[0] * self.block_size
                self._hidden_cache = hidden.new_empty((num_slots, hidden.shape[1]))
            kept_rows, kept_slots = upload(prompts.kept_rows, self.device), upload(prompts.kept_slots, self.device)
            self._hidden_cache.index_copy_(0, kept_slots, hidden.index_select(0, kept_rows))
        readings = PromptReadings()
        for source, rows in ((self._hidden_cache, prompts.cached), (hidden, prompts.computed)):
            if len(rows.slots):
                assert source is not None, "a cached prefix without the cache"
                head = self.model.compute_logits, self.model.lm_head.plain_weight
                self.prompt_logprobs.read(source, rows, *head, self.states, readings)
        return readings

    def _update_states(self, step: SchedulerOutput) -> None:
        for req_id in (*step.finished_req_ids, *step.preempted_req_ids):
            slot = self.states.remove_request(req_id)
            if slot is not None:
                self.sampler.remove_request(slot)
                self.prompt_logprobs.remove_request(slot)
        for new in step.scheduled_new_reqs:
            params = new.sampling_params
            slot = self.states.add_request(
                new.req_id,
                new.prefill_token_ids,
                new.num_prompt_tokens,
                new.num_computed_tokens,
                samples=params.max_tokens != 0,
                reads_next=params.max_tokens != 0 or params.num_logprobs is not None,
            )
            self.block_tables.set_row(slot, new.block_ids)
            self.sampler.add_request(slot, params, new.req_id)
            self.prompt_logprobs.add_request(slot, new.req_id, params, new.num_prompt_tokens, new.next_prompt_row)
        cached = step.scheduled_cached_reqs
        for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids:
                self.block_tables.append(self.states.req_id_to_slot[req_id], block_ids)
        self.sampler.apply_staged_writes()

    def _finish(
        self,
        batch: InputBatch,
        slots: np.ndarray,
        sampled: SamplerOutput | None,
        readings: PromptReadings | None,
    ) -> ModelRunnerOutput:
        """Bring the step's results to the host. A row whose logits are unsound is an error of its request alone."""
        req_ids = [batch.req_ids[row] for row in batch.sampling_rows_np]
        token_ids = np.empty(0, dtype=np.int32)
        logprobs: list[LogprobsRow | None] = [None] * len(req_ids)
        errors: dict[str, str] = {}
        if sampled is not None:
            token_ids = sampled.sampled_token_ids.to("cpu", torch.int32).numpy()
            for rows, tensors in sampled.logprobs:
                lists = tensors.tolists()
                for index, row in enumerate(rows.tolist()):
                    if row >= 0:
                        logprobs[row] = LogprobsRow(lists, index)
            samples = self.states.samples[slots]
            if samples.all():
                self.states.append_sampled(slots, token_ids)
            else:
                self.states.append_sampled(slots[samples], token_ids[samples])
                token_ids = np.where(samples, token_ids, np.int32(NO_TOKEN))
            errors = {req_ids[row]: message for row, message in sampled.errors().items()}
        if len(batch.silent_rows_np):
            silent = [batch.req_ids[row] for row in batch.silent_rows_np]
            req_ids += silent
            token_ids = np.concatenate([token_ids, np.full(len(silent), NO_TOKEN, dtype=np.int32)])
            logprobs += [None] * len(silent)
        output = ModelRunnerOutput(req_ids, token_ids, logprobs)
        if readings is not None:
            output.prompt_logprobs = readings.rows
            errors.update(dict.fromkeys(readings.unsound, UNSOUND_PROMPT))
        return _without_broken(output, errors) if errors else output


def _without_broken(output: ModelRunnerOutput, errors: dict[str, str]) -> ModelRunnerOutput:
    """The step's results without the requests in `errors` (request id -> message), which end with these."""
    sound = [row for row, req_id in enumerate(output.req_ids) if req_id not in errors]
    return ModelRunnerOutput(
        [output.req_ids[row] for row in sound],
        output.sampled_token_ids[sound],
        [output.logprobs[row] for row in sound],
        {req_id: f"request {req_id}: {message}" for req_id, message in errors.items()},
        {req_id: rows for req_id, rows in output.prompt_logprobs.items() if req_id not in errors},
    )
