"""experts by Triton: in the interpreter, or compiled where there is a device. And without waiting for the choice."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from backends import DTYPES, assert_accurate, chosen
from packed_experts import put_expert
from test_experts import ACTIVATIONS, EXPERTS, GPT_OSS, SILU, Mixture, assert_near, inputs, loop, mixture, taken
from test_quantized_linear import EACH_KIND, float8_weight, random_weight
from test_quantized_linear_triton import on_device
from torch import Tensor

from vllm.layers.linear_method import INT8, UNQUANTIZED
from vllm.ops import experts as module
from vllm.ops.experts import ExpertActivation, PackedExperts, experts, takes_all_experts
from vllm.ops.triton.experts import can_multiply
from vllm.quantization.weight import QuantizedWeight

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TRITON = pytest.mark.parametrize("backend", ["triton"])


def there(packed: PackedExperts) -> PackedExperts:
    """On the device of the kernels."""
    for each in packed.packed:
        each.weight = each.weight.to(DEVICE)
        each.bias = None if each.bias is None else each.bias.to(DEVICE)
    return packed


def run(made: Mixture, parts: tuple[Tensor, ...], activation: ExpertActivation = SILU, **options: Any) -> Tensor:
    packed = there(made.first), there(made.second)
    moved = [each.to(DEVICE) for each in parts]
    assert takes_all_experts(moved[0], *packed, activation)
    hidden, ids, weights = moved
    return experts(hidden, ids, weights, *packed, activation, **options).cpu()


def assert_same(got: Tensor, expected: Tensor) -> None:
    """To the bit; the interpreter's products are NumPy's, whose sums follow the place of a row."""
    if DEVICE.type == "cuda":
        assert torch.equal(got, expected)
    else:
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=2e-6)


@TRITON
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(backend: str, name: str) -> None:
    activation = ACTIVATIONS[name]
    parts = inputs(9, 2)
    with chosen(backend):
        made = mixture(gated=activation.gated, bias=True)
        got = run(made, parts, activation)
    assert_accurate(backend, got, loop(made, *parts, activation), slack=1e-5)


@TRITON
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (1, 1), (70, 3), (100, EXPERTS)])
def test_numbers_of_tokens_and_experts(backend: str, dtype: torch.dtype, tokens: int, top_k: int) -> None:
    parts = inputs(tokens, top_k, dtype)
    with chosen(backend):
        made = mixture(dtype)
        got = run(made, parts)
    assert got.dtype == dtype
    truth, plain = (loop(made, *parts, dtype=each) for each in (torch.float64, dtype))
    # The interpreter cuts bfloat16 off where compiled kernels round.
    assert_near(backend, got, truth, plain if DEVICE.type == "cuda" or dtype != torch.bfloat16 else 2 * plain - truth)


@TRITON
@pytest.mark.parametrize("spread", ["one", "ragged"])
def test_experts_that_no_token_chooses(backend: str, spread: str) -> None:
    hidden, ids, weights = inputs(150, 1)
    ids[:, 0] = 2 if spread == "one" else torch.arange(1, 151).float().log2().int() % EXPERTS
    parts = hidden, ids.long(), weights
    with chosen(backend):
        made = mixture()
        got = run(made, parts)
    assert_accurate(backend, got, loop(made, *parts), slack=1e-5)


@TRITON
def test_weighed_inputs(backend: str) -> None:
    parts = inputs(20, 2)
    with chosen(backend):
        made = mixture()
        got = run(made, parts, weigh_inputs=True)
    assert_accurate(backend, got, loop(made, *parts, weigh_inputs=True), slack=1e-5)


@TRITON
def test_the_ranks_results_add_up(backend: str) -> None:
    parts = inputs(40, 3)
    with chosen(backend):
        made, total = mixture(), torch.zeros(40, 70)
        for start, end in ((0, 2), (2, EXPERTS)):
            own = Mixture(made.plain, taken(made.first, start, end), taken(made.second, start, end))
            total += run(own, parts, first_expert=start)
    assert_accurate(backend, total, loop(made, *parts), slack=1e-5)


@TRITON
def test_a_token_does_not_depend_on_its_batch(backend: str) -> None:
    """Nor on NaN in another's row."""
    parts = inputs(150, 2)
    with chosen(backend):
        made = mixture()
        together = run(made, parts)
        for rows in (slice(0, 1), slice(7, 12), slice(20, 120)):
            some = tuple(each[rows].contiguous() for each in parts)
            assert_same(run(made, some), together[rows])
        parts[0][7, 3] = float("nan")
        got = run(made, parts)
    others = torch.arange(150) != 7
    assert_same(got[others], together[others])
    assert got[7].isnan().all()


@TRITON
def test_weights_that_move(backend: str) -> None:
    parts = inputs(5, 2)
    with chosen(backend):
        made = mixture()
        before = run(made, parts)
        for packed in (made.first, made.second):
            for each in packed.packed:
                each.weight.data = 2 * each.weight
        after = run(made, parts)
    doubled = [[(2 * weight, bias) for weight, bias in plain] for plain in made.plain]
    assert not torch.equal(before, after)
    assert_accurate(backend, after, loop(Mixture(doubled, made.first, made.second), *parts), slack=1e-5)


@TRITON
def test_other_weights_are_left_to_the_loop(backend: str) -> None:
    hidden, ids, weights = inputs(9, 2, hidden=128)
    with chosen(backend):
        first, second = PackedExperts.empty(EXPERTS, gated=True), PackedExperts.empty(EXPERTS)
        for index in range(EXPERTS):
            put_expert(first, index, [torch.randn(80, 128) / 10], None, INT8)
            put_expert(second, index, [torch.randn(128, 40) / 10], None, UNQUANTIZED)
        assert not can_multiply(hidden, first) and can_multiply(hidden, second)
        assert not can_multiply(hidden.half(), second)
        got = experts(hidden, ids, weights, first, second, SILU)
        assert not takes_all_experts(hidden, first, second, SILU)
        assert not takes_all_experts(hidden, second, second, SILU.__call__)
    assert got.shape == hidden.shape and not got.isnan().any()


@pytest.mark.parametrize("weigh_inputs", [False, True])
def test_all_tokens_of_each_expert(weigh_inputs: bool) -> None:
    """A CUDA graph takes weights that the kernels do not."""
    hidden, ids, weights = inputs(30, 2)
    hidden[4] = float("nan")
    with chosen("reference"):
        made = mixture(bias=True)
        arguments = hidden, ids, weights, made.first, made.second, GPT_OSS, 0, weigh_inputs
        got, expected = module._of_all_tokens(*arguments), module._by_expert(*arguments)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert got[4].isnan().all() and not got[5:].isnan().any()


FEW = 3
# Every kind of part, and of planes.
QUANTIZED = [("float8", 8), *((kind, bits) for kind, bits in EACH_KIND if bits == 4), ("zeros", 3), ("super", 6)]


def quantized_mixture(kind: str, bits: int, dtype: torch.dtype, bias: bool = False) -> Mixture:
    """A mixture in what a kind of format stores; the plain weights are what it means."""
    torch.manual_seed(3)
    made = Mixture([[], []], PackedExperts.empty(FEW, gated=True), PackedExperts.empty(FEW))
    shapes = (2 * 48, 64), (64, 48)
    for packed, plain, (rows, columns) in zip((made.first, made.second), made.plain, shapes, strict=True):
        for index in range(FEW):
            if kind == "float8":
                weight = float8_weight(rows, columns, 16, torch.float8_e4m3fn)
            else:
                weight = random_weight(rows, columns, 16, kind, bits)
            own_bias = torch.randn(rows).to(dtype) if bias else None
            plain.append((weight.dequantize(), own_bias))
            there = None if own_bias is None else own_bias.to(DEVICE)
            put_expert(packed, index, [QuantizedWeight(on_device(weight), "w")], there, UNQUANTIZED)
    return made


def small_inputs(tokens: int, dtype: torch.dtype) -> list[Tensor]:
    """Inputs whose products do not overflow; on the device."""
    hidden, ids, weights = inputs(tokens, 2, dtype, num_experts=FEW, hidden=64)
    return [each.to(DEVICE) for each in (hidden / 1024, ids, weights)]


@TRITON
@pytest.mark.parametrize(("kind", "bits"), QUANTIZED)
def test_quantized_weights(backend: str, kind: str, bits: int) -> None:
    parts = small_inputs(12, torch.float16)
    with chosen(backend), warnings.catch_warnings():
        # The interpreter's NumPy remarks on NaN, which codes beyond the last one may stand for.
        warnings.simplefilter("ignore", RuntimeWarning)
        made = quantized_mixture(kind, bits, torch.float16, bias=kind == "zeros")
        assert takes_all_experts(parts[0], made.first, made.second, SILU) == (kind != "sparse")
        if kind == "sparse":
            return
        got = experts(*parts, made.first, made.second, SILU).cpu()
    truth, plain = (loop(made, *(each.cpu() for each in parts), dtype=each) for each in (torch.float64, torch.float16))
    assert_near(backend, got, truth, plain)


@pytest.mark.parametrize("weigh_inputs", [False, True])
def test_a_token_of_quantized_weights_does_not_depend_on_its_batch(weigh_inputs: bool) -> None:
    parts = small_inputs(90, torch.bfloat16)
    with chosen("triton"):
        made = quantized_mixture("zeros", 4, torch.bfloat16, bias=True)
        together, some = (
            experts(*(each[rows] for each in parts), made.first, made.second, SILU, 0, weigh_inputs).cpu()
            for rows in (slice(None), slice(20, 23))
        )
    assert_same(some, together[20:23])
    own = [each[20:23].cpu() for each in parts]
    truth = loop(made, *own, weigh_inputs=weigh_inputs)
    torch.testing.assert_close(some.double(), truth, rtol=2e-2, atol=float(2e-2 * truth.abs().max()))


def test_quantized_weights_that_are_not_alike_are_left_to_the_loop() -> None:
    hidden = torch.randn(3, 64).half()
    with chosen("triton"):
        made, other = (quantized_mixture(kind, 4, torch.float16) for kind in ("zeros", "offsets"))
        assert can_multiply(hidden, made.first) and not can_multiply(hidden.float(), made.first)
        made.first.put(2, other.first.packed[2], other.first.applies[2])
        assert not can_multiply(hidden, made.first)
