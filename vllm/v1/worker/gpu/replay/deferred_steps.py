"""Steps of many tokens on the CPU, whose kernels run together once Python has called them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.module import _has_any_global_hook

from vllm.ops.recording import Deferral, RecordedMemory, Recording
from vllm.v1.worker.gpu.input_batch import InputBatch

LEAST_TOKENS = 64
"""Tokens of a deferred step: with fewer, watching PyTorch's operations might take what it saves on a quiet machine."""

# Operations of a step that kernels may wait for: a few a step, in the last layer.
_WAITED_FOR = {"aten.index_select.default"}


class DeferredSteps:
    """The model's forward pass, by the same kernels on the same numbers. The first step that is taken shows whether the
    model consists of kernels; if it does not, or while hooks look at its modules' results, nothing is deferred."""

    def __init__(self, runner: Any, memory: RecordedMemory) -> None:
        """Results are written to `memory`."""
        self._runner, self._memory = runner, memory
        # Kept, as a walk through the modules of 30 layers takes 0.3 ms at each step.
        self._hooks = [
            hooks for module in runner.model.modules() for hooks in (module._forward_hooks, module._forward_pre_hooks)
        ]
        # None: not known yet. A library that was built from older sources cannot defer.
        self._defers = None if hasattr(torch.ops.vllm_cpu, "flush_recording") else False

    def takes(self, batch: InputBatch) -> bool:
        """Whether the step is deferred, or the first one."""
        may_be = not batch.is_changed if self._defers is None else self._defers
        is_large = may_be and len(batch.input_ids_np) >= LEAST_TOKENS
        return is_large and not any(self._hooks) and not _has_any_global_hook()

    def __call__(self, batch: InputBatch) -> Tensor:
        """Final hidden states of `batch.hidden_rows_np`, [M, H]; valid until the next step."""
        runner = self._runner
        inputs = batch.to_device(runner.states)
        observed = Recording(self._memory) if self._defers is None else None
        with observed or Deferral(self._memory):
            attn, rows = inputs.attn, inputs.hidden_rows
            hidden: Tensor = runner.model(inputs.input_ids, inputs.positions, runner.kv_caches, attn, rows)
        if observed is not None:
            self._defers = observed.missed <= _WAITED_FOR
        return hidden
