"""Calls of the operations that keep a state, for tests of what Triton compiles of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from vllm.ops.gated_delta_rule import gated_delta_rule_
from vllm.ops.gated_recurrence import gated_recurrence_
from vllm.ops.gated_rms_norm import gated_rms_norm
from vllm.ops.mlstm import mlstm_
from vllm.ops.selective_scan import selective_scan_
from vllm.ops.short_conv import gated_short_conv_, short_conv_
from vllm.ops.state_space_scan import state_space_scan_
from vllm.ops.wkv import wkv_

Call = Callable[[], tuple[Tensor, Tensor]]


def state_calls(dtype: torch.dtype, heads: int, keys: int, values: int) -> Iterator[tuple[str, Call]]:
    """Names and calls, which return results and states: a new sequence of a token, and further tokens of another."""
    where = torch.tensor([2, 0]), torch.tensor([0, 1, 4]).int(), torch.tensor([1, 9]).int()
    tokens, channels = 4, 2 * keys + heads * values

    def random(*shape: int) -> Tensor:
        return torch.randn(shape).to(dtype)

    def on(pool: Tensor, call: Callable[[Tensor], Tensor]) -> Call:
        def run() -> tuple[Tensor, Tensor]:
            own = pool.clone()
            return call(own), own

        return run

    x = random(tokens, channels)
    for width in (2, 4):
        taps, bias = random(width, channels), None if width == 2 else random(channels)
        yield (
            f"short_conv_ {width}",
            on(
                random(3, width - 1, channels),
                lambda tail, taps=taps, bias=bias: short_conv_(x, taps, bias, tail, *where, bias is not None),
            ),
        )
    parts, taps = random(tokens, 3 * channels), random(3, channels)
    yield (
        "gated_short_conv_",
        on(random(3, 2, channels), lambda tail: gated_short_conv_(parts, taps, None, tail, *where)),
    )
    rate = torch.rand(heads)
    for width in (1, keys):
        decay, beta, bias = random(tokens, heads * width), random(tokens, heads), torch.randn(heads * width)
        yield (
            f"gated_delta_rule_ {width}",
            on(
                torch.randn(3, heads, keys, values),
                lambda pool, given=(decay, beta, rate, bias): gated_delta_rule_(x, *given, pool, *where, 1),
            ),
        )
    xbc, dt, numbers = random(tokens, channels), random(tokens, heads), torch.randn(2, heads)
    yield (
        "state_space_scan_",
        on(
            torch.randn(3, heads, keys, values),
            lambda pool: state_space_scan_(xbc, dt, rate, *numbers, pool, *where, 1, 0.01, 5.0),
        ),
    )
    yield from _chunk_calls(dtype, heads, keys, values)
    b, c, step, gate = random(tokens, 16), random(tokens, 16), random(tokens, channels), random(tokens, channels)
    rates, of_channels = torch.rand(16, channels), torch.randn(2, channels)
    yield (
        "selective_scan_",
        on(
            torch.randn(3, 16, channels),
            lambda pool: selective_scan_(x, step, b, c, gate, rates, *of_channels, pool, *where),
        ),
    )
    gates = random(tokens, channels), random(tokens, channels), *torch.randn(2, channels), torch.rand(channels)
    yield (
        "gated_recurrence_",
        on(torch.randn(3, channels), lambda pool: gated_recurrence_(x, *gates, pool, *where)),
    )
    decays = torch.rand(channels), torch.randn(channels)
    yield "wkv_", on(torch.rand(3, 3, channels), lambda pool: wkv_(x, step, gate, *decays, pool, *where))
    qkv, exponents = random(tokens, heads * (2 * keys + values)), random(tokens, 2 * heads)
    yield (
        "mlstm_",
        on(
            torch.rand(3, heads, keys * values + keys + 1),
            lambda pool: mlstm_(qkv, exponents, pool, *where, keys, 15.0, 1e-6),
        ),
    )
    for first in (False, True):
        norm = random(tokens, heads * values), random(tokens, heads * values), random(values), 1e-5, values
        yield "gated_rms_norm", lambda norm=norm, first=first: (gated_rms_norm(*norm, first, first), norm[0])


def _chunk_calls(dtype: torch.dtype, heads: int, keys: int, values: int) -> Iterator[tuple[str, Call]]:
    """Prompts that are as long as the chunks that kernels take at once."""
    where = torch.tensor([2, 0]), torch.tensor([0, 1, 19]).int(), torch.tensor([1, 18]).int()
    x, per_head = torch.randn(19, 2 * keys + heads * values).to(dtype), torch.randn(19, heads).to(dtype)
    pool, rate, bias, skip = torch.randn(3, heads, keys, values), torch.rand(heads), *torch.randn(2, heads)

    def scan() -> tuple[Tensor, Tensor]:
        own = pool.clone()
        return state_space_scan_(x, per_head, rate, bias, skip, own, *where, 1), own

    def delta_rule() -> tuple[Tensor, Tensor]:
        own = pool.clone()
        return gated_delta_rule_(x, per_head, per_head, rate, bias, own, *where, 1), own

    yield "state_space_scan_ in chunks", scan
    yield "gated_delta_rule_ in chunks", delta_rule
