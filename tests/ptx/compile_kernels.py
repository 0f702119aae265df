"""Compile every Triton kernel, as its wrapper launches it, to cubins; print one JSON line a kernel.

Run as a program: Triton must not interpret here, and needs no device. A stand-in driver names the target, and
each launch becomes a compilation, so types, constants and alignments are those of real calls.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import triton
from ptx_launches import KEPT, compiling_to_ptx, pretend_capability
from state_calls import state_calls
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend, get_ptxas
from triton.runtime.jit import JITFunction

from vllm.ops._dispatch import force
from vllm.ops.add_lora import add_lora_, add_lora_embedding_
from vllm.ops.block_copies import block_parts, copy_blocks_
from vllm.ops.choose_experts import ExpertChoice, choose_experts
from vllm.ops.count_above import count_above
from vllm.ops.experts import ExpertActivation, PackedExperts, experts
from vllm.ops.fill_token_ids import fill_logprob_token_ids
from vllm.ops.gate_and_mul import ACTIVATIONS, gate_and_mul
from vllm.ops.gumbel_sample import gumbel_sample
from vllm.ops.invariant_linear import invariant_linear
from vllm.ops.kv_cache import kv_rows_shape, reshape_and_cache_
from vllm.ops.latent_attention import latent_attention, write_latent_
from vllm.ops.layer_norm import fused_add_layer_norm_, layer_norm
from vllm.ops.linear_readings import linear_readings
from vllm.ops.packed_linear import pack_linear, packed_linear
from vllm.ops.paged_attention import paged_attention
from vllm.ops.quantized_linear import concatenate, pack_quantized, quantized_linear
from vllm.ops.quantized_tensor import QuantizedTensor
from vllm.ops.rms_norm import fused_add_rms_norm_, rms_norm
from vllm.ops.rotary import rotary_and_cache_, rotary_embedding_
from vllm.ops.token_bitmask import keep_bits_
from vllm.ops.token_readings import token_readings
from vllm.ops.top_p import keep_top_p_
from vllm.ops.topk import topk
from vllm.ops.triton import descriptors

CAPABILITIES = (75, 80, 90, 100)

# Compiling itself stops before it.
_make_cubin = CUDABackend.make_cubin


def _int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def _product_calls(capability: int) -> Iterator[Callable[[], Any]]:
    """Calls of kernels with matrix products, which each generation has its own units for."""
    half = torch.bfloat16 if capability >= 80 else torch.float16
    # These are left to PyTorch on Turing.
    if capability >= 80:
        yield from _linear_readings_calls(half, capability)
        quantized = list(_quantized_calls(half))
        # Few rows and many of integers, 3 bits, and 8-bit floats; all formats where they take the most registers.
        yield from (*quantized[:3], quantized[-1]) if capability == 90 else quantized
        yield from _invariant_calls(half)
        yield from _experts_calls(half)
        # Integers everywhere; on the oldest and the newest also of the formats that take the most registers.
        gptq, *_, q6_k, _, floats = _weights(512)
        yield from _quantized_experts_calls(half, [gptq] if capability == 90 else [gptq, q6_k, floats])
    yield from _attention_calls(half, 32, 8, 128)
    yield from _latent_calls(half)
    yield from _lora_calls(half)
    # float32 needs no tensor cores, so it is much the same on every generation, and the slowest to compile.
    if capability == 80:
        yield from _attention_calls(torch.float32, 32, 8, 128)
        yield from _latent_calls(torch.float32)
        yield from _invariant_calls(torch.float32)
        yield from _experts_calls(torch.float32)
        yield from _lora_calls(torch.float32)


def _lora_calls(dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    """Calls for a query, key and value, and an embedding, of two adapters."""
    out, b, vectors = torch.empty(8, 1536, dtype=dtype), torch.empty(2, 16, 1536, dtype=dtype), torch.empty(2, 1536)
    rows, wide = (_int32(8), _int32(3)), torch.empty(2, 3, 1024, 16, dtype=dtype)
    parts = _int32(2, 3), torch.empty(2, 3), _int32(4)
    yield lambda: add_lora_(out, torch.empty(8, 1024, dtype=dtype), *rows, wide, b, *parts)
    yield lambda: add_lora_(out, torch.empty(8, 1024, dtype=dtype), *rows, wide, b, *parts, vectors, vectors)
    one = _int32(2, 1), torch.empty(2, 1), _int32(2)
    yield lambda: add_lora_embedding_(out, _int32(8), *rows, wide[:, :1].contiguous(), b, *one)


def _linear_readings_calls(dtype: torch.dtype, capability: int) -> Iterator[Callable[[], Any]]:
    """A small and a large hidden size; with the kernel that is taken where descriptors cannot be."""

    def without_descriptors(*args: torch.Tensor) -> None:
        with mock.patch.object(descriptors, "are_fetched", lambda: False):
            linear_readings(*args)

    for size in (1024, 4096) if capability == 90 else (1024,):
        args = torch.empty(300, size, dtype=dtype), torch.empty(49152, size, dtype=dtype), _int32(300, 5)
        yield lambda args=args: linear_readings(*args)
        yield lambda args=args: without_descriptors(*args)


def _invariant_calls(dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    yield lambda: invariant_linear(torch.empty(8, 1024, dtype=dtype), torch.empty(512, 1024, dtype=dtype))


def _experts_calls(dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    """Calls of Qwen3-MoE's experts, and of gpt-oss': with biases and what they do to gates."""
    hidden, ids, weights = torch.empty(8, 512, dtype=dtype), _int32(8, 4), torch.empty(8, 4)
    for activation, bias in ((ExpertActivation(), None), (ExpertActivation(limit=7.0, slope=1.702, offset=1.0), True)):
        packed = PackedExperts.empty(16, gated=True), PackedExperts.empty(16)
        for each, shape in zip(packed, ((512, 512), (512, 256)), strict=True):
            own_bias = None if bias is None else torch.empty(shape[0], dtype=dtype)
            for index in range(16):
                each.put(index, pack_linear(torch.empty(shape, dtype=dtype), own_bias), packed_linear)
        yield lambda packed=packed, activation=activation: experts(hidden, ids, weights, *packed, activation)


def _choice_calls() -> Iterator[Callable[[], Any]]:
    """Calls of Qwen3-MoE's router, and of DeepSeek V3's: by groups, with a correction."""
    yield lambda: choose_experts(torch.empty(8, 128), ExpertChoice(8, renormalised=True))
    grouped = ExpertChoice(8, "sigmoid", num_groups=8, num_groups_kept=4, group_best=2, renormalised=True)
    yield lambda: choose_experts(torch.empty(8, 256), grouped, torch.empty(256))


def _other_calls(capability: int) -> Iterator[Callable[[], Any]]:
    yield from _choice_calls()
    half = torch.bfloat16 if capability >= 80 else torch.float16
    # Qwen3-Next's heads.
    yield from (call for _, call in state_calls(half, 2, 128, 128))
    for dtype in (torch.float32, half) if capability == 80 else (half,):
        logits = torch.empty(4, 49152, dtype=dtype)
        yield lambda x=logits: token_readings(x, _int32(4, 20), _int32(4))
        yield lambda x=logits: token_readings(x, _int32(4, 20), _int32(4), entropy=True)
        yield lambda x=logits: count_above(x, torch.empty(4, 20), _int32(4))
        x, weight = torch.empty(8, 4096, dtype=dtype), torch.empty(4096, dtype=dtype)
        yield lambda x=x, weight=weight: fused_add_rms_norm_(x, x.clone(), weight, 1e-5)
        yield lambda x=x, weight=weight: fused_add_layer_norm_(x, x.clone(), weight, weight, 1e-5)
    # An odd vocabulary: rows that are not aligned.
    logits = torch.empty(4, 50257, dtype=half)
    yield lambda: token_readings(logits, _int32(4, 0))
    yield lambda: token_readings(logits, _int32(4, 100))
    yield lambda: token_readings(logits, _int32(4, 100), entropy=True)
    yield lambda: count_above(logits, torch.empty(4, 1))
    yield lambda: topk(logits, 20)
    yield lambda: keep_top_p_(logits.float(), torch.ones(4))
    yield lambda: keep_bits_(logits.float(), _int32(4, 1571))
    yield lambda: keep_bits_(logits.float(), _int32(2, 1600), 7, torch.zeros(2, dtype=torch.int64))
    yield lambda: rms_norm(x, weight, 1e-5)
    yield lambda: rms_norm(x.view(8, 32, 128), weight[:128], 1e-5)
    yield lambda: layer_norm(x, None, None, 1e-5)
    yield lambda: layer_norm(x.view(8, 32, 128), weight.view(32, 128), None, 1e-5)
    for activation in ACTIVATIONS:
        yield lambda activation=activation: gate_and_mul(x, activation)
    yield from _cache_calls(half, 32, 8, 128)
    slots = torch.zeros(4, dtype=torch.int64)
    yield lambda: gumbel_sample(logits.float(), torch.ones(8), slots, slots, _int32(4))
    yield lambda: gumbel_sample(logits.float(), torch.ones(8), slots, slots, _int32(4), first_id=50257)
    rows = block_parts(list(logits[:, :50256]))
    yield lambda: copy_blocks_(slots, slots, rows, rows)
    yield lambda: fill_logprob_token_ids(_int32(4, 21), 1, slots, _int32(9, 32), _int32(8), _int32(8))


def _weights(inner: int) -> list[QuantizedTensor]:
    """Weights of 128 columns: GPTQ's, those of 3 bits, MXFP4's, Q6_K's, Q4_K's and 8-bit floats."""
    codes, ones, groups = torch.zeros(128, inner, dtype=torch.uint8), torch.ones(128, 1), torch.ones(128, inner // 32)
    sub = groups.to(torch.uint8)
    gptq = QuantizedTensor(codes, 4, groups[:, ::4].half(), 128, zero_points=sub[:, ::4])
    sixteenths = torch.ones(128, inner // 16).to(torch.int8)
    return [
        gptq,
        replace(gptq, bits=3),
        QuantizedTensor(codes, 4, sub.view(torch.float8_e8m0fnu), 32, values=torch.zeros(16)),
        QuantizedTensor(codes, 6, sixteenths, 16, zero_points=32, super_scales=ones.half()),
        QuantizedTensor(codes, 4, sub, 32, offsets=sub, super_scales=ones.half(), super_offsets=ones.half()),
        QuantizedTensor(codes.to(torch.float8_e4m3fn), 8, ones, inner),
    ]


def _quantized_experts_calls(dtype: torch.dtype, weights: Sequence[QuantizedTensor]) -> Iterator[Callable[[], Any]]:
    """Both products of 16 experts, of whose rows each is a gate or what it is multiplied with."""
    hidden, ids, token_weights = torch.empty(8, 512, dtype=dtype), _int32(8, 4), torch.empty(8, 4)
    for weight in weights:
        down = concatenate([weight.take_columns(0, 128)] * 4) if weight.group_size < 512 else _weights(128)[-1]

        def run(first: QuantizedTensor = weight, second: QuantizedTensor = down) -> Any:
            packed = PackedExperts.empty(16, gated=True), PackedExperts.empty(16)
            for each, own in zip(packed, (concatenate([first, first]), second), strict=True):
                for index in range(16):
                    each.put(index, pack_quantized(own, torch.empty(own.shape[0], dtype=dtype)), quantized_linear)
            return experts(hidden, ids, token_weights, *packed, ExpertActivation())

        yield run


def _quantized_calls(dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    """Few rows times GPTQ's weights, and many times all."""
    weights = _weights(1024)
    for rows, weight in [(1, weights[0]), *((100, weight) for weight in weights)]:
        x = torch.empty(rows, 1024, dtype=dtype)
        yield lambda x=x, weight=weight: quantized_linear(x, pack_quantized(weight, None))


def _attention_calls(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> Iterator[Callable[[], Any]]:
    """Contexts that may be split, and requests of several queries: plain, and with all that takes registers."""
    q = torch.empty(8, heads, head_dim, dtype=dtype)
    caches = [torch.empty(kv_rows_shape(64, 16, kv_heads, head_dim), dtype=dtype) for _ in range(2)]
    yield lambda: paged_attention(q, *caches, _int32(2, 64), _int32(3), _int32(2), 0.125)
    if dtype != torch.float32:
        codes = [cache.to(torch.float8_e4m3fn) for cache in caches]
        of_heads = torch.empty(heads), torch.empty(heads)
        arguments = _int32(2, 64), _int32(3), _int32(2), 0.125, None, None, None, 128, 30.0, *of_heads
        yield lambda: paged_attention(q, *codes, *arguments)
    if head_dim == 128 and dtype == torch.bfloat16:
        yield lambda: paged_attention(q, *caches, _int32(2, 64), _int32(3), _int32(2), 0.125, chunk=8192)


def _latent_calls(dtype: torch.dtype) -> Iterator[Callable[[], Any]]:
    """DeepSeek's rows, plain and of 8 bits, written and read; on Turing PyTorch reads them."""
    parts = 512, 64
    q = torch.empty(8, 32, sum(parts), dtype=dtype).split(parts, dim=2)
    rows, slots = torch.empty(8, sum(parts), dtype=dtype).split(parts, dim=1), torch.zeros(8, dtype=torch.int64)
    for kind in (dtype, torch.float8_e4m3fn) if dtype != torch.float32 else (dtype,):
        cache = torch.empty(64, 16, sum(parts)).to(kind)
        yield lambda cache=cache: write_latent_(*rows, cache, slots)
        yield lambda cache=cache: latent_attention(*q, cache, _int32(2, 64), _int32(3), _int32(2), 0.125)


def _cache_calls(dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int) -> Iterator[Callable[[], Any]]:
    q, k, v = torch.empty(8, heads + 2 * kv_heads, head_dim, dtype=dtype).split([heads, kv_heads, kv_heads], dim=1)
    table, positions = torch.empty(64, head_dim), torch.zeros(8, dtype=torch.int64)
    yield lambda: rotary_embedding_(positions, q, k, table)
    for kind in (dtype, torch.float8_e4m3fn):
        caches = [torch.empty(kv_rows_shape(64, 16, kv_heads, head_dim)).to(kind) for _ in range(2)]
        yield lambda caches=caches: reshape_and_cache_(k, v, *caches, positions)
        yield lambda caches=caches: rotary_and_cache_(positions, q, k, v, table, *caches, positions)


def _assemble(kernel: str, compiled: Any, capability: int) -> dict[str, Any]:
    """A report on what was compiled for this generation or an earlier one, assembled for this one."""
    source, options = compiled.asm["ptx"], compiled.metadata
    versions = triton.__version__, get_ptxas(capability).version
    made_of = "\0".join((*versions, str(capability), str(options.enable_fp_fusion), source))
    kept = KEPT / f"{hashlib.sha256(made_of.encode()).hexdigest()}.json"
    if kept.exists():
        return json.loads(kept.read_text())
    log = io.StringIO()
    with contextlib.redirect_stdout(log):
        cubin = _make_cubin(CUDABackend(GPUTarget("cuda", capability, 32)), source, {}, options, capability)
    found = re.search(r"(\d+) bytes spill stores.*?Used (\d+) registers", log.getvalue(), re.DOTALL)
    assert found, f"the assembler's log says nothing of spills: {log.getvalue()}"
    report = {
        "kernel": kernel,
        "capability": capability,
        "spilled_bytes": int(found[1]),
        "registers": int(found[2]),
        "shared_bytes": compiled.metadata.shared,
        "num_warps": compiled.metadata.num_warps,
        "cubin_bytes": len(cubin),
        "fetches_tiles": "cp.async.bulk.tensor" in source,
    }
    # Whole, whoever reads it meanwhile.
    written = kept.with_suffix(f".{os.getpid()}")
    written.write_text(json.dumps(report))
    written.replace(kept)
    return report


def _compile(
    capability: int, calls: Iterable[Callable[[], Any]], later: Sequence[int] = ()
) -> Iterator[dict[str, Any]]:
    """A report on each kernel that the calls launch on a device of this capability, each variant once; and on the same
    assembled for the capabilities `later`."""
    pretend_capability(capability)
    found: dict[str, tuple[str, Any]] = {}

    def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        compiled = run(kernel, *args, grid=grid, warmup=True, **kwargs)
        found[compiled.hash] = kernel.__name__, compiled

    run, JITFunction.run = JITFunction.run, compile_only
    try:
        with force("triton"):
            for call in calls:
                call()
    finally:
        JITFunction.run = run
    for kernel, compiled in found.values():
        for each in (capability, *later):
            yield _assemble(kernel, compiled, each)


def main() -> None:
    """Compile for all capabilities and print the reports."""
    triton.knobs.nvidia.dump_ptxas_log = True
    KEPT.mkdir(parents=True, exist_ok=True)
    with compiling_to_ptx():
        for capability in CAPABILITIES:
            for report in _compile(capability, _product_calls(capability)):
                print(json.dumps(report), flush=True)
        # Without products what is compiled is the same from Ampere on.
        for capability, later in ((75, ()), (80, (90, 100))):
            for report in _compile(capability, _other_calls(capability), later):
                print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main()
