"""Final hidden states beside the KV blocks of the prefix cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.buffer_utils import upload
from vllm.v1.worker.gpu.guests import CacheSizes, RunnerGuest
from vllm.v1.worker.gpu.input_batch import InputBatch


class HiddenCache(RunnerGuest):
    """Keeps the final hidden states of prompts that are read, where their tokens have keys and values, and hands the
    batch those of cached prefixes."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._num_slots = 0
        # [blocks * block size, H]; allocated at the first prompt readings.
        self.hidden: Tensor | None = None
        self._set_aside: Tensor | None = None  # while a scratch cache is used

    @property
    def block_bytes(self) -> int:
        config = self._runner.vllm_config.model_config
        dtype: torch.dtype = getattr(torch, config.dtype)
        size: int = config.hf_config.hidden_size * self._runner.block_size * dtype.itemsize
        return size

    def reset(self, sizes: CacheSizes) -> None:
        if sizes.is_scratch:
            self._set_aside, self.hidden = self.hidden, None
        else:
            self.hidden, self._set_aside = self._set_aside if sizes.num_blocks else None, None
        self._num_slots = (sizes.num_blocks + self._runner.num_extra_blocks) * self._runner.block_size

    def after_forward(self, step: SchedulerOutput, batch: InputBatch, hidden: Tensor) -> None:
        prompts = batch.prompts
        if prompts is None:
            return
        if self.hidden is None:
            self.hidden = hidden.new_empty((self._num_slots, hidden.shape[1]))
        # A prefix may be one that this same step computes.
        kept_rows, kept_slots = (upload(each, hidden.device) for each in (prompts.kept_rows, prompts.kept_slots))
        self.hidden.index_copy_(0, kept_slots, hidden.index_select(0, kept_rows))
        prompts.cached_hidden = self.hidden

    def blocks(self, block_bytes: int | None = None) -> Tensor:
        """The bytes of each block's states, uint8 [blocks, size], of `block_bytes` each where nothing was kept yet."""
        size = self._runner.block_size
        if self.hidden is None:
            assert block_bytes is not None
            dtype: torch.dtype = getattr(torch, self._runner.vllm_config.model_config.dtype)
            self.hidden = torch.empty((self._num_slots, block_bytes // size // dtype.itemsize), dtype=dtype)
        return self.hidden.view(-1, size * self.hidden.shape[1]).view(torch.uint8)
