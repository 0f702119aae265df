"""keep_top_p_ keeps the nucleus, its order of equals included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from backends import backends, run, strided

from vllm.ops.top_p import keep_top_p_

BACKENDS = backends("keep_top_p_")
# Sums in another order move the border by this much of the probability.
SLACK = 1e-6


def assert_nucleus(got: torch.Tensor, logits: torch.Tensor, top_p: torch.Tensor) -> None:
    for row in range(len(logits)):
        x = logits[row].double().numpy()
        kept = ~np.isneginf(got[row].numpy())
        assert (got[row].numpy()[kept] == logits[row].numpy()[kept]).all(), "a value changed"
        order = np.lexsort((np.arange(len(x)), -x))
        probs = np.exp(x[order] - x.max())
        probs /= probs.sum()
        before = np.concatenate([[0.0], np.cumsum(probs)[:-1]])
        share = top_p[row].double().item()
        possible = ~np.isneginf(x[order])
        must_stay = possible & ((before < share - SLACK) | (share >= 1))
        must_stay[0] = possible[0]
        may_stay = possible & ((before < share + SLACK) | (share >= 1))
        may_stay[0] = possible[0]
        assert kept[order][must_stay].all()
        assert not kept[order][~may_stay].any()
        # No gap: what stays is a beginning of the order.
        assert not np.diff(kept[order].astype(int)).max(initial=0) > 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0, 300.0])
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(0, 5), (1, 1), (3, 7), (2, 63), (2, 4097), (6, 50257)])
def test_shapes_and_peakedness(backend: str, scale: float, num_rows: int, vocab_size: int) -> None:
    if backend == "triton" and vocab_size > 5000:
        # The interpreter is slow.
        num_rows, vocab_size = (2, vocab_size) if scale == 1.0 else (1, 9001)
    torch.manual_seed(vocab_size)
    logits = torch.randn(num_rows, vocab_size) * scale
    top_p = torch.tensor([0.9, 1e-7, 0.5, 1.0, 0.999999, 0.05])[:num_rows]
    got = strided(logits.clone())
    run(backend, keep_top_p_, got, top_p)
    assert_nucleus(got, logits, top_p)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_ties_and_infinities(backend: str, share: float) -> None:
    torch.manual_seed(0)
    logits = torch.randint(-2, 3, (6, 3001)).float()
    logits[1].masked_fill_(torch.rand(3001) < 0.999, -torch.inf)
    logits[2] = 1.5  # all equal: the lower ids stay
    logits[3] = -torch.inf
    logits[3, 2900] = -7.0
    logits[4] = torch.where(torch.rand(3001) < 0.5, -0.0, 0.0)
    logits[5] = -200.0
    logits[5, 11] = 0.0  # the others have no mass in float32
    top_p = torch.full((6,), share)
    got = logits.clone()
    run(backend, keep_top_p_, got, top_p)
    assert_nucleus(got, logits, top_p)
    assert (got[2] > -torch.inf).sum() == int(np.ceil(3001 * top_p[0].double().item()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_unsound_rows_harm_no_others(backend: str) -> None:
    torch.manual_seed(1)
    logits = torch.randn(5, 5000)
    logits[0, 77] = torch.nan
    logits[1, 3] = torch.inf
    logits[2] = -torch.inf
    logits[3] = torch.nan
    top_p = torch.full((5,), 0.7)
    got = logits.clone()
    run(backend, keep_top_p_, got, top_p)
    assert_nucleus(got[4:], logits[4:], top_p[4:])


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="logits must be float32"):
        keep_top_p_(torch.zeros(2, 5, dtype=torch.float64), torch.ones(2))
    with pytest.raises(ValueError, match=r"top_p must be float32 \[2\]"):
        keep_top_p_(torch.zeros(2, 5), torch.ones(3))
