"""experts: every kind of weight, activation and routing against a loop in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from backends import DTYPES, assert_accurate, chosen, strided
from layouts import LEVELS
from packed_experts import put_expert
from torch import Tensor

from vllm.layers.linear_method import FP8, INT4, INT8, UNQUANTIZED, LinearMethod
from vllm.ops.experts import ExpertActivation, PackedExperts, experts

SILU = ExpertActivation()
GPT_OSS = ExpertActivation(limit=1.0, slope=1.702, offset=1.0)
CLAMPED = ExpertActivation(limit=0.75)
ACTIVATIONS = {
    "silu": SILU,
    "gpt-oss": GPT_OSS,
    "clamped": CLAMPED,
    "gelu": ExpertActivation("gelu"),
    "gelu_tanh": ExpertActivation("gelu_tanh"),
    "relu2, no gate": ExpertActivation("relu2", gated=False),
    "silu, no gate": ExpertActivation(gated=False),
    "gelu, no gate": ExpertActivation("gelu", gated=False),
}

# A width that is no multiple of a panel's 32, or of the 16 of its gate; inputs that are none of a run's 16.
EXPERTS, HIDDEN, INNER = 6, 70, 40


@dataclass
class Mixture:
    """Random experts, as plain weights [N, K] and biases, and packed."""

    plain: list[list[tuple[Tensor, Tensor | None]]]
    first: PackedExperts
    second: PackedExperts


def mixture(
    dtype: torch.dtype = torch.float32,
    gated: bool = True,
    bias: bool = False,
    method: LinearMethod = UNQUANTIZED,
    num_experts: int = EXPERTS,
    hidden: int = HIDDEN,
    inner: int = INNER,
) -> Mixture:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) / shape[-1] ** 0.5).to(dtype)

    made = Mixture([[], []], PackedExperts.empty(num_experts, gated), PackedExperts.empty(num_experts))
    shapes = ((2 if gated else 1) * inner, hidden), (hidden, inner)
    for packed, plain, (rows, columns) in zip((made.first, made.second), made.plain, shapes, strict=True):
        for index in range(num_experts):
            weight, own_bias = random(rows, columns), random(rows) if bias else None
            plain.append((weight, own_bias))
            put_expert(packed, index, [weight.clone()], None if own_bias is None else own_bias.clone(), method)
    return made


def inputs(
    tokens: int, top_k: int, dtype: torch.dtype = torch.float32, num_experts: int = EXPERTS, hidden: int = HIDDEN
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their experts, none twice, and weights, some of which are negative."""
    torch.manual_seed(tokens)
    ids = torch.rand(tokens, num_experts).topk(top_k).indices.int()
    return strided(torch.randn(tokens, hidden)).to(dtype), ids, torch.randn(tokens, top_k)


def activated(activation: ExpertActivation, inner: Tensor) -> Tensor:
    """By the definition, in the dtype of `inner`."""
    gate, up = inner.chunk(2, -1) if activation.gated else (inner, None)
    if activation.limit is not None and up is not None:
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
    curves: dict[str, Callable[[Tensor], Tensor]] = {
        "silu": lambda x: x * torch.sigmoid(x * activation.slope),
        "gelu": F.gelu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "relu2": lambda x: F.relu(x) ** 2,
    }
    curve = curves[activation.curve](gate)
    return curve if up is None else curve * (up + activation.offset)


def loop(
    made: Mixture,
    hidden: Tensor,
    ids: Tensor,
    weights: Tensor,
    activation: ExpertActivation = SILU,
    dtype: torch.dtype = torch.float64,
    weigh_inputs: bool = False,
) -> Tensor:
    """Token by token, all of it in `dtype`."""
    out = torch.zeros(hidden.shape, dtype=dtype)
    first, second = (
        [(weight.to(dtype), None if bias is None else bias.to(dtype)) for weight, bias in plain] for plain in made.plain
    )
    for token, row in enumerate(hidden.to(dtype)):
        for expert, weight in zip(ids[token].tolist(), weights[token].to(dtype), strict=True):
            x = (row * weight).to(hidden.dtype).to(dtype) if weigh_inputs else row
            inner = F.linear(x, *first[expert])
            result = F.linear(activated(activation, inner), *second[expert])
            out[token] += result if weigh_inputs else weight * result
    return out


def assert_near(backend: str, got: Tensor, truth: Tensor, plain: Tensor) -> None:
    """Values between the products are rounded in any computation in that dtype: no further off than a plain one."""
    if got.dtype == torch.float32:
        assert_accurate(backend, got, truth, slack=1e-5)
        return
    assert not got.isnan().any()
    if len(truth):
        error, plain_error = ((each.double() - truth).abs().max().item() for each in (got, plain))
        assert error <= plain_error + torch.finfo(got.dtype).eps / 2 * truth.abs().max().item()


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_activations(backend: str, dtype: torch.dtype, name: str, bias: bool) -> None:
    activation = ACTIVATIONS[name]
    hidden, ids, weights = inputs(9, 2, dtype)
    with chosen(backend):
        made = mixture(dtype, activation.gated, bias)
        got = experts(hidden, ids, weights, made.first, made.second, activation)
    assert got.dtype == dtype and got.is_contiguous()
    truth, plain = (loop(made, hidden, ids, weights, activation, each) for each in (torch.float64, dtype))
    assert_near(backend, got, truth, plain)


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 33, 130])
@pytest.mark.parametrize("top_k", [1, 3, EXPERTS])
def test_numbers_of_tokens_and_experts(backend: str, dtype: torch.dtype, tokens: int, top_k: int) -> None:
    hidden, ids, weights = inputs(tokens, top_k, dtype)
    with chosen(backend):
        made = mixture(dtype)
        got = experts(hidden, ids, weights, made.first, made.second, SILU)
    truth, plain = (loop(made, hidden, ids, weights, dtype=each) for each in (torch.float64, dtype))
    assert_near(backend, got, truth, plain)


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("spread", ["one", "few", "ragged"])
def test_experts_that_no_token_chooses(backend: str, spread: str) -> None:
    """All tokens at one expert, at two of them, and as many as 64 to 1."""
    hidden, ids, weights = inputs(127, 1)
    ids[:, 0] = {
        "one": torch.full((127,), EXPERTS - 1),
        "few": torch.arange(127) % 2 * 3 + 1,
        "ragged": (torch.arange(1, 128).float().log2()).int(),
    }[spread] % EXPERTS
    with chosen(backend):
        made = mixture()
        got = experts(hidden, ids.long(), weights, made.first, made.second, SILU)
    assert_accurate(backend, got, loop(made, hidden, ids, weights), slack=1e-5)


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weighed_inputs(backend: str, dtype: torch.dtype) -> None:
    hidden, ids, weights = inputs(20, 2, dtype)
    with chosen(backend):
        made = mixture(dtype)
        got = experts(hidden, ids, weights, made.first, made.second, SILU, weigh_inputs=True)
    truth, plain = (loop(made, hidden, ids, weights, dtype=each, weigh_inputs=True) for each in (torch.float64, dtype))
    assert_near(backend, got, truth, plain)


def taken(whole: PackedExperts, start: int, end: int) -> PackedExperts:
    """The experts of one rank."""
    own = PackedExperts.empty(end - start, whole.gated)
    for index in range(start, end):
        own.put(index - start, whole.packed[index], whole.applies[index])
    return own


@pytest.mark.parametrize("backend", LEVELS)
def test_the_ranks_results_add_up(backend: str) -> None:
    hidden, ids, weights = inputs(40, 3)
    with chosen(backend):
        made, total = mixture(), torch.zeros_like(hidden)
        for start in (0, 2):
            parts = [taken(each, start, start + 2 if start == 0 else EXPERTS) for each in (made.first, made.second)]
            total += experts(hidden, ids, weights, *parts, SILU, first_expert=start)
    assert_accurate(backend, total, loop(made, hidden, ids, weights), slack=1e-5)


@pytest.mark.parametrize("backend", LEVELS)
def test_a_row_with_nan_harms_no_other(backend: str) -> None:
    hidden, ids, weights = inputs(33, 2)
    with chosen(backend):
        made = mixture()
        clean = experts(hidden, ids, weights, made.first, made.second, SILU)
        hidden[7, 3], hidden[20, 0] = float("nan"), float("inf")
        got = experts(hidden, ids, weights, made.first, made.second, SILU)
    others = torch.tensor([row not in (7, 20) for row in range(33)])
    assert torch.equal(got[others], clean[others])
    assert got[7].isnan().all() and not got[20].isfinite().any()


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize("method", [INT8, INT4, FP8], ids=["int8", "int4", "fp8"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_that_are_rounded_when_loaded(backend: str, method: LinearMethod, dtype: torch.dtype) -> None:
    """The result equals the products by these methods, one after the other."""
    hidden, ids, weights = inputs(30, 2, dtype, hidden=128)
    with chosen(backend):
        made = mixture(dtype, method=method, hidden=128, inner=64)
        assert backend == "reference" or made.first.handle is not None
        got = experts(hidden, ids, weights, made.first, made.second, GPT_OSS)
        truth = torch.zeros(hidden.shape, dtype=torch.float64)
        for token, chosen_ids in enumerate(ids.tolist()):
            for place, expert in enumerate(chosen_ids):
                inner = GPT_OSS(made.first.multiply(expert, hidden[token, None])).to(dtype)
                truth[token] += weights[token, place].double() * made.second.multiply(expert, inner)[0].double()
    scale = truth.abs().max()
    torch.testing.assert_close(got.double(), truth, rtol=torch.finfo(dtype).eps, atol=2e-5 * scale)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"curve": "mish"}, "curve must be one of"),
        ({"curve": "gelu", "slope": 2.0}, "slope is of"),
        ({"gated": False, "limit": 7.0}, "need a gate"),
        ({"gated": False, "offset": 1.0}, "need a gate"),
    ],
)
def test_activations_that_there_are_not(fields: dict, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ExpertActivation(**fields)
