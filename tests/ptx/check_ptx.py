"""Hold what Triton's compiler makes of the kernels, run by the machine of ptx_machine.py, to the references; print one
JSON line a check, with the kernels that it ran.

Run as a program: Triton must not interpret here, and needs no device.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from ptx_launches import reachable, running_ptx
from state_calls import state_calls
from torch import Tensor

from vllm.ops._dispatch import force
from vllm.ops.add_lora import add_lora_, add_lora_embedding_, grouped_ranks
from vllm.ops.block_copies import block_parts, copy_blocks_
from vllm.ops.choose_experts import ExpertChoice, choose_experts
from vllm.ops.count_above import count_above
from vllm.ops.experts import ExpertActivation, PackedExperts, experts
from vllm.ops.fill_token_ids import fill_logprob_token_ids
from vllm.ops.gate_and_mul import ACTIVATIONS, gate_and_mul
from vllm.ops.gumbel_sample import gumbel_sample
from vllm.ops.invariant_linear import invariant_linear
from vllm.ops.kv_cache import FLOAT8, kv_rows_shape, reshape_and_cache_
from vllm.ops.latent_attention import latent_attention, write_latent_
from vllm.ops.layer_norm import layer_norm
from vllm.ops.linear_readings import linear_readings
from vllm.ops.packed_linear import pack_linear, packed_linear
from vllm.ops.paged_attention import paged_attention
from vllm.ops.quantized_linear import pack_quantized, quantized_linear
from vllm.ops.quantized_tensor import QuantizedTensor
from vllm.ops.rms_norm import fused_add_rms_norm_, rms_norm
from vllm.ops.rotary import rotary_and_cache_, rotary_embedding_
from vllm.ops.token_bitmask import keep_bits_
from vllm.ops.token_readings import token_readings
from vllm.ops.top_p import keep_top_p_
from vllm.ops.topk import topk

CAPABILITIES = (75, 80, 90)

Call = Callable[[], Any]

_FLOAT32_ROUNDINGS = 4


def _ids(rows: int, columns: int, most: int) -> Tensor:
    return torch.randint(most, (rows, columns), dtype=torch.int32)


def _reading_calls(dtype: torch.dtype, are_all: bool) -> Iterator[tuple[str, Call]]:
    # Whole chunks and a tail; rows that are not aligned; ties, infinities and counts.
    every = ((2, 8208, 20), (1, 4999, 3), (2, 301, 0), (1, 4100, 100))
    for rows, vocab_size, columns in every[: 4 if are_all else 2]:
        logits = torch.randn(rows, vocab_size).mul_(4).to(dtype)
        logits[:, 7:11] = logits.max()
        logits[0, 20:30] = -torch.inf
        ids, counts = _ids(rows, columns, vocab_size), torch.tensor([max(columns - 1, 0), columns][:rows]).int()
        name = f"[{rows}, {vocab_size}] {columns} ids"
        if columns in (20, 0):
            yield f"token_readings {name}", lambda x=logits, i=ids: token_readings(x, i)
        if columns in (3, 100):
            yield (
                f"token_readings {name}, counts, entropy",
                lambda x=logits, i=ids, n=counts: token_readings(x, i, n, entropy=True),
            )
    values = torch.randn(2, 5).mul_(4)
    logits = torch.randn(2, 5003).mul_(4).to(dtype)
    yield "count_above", lambda: count_above(logits, values)
    yield "topk", lambda: topk(logits, 20)

    def keep_top_p() -> Tensor:
        own = logits[:, :301].float()
        keep_top_p_(own, torch.tensor([0.3, 0.9]))
        return own

    yield "keep_top_p_", keep_top_p

    def keep_bits() -> Tensor:
        own = logits[:, :301].float()
        keep_bits_(own, torch.tensor([[0x5A5A0F37] * 10]).int(), 5, torch.tensor([1]))
        return own

    yield "keep_bits_", keep_bits
    slots, positions = torch.tensor([3, 1]).int(), torch.tensor([9, 1])
    temperature, seeds = torch.tensor([0.0, 0.7, 1.0, 1.3]), torch.tensor([5, -6, 7, 2**40 + 1])
    yield "gumbel_sample", lambda: gumbel_sample(logits.float(), temperature, seeds, positions, slots)


def _layer_calls(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    x, residual, weight = torch.randn(3, 576).to(dtype), torch.randn(3, 576).to(dtype), torch.randn(576).to(dtype)
    yield "rms_norm", lambda: rms_norm(x, weight, 1e-5)

    def fused_add_rms_norm() -> tuple[Tensor, Tensor]:
        total = residual.clone()
        return fused_add_rms_norm_(x, total, weight, 1e-5), total

    yield "fused_add_rms_norm_", fused_add_rms_norm
    yield "layer_norm", lambda: layer_norm(x, weight, residual[0], 1e-5)
    # Threads part in erf, which the machine does not run.
    for activation in set(ACTIVATIONS) - {"gelu"}:
        yield f"gate_and_mul {activation}", lambda activation=activation: gate_and_mul(x, activation)
    qkv = torch.randn(5, 4 + 2 * 2, 64).to(dtype)
    table, positions, slots = torch.randn(40, 64), torch.tensor([0, 39, 7, 7, 1]), torch.tensor([0, 33, 5, 18, 47])

    def on_heads(call: Callable[..., Any]) -> Call:
        def run() -> tuple[Tensor, ...]:
            own = qkv.clone()
            caches = [torch.zeros(kv_rows_shape(3, 16, 2, 64), dtype=dtype) for _ in range(2)]
            call(*own.split([4, 2, 2], dim=1), *caches)
            return own, *caches

        return run

    yield "rotary_embedding_", on_heads(lambda q, k, v, *caches: rotary_embedding_(positions, q, k, table))
    yield "reshape_and_cache_", on_heads(lambda q, k, v, *caches: reshape_and_cache_(k, v, *caches, slots))
    yield (
        "rotary_and_cache_",
        on_heads(lambda q, k, v, *caches: rotary_and_cache_(positions, q, k, v, table, *caches, slots)),
    )


def _linear_readings_calls() -> Iterator[tuple[str, Call]]:
    for rows, vocab_size, hidden_size in ((3, 300, 128), (2, 140, 40)):
        hidden = torch.randn(rows, hidden_size).bfloat16()
        weight = (torch.randn(vocab_size, hidden_size) * hidden_size**-0.5).bfloat16()
        ids = _ids(rows, 4, vocab_size)
        yield (
            f"linear_readings [{rows}, {hidden_size}] x {vocab_size}",
            lambda h=hidden, w=weight, i=ids: linear_readings(h, w, i),
        )
        yield (
            f"linear_readings [{rows}, {hidden_size}] x {vocab_size} without ranks",
            lambda h=hidden, w=weight, i=ids: linear_readings(h, w, i, ranks=False),
        )


def _quantized_calls() -> Iterator[tuple[str, Call]]:
    codes, ones = torch.randint(0, 64, (70, 96), dtype=torch.uint8), torch.rand(70, 1).half()
    sub = torch.randint(0, 16, (70, 3), dtype=torch.uint8)
    # Too long for one bfloat16, and exact in two.
    values = torch.randint(-8000, 8000, (16,)) / 4096
    weights = {
        "6 bits": QuantizedTensor(codes, 6, sub, 32, offsets=sub, super_scales=ones, super_offsets=-ones),
        "table": QuantizedTensor(codes & 15, 4, torch.rand(70, 3), 32, values=values, zero_points=sub),
        "float8": QuantizedTensor(torch.randn(70, 96).to(torch.float8_e4m3fn), 8, ones, 96),
    }
    for name, weight in weights.items():
        x = torch.randn(3, 96).bfloat16()
        yield (
            f"quantized_linear {name}",
            lambda x=x, weight=weight: quantized_linear(x, pack_quantized(weight, None), float_out=True),
        )


def _fill_call() -> Call:
    lists, list_idx, counts = _ids(9, 32, 1000), _ids(8, 1, 9)[:, 0], _ids(8, 1, 21)[:, 0]

    def run() -> tuple[Tensor, Any]:
        columns = torch.full((4, 21), -5, dtype=torch.int32)
        return columns, fill_logprob_token_ids(columns, 1, torch.tensor([2, 0, 7, 7]), lists, list_idx, counts)

    return run


def _float8_calls(dtype: torch.dtype, kinds: Sequence[torch.dtype]) -> Iterator[tuple[str, Call]]:
    """Writing and reading a cache of 8-bit floats."""
    for float8 in kinds:
        k, v = torch.randn(2, 24, 2, 40).mul_(20).to(dtype)
        slots, q = torch.arange(24) + 5, torch.randn(9, 4, 40).to(dtype)

        def write(k: Tensor = k, v: Tensor = v, slots: Tensor = slots, float8: torch.dtype = float8) -> Any:
            caches = [torch.zeros(kv_rows_shape(3, 16, 2, 40), dtype=float8) for _ in range(2)]
            reshape_and_cache_(k, v, *caches, slots, 0.5, 2.0)
            return caches

        def attend(q: Tensor = q, write: Callable[[], Any] = write) -> Tensor:
            with force("reference"):
                caches = write()
            table = torch.tensor([[0, 1], [0, 1]], dtype=torch.int32)
            starts, lengths = torch.tensor([0, 1, 9]).int(), torch.tensor([29, 20]).int()
            return paged_attention(q, *caches, table, starts, lengths, 0.125, k_scale=0.5, v_scale=2.0)

        yield f"reshape_and_cache_ {float8}", lambda write=write: tuple(each.view(torch.uint8) for each in write())
        yield f"paged_attention {float8}", attend


def _latent_calls(dtype: torch.dtype, kinds: Sequence[torch.dtype]) -> Iterator[tuple[str, Call]]:
    """Rows of latents written and read; some of several tiles."""
    q = torch.randn(9, 17, 26).to(dtype).split((20, 6), dim=2)
    rows, slots = torch.randn(90, 26).to(dtype).split((20, 6), dim=1), torch.randperm(96)[:90]
    for kind in kinds:

        def write(kind: torch.dtype = kind) -> Tensor:
            cache = torch.zeros(6, 16, 26).to(kind)
            write_latent_(*rows, cache, slots, 1.0 if kind == dtype else 0.5)
            return cache.view(torch.uint8) if kind != dtype else cache

        def attend(kind: torch.dtype = kind, write: Callable[[], Tensor] = write) -> Tensor:
            with force("reference"):
                cache = write().view(kind)
            table = torch.tensor([[0, 3, 5, 1], [2, 4, 0, 0]], dtype=torch.int32)
            starts, lengths = torch.tensor([0, 1, 9]).int(), torch.tensor([61, 20]).int()
            return latent_attention(*q, cache, table, starts, lengths, 0.125, 1.0 if kind == dtype else 0.5)

        yield f"write_latent_ {dtype} {kind}", write
        yield f"latent_attention {dtype} {kind}", attend


def _copy_calls() -> Iterator[tuple[str, Call]]:
    """Between tensors that are parts of one, whose every part a kernel may reach."""
    for size in (24, 18):
        blocks = torch.randn(5, 3 * size)

        def run(blocks: Tensor = blocks, size: int = size) -> Tensor:
            own = blocks.clone()
            parts = block_parts([own[:, :size], own[:, size : 2 * size]])
            reachable.append(own)
            copy_blocks_(torch.tensor([4, 1]), torch.tensor([0, 3]), parts, parts)
            return own

        yield f"copy_blocks_ of {size}", run


def _choice_calls() -> Iterator[tuple[str, Call]]:
    logits, correction = torch.randn(3, 16), torch.randn(16)
    yield "choose_experts", lambda: choose_experts(logits, ExpertChoice(4, renormalised=True))
    grouped = ExpertChoice(4, "sigmoid", num_groups=4, num_groups_kept=2, group_best=2, renormalised=True)
    yield "choose_experts of groups", lambda: choose_experts(logits, grouped, correction)


def _experts_calls(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Calls of experts whose memory is found by a table; one of them no token chooses."""
    hidden, ids, weights = (
        torch.randn(5, 40).to(dtype),
        torch.tensor([[0, 2], [2, 1], [2, 0], [4, 2], [2, 1]]),
        torch.randn(5, 2),
    )
    for activation in (ExpertActivation(), ExpertActivation(limit=1.0, slope=1.702, offset=1.0)):
        stored = [[torch.randn(2 * 24, 40).to(dtype), torch.randn(40, 24).to(dtype)] for _ in range(4)]

        def run(activation: ExpertActivation = activation, stored: list[list[Tensor]] = stored) -> Tensor:
            packed = PackedExperts.empty(4, gated=True), PackedExperts.empty(4)
            for index, matrices in enumerate(stored):
                reachable.extend(matrices)
                for each, matrix in zip(packed, matrices, strict=True):
                    each.put(index, pack_linear(matrix, matrix[:, 0].clone()), packed_linear)
            return experts(hidden, ids.int(), weights, *packed, activation)

        yield f"experts {activation.slope}", run
    # A nucleus that ends between two equal sums is another one: those after this one have the numbers that they had.
    with torch.random.fork_rng():
        rows = torch.randn(5, 48).to(dtype)
        quantized = [[_four_bits(2 * 32, 48), _four_bits(48, 32)] for _ in range(4)]

    def run_quantized() -> Tensor:
        packed = PackedExperts.empty(4, gated=True), PackedExperts.empty(4)
        for index, matrices in enumerate(quantized):
            for each, matrix in zip(packed, matrices, strict=True):
                own = pack_quantized(matrix, matrix.scales[:, 0].to(dtype))
                reachable.extend((*own.parts[0].planes, own.parts[0].rest.scales, own.bias))
                each.put(index, own, quantized_linear)
        return experts(rows, ids.int(), weights, *packed, ExpertActivation())

    yield "experts of 4 bits", run_quantized


def _four_bits(columns: int, inner: int) -> QuantizedTensor:
    codes = torch.randint(0, 16, (columns, inner), dtype=torch.uint8)
    return QuantizedTensor(codes, 4, torch.rand(columns, inner // 16).half() / 16, 16, zero_points=8)


def _attention_calls(dtype: torch.dtype, count: int) -> Iterator[tuple[str, Call]]:
    """The first ones, which are of all kernels from the second on."""
    every = (
        (64, ((1, 40), (20, 37), (1, 1), (3, 3))),
        (64, ((1, 1100),)),
        (40, ((2, 18), (1, 9))),
        (128, ((70, 81), (1, 20))),
    )
    for head_dim, lengths in every[:count]:
        queries = [each for each, _ in lengths]
        # Mixed requests have the one kind's rows not told from the other's.
        told = (None, None) if 1 in queries and max(queries) > 1 else (queries.count(1), lengths[0][1])
        q = torch.randn(sum(queries), 4, head_dim).to(dtype)
        num_blocks = [-(-context // 16) for _, context in lengths]
        keys, values = (torch.randn(kv_rows_shape(sum(num_blocks), 16, 2, head_dim)).to(dtype) for _ in range(2))
        blocks = torch.randperm(sum(num_blocks), dtype=torch.int32).split(num_blocks)
        table = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True)
        starts = torch.tensor([0, *queries]).cumsum(0).int()
        seq_lens = torch.tensor([context for _, context in lengths], dtype=torch.int32)
        yield (
            f"paged_attention {head_dim} {lengths}",
            lambda q=q, k=keys, v=values, t=table, s=starts, n=seq_lens, d=told: paged_attention(
                q, k, v, t, s, n, 0.125, None, *d
            ),
        )


def _lora_calls(dtype: torch.dtype) -> Iterator[tuple[str, Call]]:
    """Calls for two adapters on four of six rows: products of two parts, one of them not adapted, and an embedding."""
    order, starts = torch.tensor([4, 0, 1, 3, 0, 0]).int(), torch.tensor([0, 1, 4]).int()
    ranks, scales = torch.tensor([[3, 0], [16, 5]]).int(), torch.tensor([[0.5, 1.0], [2.0, 0.3]])
    x, out = torch.randn(6, 40).to(dtype), torch.randn(6, 40).to(dtype)
    a = torch.stack([torch.cat([grouped_ranks(torch.randn(16, 40), 1) for _ in range(2)]) for _ in range(2)]).to(dtype)
    b, gain, shift = torch.randn(2, 16, 40).to(dtype), torch.randn(2, 40), torch.randn(2, 40)
    parts = order, starts, a, b, ranks, scales, torch.tensor([0, 24, 40]).int()
    yield f"add_lora {dtype}", lambda: add_lora_(out.clone(), x, *parts)
    yield f"add_lora of magnitudes {dtype}", lambda: add_lora_(out.clone(), x, *parts, gain, shift)
    ids, one = torch.tensor([0, 39, -1, 7, 12, 3]).int(), torch.tensor([0, 40]).int()
    whole = a[:, :1].contiguous(), b, ranks[:, :1].contiguous(), scales[:, :1].contiguous(), one
    yield f"add_lora_embedding {dtype}", lambda: add_lora_embedding_(out.clone(), ids, order, starts, *whole)


def _calls(capability: int) -> Iterator[tuple[str, Call]]:
    """All on Hopper; elsewhere of each kernel what is compiled in another way than there. On Ampere those are the
    products, on Turing, which has no bfloat16, all kernels in float16."""
    half, is_hopper = torch.bfloat16 if capability >= 80 else torch.float16, capability >= 90
    if capability != 80:
        for dtype in (torch.float32, half) if is_hopper else (half,):
            for name, call in (*_reading_calls(dtype, is_hopper), *_layer_calls(dtype)):
                yield f"{name} {dtype}", call
        yield from _copy_calls()
        yield from _choice_calls()
        yield from state_calls(half, 2, 24, 40)
        yield "fill_logprob_token_ids", _fill_call()
    # Without tensor cores, and so always on Turing, products are much the same.
    counts = {torch.float32: 3 if is_hopper else 0, torch.bfloat16: 4 if is_hopper else 2, torch.float16: 2}
    for dtype in (torch.float32, half):
        for name, call in _attention_calls(dtype, counts[dtype]):
            yield f"{name} {dtype}", call
        yield from _latent_calls(dtype, (dtype, *FLOAT8) if is_hopper else (dtype,))
        if is_hopper or dtype == half:
            yield from _lora_calls(dtype)
    yield from _float8_calls(half, FLOAT8 if is_hopper else FLOAT8[:1])
    if capability >= 80:
        yield from _linear_readings_calls()
        yield from _quantized_calls()
        x, weight, bias = (torch.randn(*shape).to(half) for shape in ((3, 40), (70, 40), (70,)))
        yield "invariant_linear", lambda: invariant_linear(x, weight, bias, float_out=True)
        yield from _experts_calls(half)


def _largest_error(got: Any, wanted: Any) -> float:
    """As a share of what is allowed: of float32 some roundings of the greatest value, for other orders of sums and
    other functions for exponentials; one of a result of 16 bits; of integers nothing."""
    errors = [0.0]
    for own, other in zip(_tensors(got), _tensors(wanted), strict=True):
        assert own.dtype == other.dtype and own.shape == other.shape
        if not own.is_floating_point():
            errors.append(0.0 if torch.equal(own, other) else float("inf"))
        elif own.numel():
            finite = other.isfinite()
            assert torch.equal(own[~finite].nan_to_num(5.0), other[~finite].nan_to_num(5.0))
            roundings = _FLOAT32_ROUNDINGS if own.dtype == torch.float32 else 1
            allowed = roundings * torch.finfo(own.dtype).eps * max(1.0, other[finite].abs().max().item())
            errors.append((own - other)[finite].abs().max().item() / allowed)
    return max(errors)


def _tensors(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    return [tensor for part in result for tensor in _tensors(part)] if isinstance(result, tuple) else []


def _check(name: str, call: Call, capability: int, change: Callable[[str], str] = str) -> None:
    with force("reference"):
        wanted = call()
    with force("triton"), running_ptx(capability, change) as kernels:
        got = call()
    report = {"check": name, "capability": capability, "error": _largest_error(got, wanted), "kernels": kernels}
    print(json.dumps(report), flush=True)


def _check_racing(name: str, call: Call, change: Callable[[str], str]) -> None:
    race = ""
    with force("triton"), running_ptx(90, change):
        try:
            call()
        except RuntimeError as error:
            race = str(error.__cause__)
    print(json.dumps({"check": f"racing {name}", "race": race}), flush=True)


def main() -> None:
    """Check for the capabilities named, or for all."""
    torch.manual_seed(0)
    for capability in [int(each) for each in sys.argv[1:]] or CAPABILITIES:
        for name, call in _calls(capability):
            _check(name, call, capability)
    name, call = next(_reading_calls(torch.bfloat16, True))
    # Equal logits count as greater: that must show.
    _check(f"spoiled {name}", call, 90, lambda text: text.replace("set.gt.u32.bf16x2", "set.ge.u32.bf16x2"))
    # The last program of a row reads what the others wrote.
    _check_racing(f"relaxed {name}", call, lambda text: text.replace(".acq_rel", ".relaxed"))
    _check_racing(f"without barriers {name}", call, lambda text: re.sub(r"\tbar\.sync[^;]*;", "", text))


if __name__ == "__main__":
    main()
