"""The V2 model runner: slots in, one forward pass and one sampling pass a step, arrays out."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vllm.config import VllmConfig
from vllm.logprobs import LogprobsRow
from vllm.ops.kv_cache import kv_cache_shape
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.input_batch import InputBatch, build_input_batch
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestStates


class GPUModelRunner:
    """Runs the model for a batch that is an index mapping into slots; the same code on CUDA and CPU.

    Slot state (RequestStates, BlockTables, the sampler's states) outlives a step; an InputBatch lives for one.
    """

    def __init__(self, config: VllmConfig, model: Any, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.model_config = config.model_config
        self.block_size = config.cache_config.block_size
        max_num_reqs = config.scheduler_config.max_num_seqs
        max_model_len = config.model_config.max_model_len
        self.states = RequestStates(max_num_reqs, max_model_len, device)
        self.block_tables = BlockTables(max_num_reqs, max_model_len, self.block_size)
        self.sampler = Sampler(max_num_reqs, config.model_config, device)
        self.kv_caches: list[tuple[torch.Tensor, torch.Tensor]] = []

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """Allocate the paged KV cache of every layer. Pages are touched when first written, not here."""
        hf = self.model_config.hf_config
        shape = kv_cache_shape(num_blocks, self.block_size, hf.num_key_value_heads, hf.head_dim)
        dtype = getattr(torch, self.model_config.dtype)
        self.kv_caches = [
            (torch.empty(shape, dtype=dtype, device=self.device), torch.empty(shape, dtype=dtype, device=self.device))
            for _ in range(hf.num_hidden_layers)
        ]

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step. Requests whose prefill is not complete after it produce nothing yet."""
        self._update_states(scheduler_output)
        if not scheduler_output.total_num_scheduled_tokens:
            return ModelRunnerOutput([], np.empty(0, dtype=np.int32), [])
        batch = build_input_batch(scheduler_output.num_scheduled_tokens, self.states, self.block_tables, self.device)
        hidden = self.model(batch.input_ids, batch.positions, self.kv_caches, batch.attn, batch.logits_rows)
        self.states.num_computed_tokens[batch.idx_mapping_np] += batch.num_scheduled_np
        if not len(batch.sampling_rows_np):
            return ModelRunnerOutput([], np.empty(0, dtype=np.int32), [])
        logits = self.model.compute_logits(hidden)
        slots = batch.idx_mapping_np[batch.sampling_rows_np]
        sampled = self.sampler(logits, slots, self.states)
        return self._finish(batch, slots, sampled)

    def _update_states(self, step: SchedulerOutput) -> None:
        for req_id in (*step.finished_req_ids, *step.preempted_req_ids):
            slot = self.states.remove_request(req_id)
            if slot is not None:
                self.sampler.remove_request(slot)
        for new in step.scheduled_new_reqs:
            slot = self.states.add_request(
                new.req_id, new.prefill_token_ids, new.num_prompt_tokens, new.num_computed_tokens
            )
            self.block_tables.set_row(slot, new.block_ids)
            self.sampler.add_request(slot, new.sampling_params, new.req_id)
        cached = step.scheduled_cached_reqs
        for req_id, block_ids in zip(cached.req_ids, cached.new_block_ids, strict=True):
            if block_ids:
                self.block_tables.append(self.states.req_id_to_slot[req_id], block_ids)
        self.sampler.apply_staged_writes()

    def _finish(self, batch: InputBatch, slots: np.ndarray, sampled: SamplerOutput) -> ModelRunnerOutput:
        """Bring the step's results to the host. A row whose logits are unsound is an error of its request alone."""
        token_ids = sampled.sampled_token_ids.to("cpu", torch.int32).numpy()
        req_ids = [batch.req_ids[row] for row in batch.sampling_rows_np]
        logprobs: list[LogprobsRow | None] = [None] * len(req_ids)
        for rows, tensors in sampled.logprobs:
            lists = tensors.tolists()
            for index, row in enumerate(rows.tolist()):
                logprobs[row] = LogprobsRow(lists, index)
        self.states.append_sampled(slots, token_ids)
        errors = sampled.errors()
        if not errors:
            return ModelRunnerOutput(req_ids, token_ids, logprobs)
        sound = [row for row in range(len(req_ids)) if row not in errors]
        return ModelRunnerOutput(
            [req_ids[row] for row in sound],
            token_ids[sound],
            [logprobs[row] for row in sound],
            {req_ids[row]: f"request {req_ids[row]}: {message}" for row, message in errors.items()},
        )
