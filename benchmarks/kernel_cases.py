"""The calls that kernels.py measures: every kernel in the shapes of a model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from bounds import ModelShape, available_kernels, pack_as
from state_kernel_cases import state_calls
from torch import Tensor

from vllm.ops._dispatch import force
from vllm.ops.count_above import count_above
from vllm.ops.embedding import embedding
from vllm.ops.fill_token_ids import fill_logprob_token_ids
from vllm.ops.gate_and_mul import gate_and_mul
from vllm.ops.gumbel_sample import gumbel_sample
from vllm.ops.int8_linear import Int8Linear, int8_linear, pack_int8_linear
from vllm.ops.kv_cache import kv_cache_shape, reshape_and_cache_
from vllm.ops.latent_attention import latent_attention
from vllm.ops.packed_linear import pack_linear, packed_embedding, packed_linear, take_packed_rows
from vllm.ops.paged_attention import paged_attention
from vllm.ops.quantized_linear import pack_quantized, quantized_linear
from vllm.ops.quantized_tensor import QuantizedTensor
from vllm.ops.rms_norm import fused_add_rms_norm_, rms_norm
from vllm.ops.rotary import rotary_and_cache_, rotary_embedding_
from vllm.ops.token_bitmask import keep_bits_
from vllm.ops.token_readings import token_readings
from vllm.ops.top_p import keep_top_p_
from vllm.ops.topk import topk

MODELS = {
    "SmolLM2-135M": ModelShape(30, 576, 1536, 9, 3, 64, 49152),
    "0.6B": ModelShape(28, 1024, 3072, 16, 8, 128, 151936),
}

ROWS = (1, 64, 1024)  # of a step: one sequence, a batch, a prefill
LOGITS_ROWS = (1, 64)
QUANTIZED_ROWS = (1, 8, 64, 512)
NUM_IDS = 20  # ids read in a row of logits
_BLOCK_SIZE = 16
_EPS = 1e-5
# More than a cache holds: weights are copied to this size in all, so that they come from memory as in a model.
_COLD_BYTES = 256 * 2**20


@dataclass(frozen=True)
class Case:
    """One call to time.

    Attributes:
        label: the shape.
        call: the operation, run by the forced backend.
        num_bytes: that it must read and write.
        flops: multiplications and additions, for kernels that are bound by them; else 0.
        reference: replaces `call` for the reference backend.
        reset: called before each call, untimed.
        touched: bytes that consecutive calls touch; 0 = num_bytes.
        integers: the multiplications are those of quantization="int8".
        kernel: one of KERNELS; set by `make_cases`.
    """

    label: str
    call: Callable[[], object]
    num_bytes: int
    flops: int = 0
    reference: Callable[[], object] | None = None
    reset: Callable[[], object] | None = None
    touched: int = 0
    integers: bool = False
    kernel: str = ""

    @property
    def working_set(self) -> int:
        """Bytes that decide which level of memory the call reads from."""
        return self.touched or self.num_bytes


def make_cases(shape: ModelShape, kernels: Sequence[str]) -> Iterator[Case]:
    """The cases of those kernels, made one at a time, as their inputs are large."""
    for kernel in kernels:
        torch.manual_seed(0)
        yield from (replace(case, kernel=kernel) for case in KERNELS[kernel](shape))


def _linear(shape: ModelShape) -> Iterator[Case]:
    for matrix, (columns, inner) in shape.matrices().items():
        weight, float_out = _random(columns, inner), matrix == "head"
        num_bytes = 2 * columns * inner
        num_copies = max(1, min(32, _COLD_BYTES // num_bytes))
        plain = itertools.cycle([weight.clone() for _ in range(num_copies)])
        for kernel, gated in itertools.product(available_kernels(), (False, True)):
            first = pack_as(weight, kernel, float_out, gated and matrix == "gate_up")
            if first.gated != gated or first.layout != kernel:
                continue
            packed = itertools.cycle([replace(first, weight=first.weight.clone()) for _ in range(num_copies)])
            for rows in LOGITS_ROWS if matrix == "head" else ROWS:
                x = _random(rows, inner)
                yield Case(
                    f"{matrix} {rows}x{inner}x{columns} {kernel}{' gated' if gated else ''}",
                    lambda x=x, packed=packed, float_out=float_out: packed_linear(x, next(packed), float_out),
                    num_bytes + 2 * rows * (inner + columns // (2 if gated else 1)),
                    2 * rows * columns * inner,
                    lambda x=x, plain=plain, gated=gated: _plain_linear(x, next(plain), gated),
                    touched=num_bytes * num_copies,
                )


def _plain_linear(x: Tensor, weight: Tensor, gated: bool) -> Tensor:
    product = F.linear(x, weight)
    return gate_and_mul(product, "silu") if gated else product


def _linear_int8(shape: ModelShape) -> Iterator[Case]:
    for matrix, (columns, inner) in shape.matrices().items():
        num_bytes = columns * inner
        num_copies = max(1, min(32, _COLD_BYTES // num_bytes))
        weight, gated = _random(columns, inner), matrix == "gate_up"
        packed = [pack_int8_linear(weight, None, gated=gated) for _ in range(num_copies)]
        with force("reference"):
            plain = pack_int8_linear(weight, None, gated=gated)
        weights = itertools.cycle(packed)
        for rows in LOGITS_ROWS if matrix == "head" else ROWS:
            x = _random(rows, inner)
            yield Case(
                f"{matrix} {rows}x{inner}x{columns}{' gated' if gated else ''}",
                lambda x=x, weights=weights: int8_linear(x, next(weights)),
                num_bytes + 2 * rows * (inner + columns // (2 if gated else 1)),
                2 * rows * columns * inner,
                partial(_plain_int8_linear, x, plain, gated),
                touched=num_bytes * num_copies,
                integers=True,
            )


def _plain_int8_linear(x: Tensor, plain: Int8Linear, gated: bool) -> Tensor:
    product = int8_linear(x, plain)
    return gate_and_mul(product, "silu") if gated and not plain.gated else product


def _linear_quantized(shape: ModelShape) -> Iterator[Case]:
    """Against the same products with bfloat16 weights, as they are packed by default."""
    for matrix, (columns, inner) in shape.matrices().items():
        first = pack_linear(_random(columns, inner), None, float_out=matrix == "head")
        num_copies = max(1, min(32, _COLD_BYTES // (2 * columns * inner)))
        plain = itertools.cycle([replace(first, weight=first.weight.clone()) for _ in range(num_copies)])
        for kind, weight in _quantized_weights(columns, inner):
            packed = [pack_quantized(weight, None) for _ in range(num_copies)]
            weights = itertools.cycle(packed)
            for rows in LOGITS_ROWS if matrix == "head" else QUANTIZED_ROWS:
                x, float_out = _random(rows, inner), matrix == "head"
                yield Case(
                    f"{matrix} {rows}x{inner}x{columns} {kind}",
                    lambda x=x, weights=weights, float_out=float_out: quantized_linear(x, next(weights), float_out),
                    packed[0].nbytes + 2 * rows * (inner + columns),
                    2 * rows * columns * inner,
                    lambda x=x, plain=plain, float_out=float_out: packed_linear(x, next(plain), float_out),
                    touched=packed[0].nbytes * num_copies,
                )


def _quantized_weights(columns: int, inner: int) -> Iterator[tuple[str, QuantizedTensor]]:
    """Weights as in GGUF's Q4_1, GPTQ and AWQ, GGUF's Q6_K and IQ4_NL, and as 8-bit floats."""
    codes = torch.randint(0, 16, (columns, inner), dtype=torch.uint8)
    short, middle, long = (min(size, inner) for size in (16, 32, 128))

    def groups(size: int) -> Tensor:
        return torch.rand(columns, -(-inner // size)).half()

    yield "4 bits, 32, offsets", QuantizedTensor(codes, 4, groups(middle), middle, offsets=groups(middle))
    zeros = (groups(long) * 15).to(torch.uint8)
    yield "4 bits, 128, zero points", QuantizedTensor(codes, 4, groups(long), long, zero_points=zeros)
    sub, supers = (groups(short) * 100).to(torch.int8), groups(inner)
    yield "6 bits, 16, super-scales", QuantizedTensor(codes, 6, sub, short, zero_points=32, super_scales=supers)
    yield "4 bits, 32, table", QuantizedTensor(codes, 4, groups(middle).float(), middle, values=torch.randn(16))
    floats = torch.randn(columns, inner).to(torch.float8_e4m3fn)
    yield "float8, a row", QuantizedTensor(floats, 8, groups(inner).float(), inner)


def _packed_rows(shape: ModelShape) -> Iterator[Case]:
    packed = pack_as(_random(shape.vocab_size, shape.hidden_size), "packed_f32")
    plain = pack_as(_random(shape.vocab_size, shape.hidden_size), "plain")
    for count in (NUM_IDS, 1000):
        rows = torch.randperm(shape.vocab_size)[:count]
        yield Case(
            f"{count} of {shape.vocab_size}x{shape.hidden_size}",
            partial(take_packed_rows, packed, rows),
            2 * 2 * count * shape.hidden_size,
            reference=partial(take_packed_rows, plain, rows),
            touched=2 * shape.vocab_size * shape.hidden_size,
        )


def _rms_norm(shape: ModelShape) -> Iterator[Case]:
    weight = _random(shape.hidden_size)
    for rows in ROWS:
        x = _random(rows, shape.hidden_size)
        label = f"{rows}x{shape.hidden_size}"
        yield Case(label, partial(rms_norm, x, weight, _EPS), 2 * 2 * x.numel())


def _fused_add_rms_norm(shape: ModelShape) -> Iterator[Case]:
    weight = _random(shape.hidden_size)
    for rows in ROWS:
        x, residual = _random(rows, shape.hidden_size), _random(rows, shape.hidden_size)
        call = partial(fused_add_rms_norm_, x, residual, weight, _EPS)
        yield Case(f"{rows}x{shape.hidden_size}", call, 4 * 2 * x.numel())


def _rotary(shape: ModelShape) -> Iterator[Case]:
    angles = torch.rand(8192, shape.head_dim // 2)
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    for rows in ROWS:
        q, k, _ = _qkv(shape, rows)
        positions = torch.randint(0, 8192, (rows,))
        num_bytes = 2 * 2 * (q.numel() + k.numel()) + 4 * rows * shape.head_dim
        yield Case(f"{rows} tokens", partial(rotary_embedding_, positions, q, k, table), num_bytes)


def _embedding(shape: ModelShape) -> Iterator[Case]:
    vocab_size, hidden_size = shape.vocab_size, shape.hidden_size
    weight = _random(vocab_size, hidden_size)
    packed = pack_as(weight, "packed_f32", float_out=True)
    for rows in ROWS:
        ids = torch.randint(0, vocab_size, (rows,), dtype=torch.int32)
        label, num_bytes = f"{rows} of {vocab_size}x{hidden_size}", 2 * 2 * rows * hidden_size
        yield Case(label, partial(embedding, ids, weight), num_bytes, touched=weight.nbytes)
        call, reference = partial(packed_embedding, ids, packed), partial(F.embedding, ids, weight)
        yield Case(f"{label} packed", call, num_bytes, reference=reference, touched=weight.nbytes)


def _gate_and_mul(shape: ModelShape) -> Iterator[Case]:
    for rows in ROWS:
        x = _random(rows, 2 * shape.intermediate_size)
        label = f"{rows}x{2 * shape.intermediate_size}"
        yield Case(label, partial(gate_and_mul, x, "silu"), 2 * (x.numel() + x.numel() // 2))


def _slots(tokens: int) -> Tensor:
    """Slots of a prompt in blocks in random order; for a batch, one slot in each block."""
    offsets = torch.arange(_BLOCK_SIZE if tokens == ROWS[-1] else 1)
    return (torch.randperm(1024)[:, None] * _BLOCK_SIZE + offsets).flatten()[:tokens]


def _write_cache(shape: ModelShape) -> Iterator[Case]:
    caches = _caches(shape, 1024)
    for rows in ROWS:
        _, k, v = _qkv(shape, rows)
        slots = _slots(rows)
        yield Case(f"{rows} tokens", partial(reshape_and_cache_, k, v, *caches, slots), 2 * 2 * (k.numel() + v.numel()))


def _rotary_and_cache(shape: ModelShape) -> Iterator[Case]:
    angles = torch.rand(8192, shape.head_dim // 2)
    table, caches = torch.cat([angles.cos(), angles.sin()], dim=1), _caches(shape, 1024)
    for rows in ROWS:
        q, k, v = _qkv(shape, rows)
        positions, slots = torch.randint(0, 8192, (rows,)), _slots(rows)
        num_bytes = 2 * 2 * (q.numel() + k.numel() + v.numel()) + 4 * rows * shape.head_dim
        yield Case(f"{rows} tokens", partial(rotary_and_cache_, positions, q, k, v, table, *caches, slots), num_bytes)


def _attention_decode(shape: ModelShape) -> Iterator[Case]:
    yield from (_attention(shape, [(1, length)] * rows) for rows, length in _DECODES)


def _attention_prefill(shape: ModelShape) -> Iterator[Case]:
    yield from (_attention(shape, [(length, length)] * rows) for rows, length in _PREFILLS)


def _attention_shared(shape: ModelShape) -> Iterator[Case]:
    for rows, queries, shared in _SHARED:
        yield _attention(shape, [(queries, shared + queries)] * rows, shared)


# (sequences, tokens of each).
_DECODES = ((1, 1024), (64, 64), (64, 1024))
_PREFILLS = ((50, 40), (1, 1000))
# (sequences, queries of each, preceding tokens in common).
_SHARED = ((100, 20, 448), (64, 1, 1024))


def _attention(shape: ModelShape, lengths: list[tuple[int, int]], shared: int = 0) -> Case:
    """(queries, tokens) for each sequence, the first `shared` tokens in common blocks."""
    blocks = [-(-tokens // _BLOCK_SIZE) for _, tokens in lengths]
    k_cache, v_cache = _caches(shape, sum(blocks))
    free = torch.randperm(sum(blocks), dtype=torch.int32).split(blocks)
    table = torch.nn.utils.rnn.pad_sequence(list(free), batch_first=True)
    table[:, : shared // _BLOCK_SIZE] = table[0, : shared // _BLOCK_SIZE]
    queries = [queries for queries, _ in lengths]
    starts = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32)
    seq_lens = torch.tensor([tokens for _, tokens in lengths], dtype=torch.int32)
    q, _, _ = _qkv(shape, sum(queries))
    seen = sum(count * tokens - count * (count - 1) // 2 for count, tokens in lengths)
    distinct = sum(tokens for _, tokens in lengths) - shared * (len(lengths) - 1)
    cached = distinct * shape.num_key_value_heads * shape.head_dim
    return Case(
        f"{len(lengths)} sequences of {lengths[0][1]} tokens{f', {shared} shared' if shared else ''}",
        lambda: paged_attention(q, k_cache, v_cache, table, starts, seq_lens, shape.head_dim**-0.5),
        2 * (2 * cached + 2 * q.numel()),
        4 * seen * shape.num_attention_heads * shape.head_dim,
    )


def _latent_attention(shape: ModelShape) -> Iterator[Case]:
    """With DeepSeek's rows of 512 + 64 values, for the model's heads."""
    latent, rope = 512, 64
    heads = shape.num_attention_heads
    for lengths in ([(1, 1024)], [(1, 1024)] * 64, [(40, 40)] * 50, [(1000, 1000)]):
        blocks = [-(-tokens // _BLOCK_SIZE) for _, tokens in lengths]
        cache = torch.randn(sum(blocks), _BLOCK_SIZE, latent + rope).bfloat16()
        table = torch.nn.utils.rnn.pad_sequence(
            list(torch.randperm(sum(blocks), dtype=torch.int32).split(blocks)), batch_first=True
        )
        starts = torch.tensor([0, *itertools.accumulate(count for count, _ in lengths)], dtype=torch.int32)
        seq_lens = torch.tensor([tokens for _, tokens in lengths], dtype=torch.int32)
        q = torch.randn(int(starts[-1]), heads, latent + rope).bfloat16().split((latent, rope), dim=2)
        seen = sum(count * tokens - count * (count - 1) // 2 for count, tokens in lengths)
        yield Case(
            f"{len(lengths)} sequences of {lengths[0]}",
            partial(latent_attention, *q, cache, table, starts, seq_lens, 192**-0.5),
            2 * (int(seq_lens.sum()) * (latent + rope) + int(starts[-1]) * heads * (2 * latent + rope)),
            2 * seen * heads * (2 * latent + rope),
        )


def _token_readings(shape: ModelShape) -> Iterator[Case]:
    for rows in LOGITS_ROWS:
        logits = torch.randn(rows, shape.vocab_size)
        ids = torch.randint(0, shape.vocab_size, (rows, NUM_IDS), dtype=torch.int32)
        yield Case(
            f"{NUM_IDS} ids of {rows}x{shape.vocab_size}", partial(token_readings, logits, ids), 4 * logits.numel()
        )


def _count_above(shape: ModelShape) -> Iterator[Case]:
    for rows in LOGITS_ROWS:
        logits, values = torch.randn(rows, shape.vocab_size), torch.randn(rows, NUM_IDS)
        yield Case(
            f"{NUM_IDS} values in {rows}x{shape.vocab_size}", partial(count_above, logits, values), 4 * logits.numel()
        )


def _topk(shape: ModelShape) -> Iterator[Case]:
    for rows in LOGITS_ROWS:
        logits = torch.randn(rows, shape.vocab_size)
        label = f"{NUM_IDS} of {rows}x{shape.vocab_size}"
        yield Case(label, partial(topk, logits, NUM_IDS), 4 * logits.numel())


def _top_p(shape: ModelShape) -> Iterator[Case]:
    for rows in LOGITS_ROWS:
        source = 3 * torch.randn(rows, shape.vocab_size)
        logits, share = source.clone(), torch.full((rows,), 0.9)
        yield Case(
            f"0.9 of {rows}x{shape.vocab_size}",
            partial(keep_top_p_, logits, share),
            2 * 4 * logits.numel(),
            reset=partial(logits.copy_, source),
        )


def _keep_bits(shape: ModelShape) -> Iterator[Case]:
    for rows in LOGITS_ROWS:
        logits = torch.randn(rows, shape.vocab_size)
        mask = torch.randint(-(2**31), 2**31 - 1, (rows, -(-shape.vocab_size // 32)), dtype=torch.int32)
        yield Case(f"{rows}x{shape.vocab_size}", partial(keep_bits_, logits, mask), 2 * 4 * logits.numel())


def _gumbel_sample(shape: ModelShape) -> Iterator[Case]:
    for rows in LOGITS_ROWS:
        logits = torch.randn(rows, shape.vocab_size)
        slots = torch.arange(rows)
        arguments = (torch.ones(rows), slots * 7919, slots, slots.to(torch.int32))
        label = f"{rows}x{shape.vocab_size}"
        yield Case(label, partial(gumbel_sample, logits, *arguments), 4 * logits.numel())


def _fill_token_ids(shape: ModelShape) -> Iterator[Case]:
    lists = torch.randint(0, shape.vocab_size, (8, NUM_IDS), dtype=torch.int32)
    for rows in (64, 256):
        columns = torch.zeros(rows, 1 + NUM_IDS, dtype=torch.int32)
        slots = torch.arange(rows, dtype=torch.int32)
        counts = torch.full((rows,), NUM_IDS, dtype=torch.int32)
        yield Case(
            f"{rows}x{NUM_IDS}",
            lambda columns=columns, slots=slots, counts=counts: fill_logprob_token_ids(
                columns, 1, slots, lists, slots % 8, counts
            ),
            2 * 4 * rows * NUM_IDS,
        )


def _random(*size: int) -> Tensor:
    return torch.randn(size).bfloat16()


def _qkv(shape: ModelShape, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as views of one product's rows, as in the models."""
    counts = [shape.num_attention_heads, shape.num_key_value_heads, shape.num_key_value_heads]
    q, k, v = _random(rows, sum(counts), shape.head_dim).split(counts, dim=1)
    return q, k, v


def _caches(shape: ModelShape, num_blocks: int) -> tuple[Tensor, Tensor]:
    size = kv_cache_shape(num_blocks, _BLOCK_SIZE, shape.num_key_value_heads, shape.head_dim)
    return _random(*size), _random(*size)


_CASES = (
    _linear, _linear_int8, _linear_quantized, _packed_rows, _rms_norm, _fused_add_rms_norm, _rotary, _embedding,
    _gate_and_mul, _write_cache, _rotary_and_cache, _attention_prefill, _attention_decode, _attention_shared,
    _latent_attention, _token_readings, _count_above, _topk, _top_p, _keep_bits, _gumbel_sample, _fill_token_ids,
)  # fmt: skip
KERNELS: dict[str, Callable[[ModelShape], Iterator[Case]]] = {each.__name__.removeprefix("_"): each for each in _CASES}


def _of_states(kernel: str, shape: ModelShape) -> Iterator[Case]:
    return (Case(*call) for call in state_calls(kernel, shape.num_attention_heads))


KERNELS |= {
    each: partial(_of_states, each)
    for each in (
        "short_conv",
        "gated_delta_rule",
        "state_space_scan",
        "selective_scan",
        "gated_recurrence",
        "wkv",
        "mlstm",
        "gated_rms_norm",
    )
}
