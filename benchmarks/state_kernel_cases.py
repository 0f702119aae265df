"""The calls of kernels.py on recurrent states: one sequence's prompt, and a batch of single tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from vllm.ops.gated_delta_rule import gated_delta_rule_
from vllm.ops.gated_recurrence import gated_recurrence_
from vllm.ops.gated_rms_norm import gated_rms_norm
from vllm.ops.mlstm import mlstm_
from vllm.ops.selective_scan import selective_scan_
from vllm.ops.short_conv import short_conv_
from vllm.ops.state_space_scan import state_space_scan_
from vllm.ops.wkv import wkv_

Call = tuple[str, Callable[[], Tensor], int, int]
_BATCHES = ([512], [1], [1] * 64)


def state_calls(kernel: str, heads: int) -> Iterator[Call]:
    """(label, call, bytes that it must read and write, multiplications and additions) of a kernel, for so many heads of
    128 keys and 128 values."""
    size = 128
    for lengths in _BATCHES:
        starts = torch.tensor([0, *lengths]).cumsum(0).int()
        where = torch.arange(len(lengths)), starts, torch.tensor(lengths).int() + 5
        tokens, rows = int(starts[-1]), len(lengths)
        channels = heads * size
        x, gate, qkv = _random(tokens, channels), _random(tokens, channels), _random(tokens, 3 * channels)
        of_heads, rate = _random(tokens, heads), torch.rand(heads)
        matrices = torch.randn(rows, heads, size, size)
        label, width = f"{rows} sequences of {lengths[0]}", 2 * tokens * channels
        moved = 2 * 4 * matrices.numel()
        if kernel == "short_conv":
            call = partial(short_conv_, x, _random(4, channels), None, _random(rows, 3, channels), *where, True)
            yield label, call, 2 * width, 8 * tokens * channels
        elif kernel == "gated_delta_rule":
            call = partial(gated_delta_rule_, qkv, of_heads, of_heads, rate, rate, matrices, *where, heads)
            yield label, call, moved + 4 * width, 7 * tokens * channels * size
        elif kernel == "state_space_scan":
            xbc = _random(tokens, channels + 2 * size)
            call = partial(state_space_scan_, xbc, of_heads, rate, rate, rate, matrices, *where, 1)
            yield label, call, moved + 2 * width, 5 * tokens * channels * size
        elif kernel == "selective_scan":
            b, rates, states = _random(tokens, 16), torch.rand(16, channels), torch.randn(rows, 16, channels)
            numbers = torch.randn(channels)
            call = partial(selective_scan_, x, x, b, b, gate, rates, numbers, numbers, states, *where)
            yield label, call, 2 * 4 * states.numel() + 4 * width, 0
        elif kernel == "gated_recurrence":
            numbers, states = torch.rand(3, channels), torch.randn(rows, channels)
            call = partial(gated_recurrence_, x, gate, gate, *numbers, states, *where)
            yield label, call, 4 * width, 0
        elif kernel == "wkv":
            states = torch.rand(rows, 3, channels)
            yield label, partial(wkv_, x, gate, gate, *torch.rand(2, channels), states, *where), 4 * width, 0
        elif kernel == "mlstm":
            states, gates = torch.randn(rows, heads, size * size + size + 1), _random(tokens, 2 * heads)
            call = partial(mlstm_, qkv, gates, states, *where, size, 15.0, 1e-6)
            yield label, call, moved + 4 * width, 5 * tokens * channels * size
        else:
            yield label, partial(gated_rms_norm, x, gate, _random(size), 1e-6, size), 3 * width, 0


def _random(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()
