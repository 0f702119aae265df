"""Every Triton kernel at real sizes against float64, on fresh random inputs, its outputs in poisoned memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from backends import assert_accurate
from bounds import ModelShape
from torch import Tensor

from gpu.attention_checks import attention_checks, latent_checks
from gpu.expert_checks import check_experts
from gpu.setting import Case, Inputs, Setting, make_row
from gpu.timing import time_in_turns
from vllm.ops._dispatch import force
from vllm.ops.add_lora import add_lora_, grouped_ranks
from vllm.ops.count_above import count_above
from vllm.ops.fill_token_ids import fill_logprob_token_ids
from vllm.ops.fp8_linear import fp8_linear, takes_fp8
from vllm.ops.gate_and_mul import ACTIVATIONS, gate_and_mul
from vllm.ops.gumbel_sample import gumbel_sample
from vllm.ops.quantized_linear import pack_quantized, quantized_linear
from vllm.ops.quantized_tensor import QuantizedTensor
from vllm.ops.rms_norm import fused_add_rms_norm_, rms_norm
from vllm.ops.rotary import rotary_embedding_
from vllm.ops.token_readings import token_readings
from vllm.ops.top_p import keep_top_p_
from vllm.ops.topk import topk
from vllm.quantization.activations import InputQuantization

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_EPS = 1e-6


def make_cases(setting: Setting) -> dict[str, Case]:
    """Cases by operation and input."""
    return {name: lambda run=run: _poisoned(run) for name, run in _all_checks(setting)}


def _poisoned(run: Callable[[], dict[str, Any] | None]) -> dict[str, Any]:
    with torch.inference_mode(), force("triton"), poisoned_memory():
        return run() or {}


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """torch.empty returns NaN or the greatest integer, so that a cell without a result is detected."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def _all_checks(setting: Setting) -> Iterator[tuple[str, Callable[[], dict[str, Any] | None]]]:
    for dtype in _DTYPES:
        name = str(dtype).removeprefix("torch.")
        yield f"token_readings {name}", lambda dtype=dtype: _token_readings(setting, dtype)
        yield f"count_above {name}", lambda dtype=dtype: _count_above(setting, dtype)
        yield f"topk {name}", lambda dtype=dtype: _topk(setting, dtype)
        for model, shape in setting.sizes.models.items():
            yield f"rms_norm {model} {name}", lambda dtype=dtype, shape=shape: _rms_norm(setting, shape, dtype)
            yield f"gate_and_mul {model} {name}", lambda dtype=dtype, shape=shape: _gate_and_mul(setting, shape, dtype)
        yield f"add_lora {name}", lambda dtype=dtype: _add_lora(setting, dtype)
        yield f"rotary {name}", lambda dtype=dtype: _rotary(setting, dtype)
    yield "gumbel_sample", lambda: _gumbel_sample(setting)
    yield "keep_top_p", lambda: _keep_top_p(setting)
    yield "fill_token_ids", lambda: _fill_token_ids(setting)
    for model, shape in setting.sizes.models.items():
        yield f"linear_readings {model}", lambda shape=shape: _linear_readings(setting, shape)
        yield f"quantized_linear {model}", lambda shape=shape: _quantized_linear(setting, shape)
        yield f"experts {model}", lambda shape=shape: check_experts(setting, shape, is_quantized=False)
        yield f"quantized_experts {model}", lambda shape=shape: check_experts(setting, shape, is_quantized=True)
    yield "fp8_linear", lambda: _fp8_linear(setting)
    yield from attention_checks(setting)
    yield from latent_checks(setting)


def _logits(setting: Setting, dtype: torch.dtype) -> tuple[Inputs, Tensor]:
    """Rows with ties, and with NaN between them, which kernels must not read."""
    make, sizes = Inputs(setting), setting.sizes
    wide = torch.full((sizes.reading_rows, sizes.shape.vocab_size + 8), torch.nan, dtype=dtype, device=make.device)
    logits = wide[:, : sizes.shape.vocab_size]
    logits.copy_(make.normal(*logits.shape, scale=4.0))
    logits[:, 7] = logits[:, 3] = logits.amax(dim=1) + 1
    return make, logits


def _ids(make: Inputs, setting: Setting) -> tuple[Tensor, Tensor]:
    rows, num_ids = setting.sizes.reading_rows, setting.sizes.num_ids
    return make.integers(setting.sizes.shape.vocab_size, rows, num_ids), make.integers(num_ids + 1, rows)


def _token_readings(setting: Setting, dtype: torch.dtype) -> None:
    make, logits = _logits(setting, dtype)
    ids, counts = _ids(make, setting)
    got = token_readings(logits, ids, counts, entropy=True)
    truth, valid = logits.double(), _columns(ids) < counts[:, None]
    chosen = truth.gather(1, ids.long())
    _assert_equal("logits", got.logits, chosen.masked_fill(~valid, 0.0))
    ranks = torch.stack([1 + (truth > column[:, None]).sum(1) for column in chosen.unbind(1)], dim=1)
    _assert_equal("ranks", got.ranks, ranks.masked_fill(~valid, 0))
    _assert_equal("max", got.max, truth.amax(1))
    _assert_equal("argmax", got.argmax, torch.full_like(got.argmax, 3))
    lse = truth.logsumexp(1)
    assert_accurate("triton", got.lse, lse)
    shifted = truth - lse[:, None]
    # A sum of as many float32 terms as the vocabulary has.
    assert_accurate("triton", got.entropy, -(shifted * shifted.exp()).sum(1), slack=2e-5)


def _count_above(setting: Setting, dtype: torch.dtype) -> None:
    make, logits = _logits(setting, dtype)
    ids, counts = _ids(make, setting)
    values = logits.gather(1, ids.long()).float()
    expected = torch.stack([(logits.float() > column[:, None]).sum(1) for column in values.unbind(1)], dim=1)
    _assert_equal(
        "counts", count_above(logits, values, counts), expected.masked_fill(_columns(ids) >= counts[:, None], 0)
    )


def _topk(setting: Setting, dtype: torch.dtype) -> None:
    _, logits = _logits(setting, dtype)
    values, ids = topk(logits, setting.sizes.num_ids)
    expected = logits.double().sort(dim=1, descending=True, stable=True)
    _assert_equal("values", values, expected.values[:, : setting.sizes.num_ids])
    _assert_equal("ids", ids, expected.indices[:, : setting.sizes.num_ids])


def _rms_norm(setting: Setting, shape: ModelShape, dtype: torch.dtype) -> None:
    make, rows = Inputs(setting), setting.sizes.reading_rows + 1
    weight = make.normal(shape.hidden_size, dtype=dtype)
    x, residual = (make.normal(rows, shape.hidden_size, dtype=dtype, scale=3.0) for _ in range(2))
    assert_accurate("triton", rms_norm(x, weight, _EPS), _norm(x, weight))
    heads = make.normal(rows, 3, shape.head_dim, dtype=dtype)
    assert_accurate("triton", rms_norm(heads, weight[: shape.head_dim], _EPS), _norm(heads, weight[: shape.head_dim]))
    total = (residual.double() + x.double()).to(dtype)
    got = fused_add_rms_norm_(x, residual, weight, _EPS)
    assert_accurate("triton", residual, total.double())
    assert_accurate("triton", got, _norm(residual, weight))


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + _EPS).rsqrt() * weight.double()


def _gate_and_mul(setting: Setting, shape: ModelShape, dtype: torch.dtype) -> None:
    x = Inputs(setting).normal(setting.sizes.reading_rows, 2 * shape.intermediate_size, dtype=dtype, scale=3.0)
    gate, up = x.double().chunk(2, dim=1)
    for name, activation in ACTIVATIONS.items():
        assert_accurate("triton", gate_and_mul(x, name), activation(gate) * up)


def _add_lora(setting: Setting, dtype: torch.dtype) -> None:
    """Three adapters of rank 16 on rows in turn, every fourth row without one."""
    make, shape, rows = Inputs(setting), setting.sizes.shape, setting.sizes.reading_rows
    width, rank = shape.hidden_size, 16
    x, out = make.normal(rows, width, dtype=dtype), make.normal(rows, width, dtype=dtype)
    a, b = make.normal(3, rank, width, dtype=dtype, scale=0.1), make.normal(3, rank, width, dtype=dtype, scale=0.1)
    adapters = torch.arange(rows, device=x.device) % 4
    order, counts = adapters.argsort(stable=True), torch.bincount(adapters, minlength=4)[:3]
    inner = torch.einsum("tk,lrk->tlr", x.double(), a.double())
    products = torch.einsum("tlr,lrn->tln", inner, b.double())
    wanted = out.double()
    for adapter in range(3):
        wanted[adapters == adapter] += 0.5 * products[adapters == adapter, adapter]
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
    ranks = torch.full((3, 1), rank, dtype=torch.int32, device=x.device)
    borders = torch.tensor([0, width], dtype=torch.int32, device=x.device)
    wide = torch.stack([grouped_ranks(each, 1) for each in a])
    add_lora_(out, x, order.int(), starts, wide, b, ranks, torch.full_like(ranks, 0.5, dtype=torch.float32), borders)
    assert_accurate("triton", out, wanted)


def _rotary(setting: Setting, dtype: torch.dtype) -> None:
    make, shape, rows = Inputs(setting), setting.sizes.shape, setting.sizes.reading_rows
    angles = make.normal(64, shape.head_dim // 2)
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    positions = make.integers(64, rows, dtype=torch.int64)
    heads = shape.num_attention_heads + shape.num_key_value_heads
    qk = make.normal(rows, heads, shape.head_dim, dtype=dtype)
    cos, sin = table.double()[positions].unsqueeze(1).chunk(2, dim=-1)
    first, second = qk.double().chunk(2, dim=-1)
    truth = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    rotary_embedding_(positions, *qk.split([shape.num_attention_heads, shape.num_key_value_heads], dim=1), table)
    assert_accurate("triton", qk, truth)


def _gumbel_sample(setting: Setting) -> None:
    make, logits = _logits(setting, torch.float32)
    rows = len(logits)
    temperature = make.normal(rows).abs() + 0.2
    temperature[::3] = 0.0
    seeds, positions = (make.integers(2**40, rows, dtype=torch.int64) for _ in range(2))
    slots = torch.randperm(rows, device=make.device, generator=setting.generator(1)).int()
    arguments = (logits, temperature, seeds, positions, slots)
    tokens, scores = gumbel_sample(*arguments)
    with force("reference"):
        expected, expected_scores = gumbel_sample(*arguments)
    # The noise is a logarithm of a logarithm, whose last bits depend on the library.
    torch.testing.assert_close(scores, expected_scores, rtol=1e-5, atol=1e-4)
    assert (tokens == expected).float().mean() > 0.99, "other tokens than the reference draws"
    _assert_equal("greedy tokens", tokens[temperature[slots.long()] == 0], 3)


def _keep_top_p(setting: Setting) -> None:
    make, logits = _logits(setting, torch.float32)
    top_p = torch.rand(len(logits), device=make.device, generator=setting.generator(1)) * 0.9 + 0.05
    values, order = logits.double().sort(dim=1, descending=True, stable=True)
    probs = values.softmax(dim=1)
    before = torch.empty_like(probs).scatter_(1, order, probs.cumsum(1) - probs)
    kept = logits.clone()
    keep_top_p_(kept, top_p)
    stays = kept != -torch.inf
    _assert_equal("kept logits", kept[stays], logits[stays].double())
    # The limit of the nucleus is as exact as the sum of the probabilities before it.
    assert not (stays & (before > top_p[:, None] + 1e-5)).any(), "kept a token outside the nucleus"
    assert not (~stays & (before < top_p[:, None] - 1e-5)).any(), "ruled out a token inside the nucleus"


def _fill_token_ids(setting: Setting) -> None:
    make, sizes = Inputs(setting), setting.sizes
    lists = make.integers(sizes.shape.vocab_size, sizes.reading_rows, sizes.num_ids)
    list_idx, counts = make.integers(len(lists), len(lists)), make.integers(sizes.num_ids + 1, len(lists))
    slots = torch.randperm(len(lists), device=make.device, generator=setting.generator(1))
    columns = torch.full((len(lists), 2 + sizes.num_ids), -5, dtype=torch.int32, device=make.device)
    _assert_equal("counts", fill_logprob_token_ids(columns, 2, slots, lists, list_idx, counts), counts[slots])
    _assert_equal("earlier columns", columns[:, :2], -5)
    expected = lists[list_idx[slots].long()].masked_fill(_columns(lists) >= counts[slots, None], 0)
    _assert_equal("ids", columns[:, 2:], expected)


def _linear_readings(setting: Setting, shape: ModelShape) -> None:
    from vllm.ops.linear_readings import linear_readings

    make = Inputs(setting)
    ids, counts = _ids(make, setting)
    hidden = make.normal(len(ids), shape.hidden_size, dtype=torch.bfloat16)
    weight = make.normal(shape.vocab_size, shape.hidden_size, dtype=torch.bfloat16, scale=shape.hidden_size**-0.5)
    got = linear_readings(hidden, weight, ids, counts)
    truth, valid = hidden.double() @ weight.double().T, _columns(ids) < counts[:, None]
    chosen = truth.gather(1, ids.long())
    # Products of bfloat16 are exact in float32; their sums are not, and matrix units cut off where others round.
    near = 3e-5 * truth.abs().max().item()
    torch.testing.assert_close(got.logits.double(), chosen.masked_fill(~valid, 0.0), rtol=0, atol=near)
    torch.testing.assert_close(got.lse.double(), truth.logsumexp(1), rtol=0, atol=near)
    for column, values in enumerate(chosen.unbind(1)):
        fewest, most = (1 + (truth > values[:, None] + sign * near).sum(1) for sign in (1, -1))
        ranks = got.ranks[:, column]
        right = torch.where(valid[:, column], (fewest <= ranks) & (ranks <= most), ranks == 0)
        assert right.all(), f"{int((~right).sum())} wrong ranks in column {column}"


def _quantized_linear(setting: Setting, shape: ModelShape) -> None:
    """4 bits as GPTQ and GGUF have them, a table's values, and 8-bit floats; one row, and many."""
    make, (columns, inner) = Inputs(setting), (shape.intermediate_size, shape.hidden_size)
    codes = make.integers(16, columns, inner, dtype=torch.uint8)
    size = min(32, inner)
    scales, offsets = (make.normal(columns, -(-inner // size), dtype=torch.float16) for _ in range(2))
    zeros = make.integers(16, *scales.shape, dtype=torch.uint8)
    plain = QuantizedTensor(codes, 4, scales, size)
    floats = make.normal(columns, inner).to(torch.float8_e4m3fn)
    weights = (
        replace(plain, zero_points=zeros),
        replace(plain, offsets=offsets),
        replace(plain, values=make.normal(16)),
        QuantizedTensor(floats, 8, scales[:, :1].float(), inner),
    )
    for weight in weights:
        dense, packed = weight.dequantize().double(), pack_quantized(weight, None)
        for rows in (1, setting.sizes.reading_rows):
            x = make.normal(rows, inner, dtype=torch.bfloat16)
            got = quantized_linear(x, packed, float_out=True)
            added = x.double().abs() @ (dense.abs() + 16 * scales.abs().max()).T
            # Float32 sums of codes' products, whose offsets are taken back; tables are kept to 16 bits.
            assert ((got.double() - x.double() @ dense.T).abs() <= 2e-5 * added).all()


def _fp8_linear(setting: Setting) -> dict[str, Any]:
    """Not of Triton: right, and faster than bfloat16."""
    make, shape = Inputs(setting), setting.sizes.shape
    columns, inner = (size // 16 * 16 for size in (shape.intermediate_size, shape.hidden_size))
    codes = make.normal(columns, inner).to(torch.float8_e4m3fn)
    weight = QuantizedTensor(codes, 8, make.normal(columns, 1).abs() + 0.1, inner)
    packed = pack_quantized(weight, None)
    if setting.device.type == "cuda" and not takes_fp8(packed):
        return {"left_out": "the GPU has no units for 8-bit floats"}
    round_rows = InputQuantization("fp8").fp8_rows
    x = make.normal(setting.sizes.prompt_tokens, inner, dtype=torch.bfloat16)
    rounded, scales = round_rows(x)
    few = slice(0, 64)
    wide, dense = rounded[few].double() * scales[few].double(), weight.dequantize().double()
    for float_out in (False, True):
        got = fp8_linear(rounded[few], scales[few], packed, torch.bfloat16, float_out)
        rounding = 0.0 if float_out else 0.004
        allowed = rounding * (wide @ dense.T).abs() + 2e-3 * (wide.square() @ dense.square().T).sqrt()
        # The units keep fewer bits of a sum than float32 has.
        assert ((got.double() - wide @ dense.T).abs() <= allowed).all(), "the product is wrong"
    plain = dense.bfloat16()
    seconds = time_in_turns(
        {
            "fp8": [lambda: fp8_linear(rounded, scales, packed, torch.bfloat16)],
            "rounded": [lambda: fp8_linear(*round_rows(x), packed, torch.bfloat16)],
            "bf16": [lambda: torch.nn.functional.linear(x, plain)],
        },
        setting.device,
        setting.sizes.repeats,
        graphs=False,
    )
    work = f"[{len(x):,}, {inner}] x [{inner}, {columns:,}] in 8-bit floats, against bfloat16"
    return {
        **{f"{name}_seconds": value for name, value in seconds.items()},
        "rows": [
            make_row("fp8_linear", work, seconds["bf16"] / seconds["fp8"], 1.3, "x"),
        ],
    }


def _columns(table: Tensor) -> Tensor:
    return torch.arange(table.shape[1], device=table.device)


def _assert_equal(name: str, got: Tensor, expected: Tensor | float) -> None:
    wrong = int((got != expected).sum())
    assert not wrong, f"{name}: {wrong} of {got.numel()} are wrong"
