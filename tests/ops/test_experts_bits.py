"""experts: the bits of a token's result, whatever shares its batch and however many threads there are; recordings;
every layout and format of weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from backends import DTYPES, assert_accurate, chosen
from layouts import BFLOAT16_LAYOUTS, CPP_LEVELS, LEVELS, needs_kernels
from packed_experts import put_expert
from test_experts import EXPERTS, GPT_OSS, SILU, inputs, loop, mixture
from test_quantized_linear import random_weight
from torch import Tensor

from vllm.layers.linear_method import FP8, INT4, INT8, QUANTIZED, UNQUANTIZED, LinearMethod
from vllm.ops.experts import ExpertActivation, PackedExperts, experts
from vllm.ops.quantized_linear import pack_quantized
from vllm.ops.recording import Recording

pytestmark = needs_kernels
METHODS = pytest.mark.parametrize("method", [UNQUANTIZED, INT8, INT4, FP8], ids=["plain", "int8", "int4", "fp8"])


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("backend", CPP_LEVELS)
@METHODS
@pytest.mark.parametrize("activation", [SILU, GPT_OSS], ids=["silu", "gpt-oss"])
def test_a_token_does_not_depend_on_its_batch(
    backend: str, method: LinearMethod, activation: ExpertActivation, threads: int
) -> None:
    hidden, ids, weights = inputs(300, 2, torch.bfloat16, hidden=128)
    with chosen(backend):
        made = mixture(torch.bfloat16, method=method, hidden=128, inner=64)

        def some(rows: Tensor | slice) -> Tensor:
            parts = hidden[rows], ids[rows].contiguous(), weights[rows].contiguous()
            return experts(*parts, made.first, made.second, activation)

        together = some(slice(0, 300))
        for rows in (slice(0, 1), slice(7, 12), slice(100, 164), torch.randperm(300)[:150]):
            assert torch.equal(some(rows), together[rows])
        torch.set_num_threads(3)
        assert torch.equal(some(slice(0, 300)), together)
        torch.set_num_threads(threads)


@pytest.mark.parametrize("backend", CPP_LEVELS)
def test_rows_of_8_bit_integers(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_INT8_ACTIVATIONS", "1")
    hidden, ids, weights = inputs(300, 2, torch.bfloat16, hidden=128)
    with chosen(backend):
        made = mixture(torch.bfloat16, method=INT4, hidden=128, inner=64)
        together = experts(hidden, ids, weights, made.first, made.second, SILU)
        for rows in (slice(0, 1), slice(7, 12), slice(100, 164)):
            some = hidden[rows], ids[rows].contiguous(), weights[rows].contiguous()
            assert torch.equal(experts(*some, made.first, made.second, SILU), together[rows])
        monkeypatch.setenv("VLLM_CPU_INT8_ACTIVATIONS", "0")
        made = mixture(torch.bfloat16, method=INT4, hidden=128, inner=64)
        exact = experts(hidden, ids, weights, made.first, made.second, SILU)
    assert not torch.equal(together, exact)
    # Two roundings to 8 bits, one of each product's rows.
    assert (together - exact).float().norm() < 2 / 128 * exact.float().norm()


@pytest.mark.parametrize("backend", CPP_LEVELS)
def test_tokens_that_are_taken_in_turns(backend: str) -> None:
    """The values between their products would take more memory than they may."""
    hidden, ids, weights = inputs(700, 2, num_experts=2, hidden=8)
    with chosen(backend):
        made = mixture(num_experts=2, hidden=8, inner=8192)
        got = experts(hidden, ids, weights, made.first, made.second, SILU)
        last = experts(hidden[-3:], ids[-3:], weights[-3:], made.first, made.second, SILU)
    assert torch.equal(got[-3:], last)
    truth = loop(made, hidden[-3:], ids[-3:], weights[-3:])
    assert_accurate(backend, last, truth, slack=1e-5)


@pytest.mark.parametrize("backend", CPP_LEVELS)
def test_a_replay_follows_its_inputs(backend: str) -> None:
    hidden, ids, weights = inputs(9, 2)
    others = inputs(10, 2)
    with chosen(backend):
        made = mixture()
        with Recording() as recording:
            out = experts(hidden, ids, weights, made.first, made.second, SILU)
        assert not recording.missed
        for own, other in zip((hidden, ids, weights), others, strict=True):
            own.copy_(other[:9])
        expected = experts(hidden, ids, weights, made.first, made.second, SILU)
        # The recording keeps the weights.
        del made
        recording.replay()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("backend", CPP_LEVELS)
@pytest.mark.parametrize("layout", BFLOAT16_LAYOUTS)
@pytest.mark.parametrize("tokens", [2, 90])
def test_layouts_of_bfloat16(backend: str, layout: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_GEMM", layout)
    hidden, ids, weights = inputs(tokens, 2, torch.bfloat16)
    with chosen(backend):
        made = mixture(torch.bfloat16)
        assert made.first.handle is not None and made.second.handle is not None
        got = experts(hidden, ids, weights, made.first, made.second, SILU)
    truth, plain = (loop(made, hidden, ids, weights, dtype=each) for each in (torch.float64, torch.bfloat16))
    error, plain_error = ((each.double() - truth).abs().max().item() for each in (got, plain))
    assert error <= plain_error + 2**-8 * truth.abs().max().item()


def stored_experts(kinds: list[tuple[str, int]], gated: bool, rows: int, columns: int, group: int) -> PackedExperts:
    """Experts in the formats `kinds`, in turn."""
    made = PackedExperts.empty(EXPERTS, gated)
    for index in range(EXPERTS):
        weight = random_weight(rows, columns, group, *kinds[index % len(kinds)])
        made.put(index, pack_quantized(weight, None, gated=gated), QUANTIZED.apply)
    return made


def by_products(made: tuple[PackedExperts, PackedExperts], hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """float64, of the experts' products one after the other."""
    out = torch.zeros(hidden.shape, dtype=torch.float64)
    for token, chosen_ids in enumerate(ids.tolist()):
        for place, expert in enumerate(chosen_ids):
            inner = SILU(made[0].multiply(expert, hidden[token, None])).to(hidden.dtype)
            out[token] += weights[token, place].double() * made[1].multiply(expert, inner)[0].double()
    return out


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "kinds",
    [
        *([(kind, 4)] for kind in ("zeros", "table", "tables", "super offsets", "e8m0 scales", "order", "sparse")),
        [("zero", 8)],
        [("bfloat16", 16)],
        [("zeros", 4), ("super", 6), ("float16", 16), ("sparse", 4)],
    ],
    ids=lambda kinds: ", ".join(f"{kind} {bits}" for kind, bits in kinds),
)
def test_weights_of_checkpoints(backend: str, dtype: torch.dtype, kinds: list[tuple[str, int]]) -> None:
    """Formats, of which each expert may have its own."""
    torch.manual_seed(0)
    hidden, ids, weights = inputs(40, 2, dtype, hidden=64)
    # The weights' values are large for float16.
    hidden *= 2**-7
    with chosen(backend):
        made = stored_experts(kinds, True, 80, 64, 16), stored_experts(kinds, False, 64, 40, 8)
        assert backend == "reference" or (made[0].handle and made[1].handle)
        got = experts(hidden, ids, weights, *made, SILU)
        truth = by_products(made, hidden, ids, weights)
    # Sums in another order may round what is between the products to a neighbour.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(got.double(), truth, rtol=eps, atol=max(1e-5, eps / 2) * truth.abs().max())


@pytest.mark.parametrize("backend", LEVELS)
def test_gates_in_another_format(backend: str) -> None:
    """Two products in place of one: the operation multiplies expert by expert."""
    torch.manual_seed(0)
    hidden, ids, weights = inputs(20, 2, hidden=64)
    with chosen(backend):
        first = PackedExperts.empty(EXPERTS, gated=True)
        for index in range(EXPERTS):
            parts: list[Any] = [random_weight(40, 64, 16, "zeros"), random_weight(40, 64, 32, "super", 6)]
            first.put(index, pack_quantized(parts, None, gated=True), QUANTIZED.apply)
        made = first, stored_experts([("zeros", 4)], False, 64, 40, 8)
        got = experts(hidden, ids, weights, *made, SILU)
        truth = by_products(made, hidden, ids, weights)
    torch.testing.assert_close(got.double(), truth, rtol=1e-6, atol=1e-5 * truth.abs().max())


@pytest.mark.parametrize("backend", LEVELS)
def test_a_function_between_the_products(backend: str) -> None:
    hidden, ids, weights = inputs(20, 2, torch.bfloat16)
    seen: list[torch.dtype] = []

    def gate(inner: Tensor) -> Tensor:
        seen.append(inner.dtype)
        return SILU(inner)

    with chosen(backend):
        made = mixture(torch.bfloat16)
        got = experts(hidden, ids, weights, made.first, made.second, gate)
    assert set(seen) == {torch.bfloat16}
    truth, plain = (loop(made, hidden, ids, weights, dtype=each) for each in (torch.float64, torch.bfloat16))
    assert (got.double() - truth).abs().max() <= (plain.double() - truth).abs().max() * 1.5


@pytest.mark.parametrize("backend", CPP_LEVELS)
def test_what_does_not_fit_is_named(backend: str) -> None:
    hidden, ids, weights = inputs(4, 2)
    with chosen(backend):
        made = mixture()
        packs = made.first, made.second
        with pytest.raises(ValueError, match="gated=False"):
            experts(hidden, ids, weights, *packs, ExpertActivation(gated=False))
        with pytest.raises(RuntimeError, match="hidden has a dtype"):
            experts(hidden.half(), ids, weights, *packs, SILU)
        with pytest.raises(RuntimeError, match="weights must have dtype float32"):
            experts(hidden, ids, weights.double(), *packs, SILU)
        lacking = PackedExperts.empty(2, gated=True)
        put_expert(lacking, 0, [torch.zeros(80, 70)], None, UNQUANTIZED)
        with pytest.raises(RuntimeError, match="the same experts"):
            experts(hidden, ids, weights, lacking, made.second, SILU)
        fewer = PackedExperts.empty(2)
        for index in range(2):
            put_expert(fewer, index, [torch.zeros(70, 40)], None, UNQUANTIZED)
        with pytest.raises(RuntimeError, match="an expert has no weights yet"):
            experts(hidden, ids, weights, lacking, fewer, SILU)
        with pytest.raises(ValueError, match="packed with a gate"):
            fewer.put(0, made.first.packed[0], UNQUANTIZED.apply)
