"""Top-k, top-p and min-p cut a row in a way that does not depend on the rows beside it."""

from __future__ import annotations

import hypothesis.strategies as st
import torch
from hypothesis import given, settings

from vllm.v1.worker.gpu.sample.sampler import apply_min_p, apply_top_k

V = 301


def rows_of(draw: st.DrawFn, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return torch.randint(9, (count, V), generator=generator).float() / 7


@st.composite
def truncated_rows(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows whose top_p is the share of their most likely tokens: rounding decides where the nucleus ends."""
    logits = rows_of(draw, draw(st.integers(2, 5)))
    top_k, top_p = [], []
    for row in logits.double().sort(descending=True).values:
        top_k.append(draw(st.integers(1, V - 1)))
        shares = row[: top_k[-1]].exp().cumsum(0)
        top_p.append(float(shares[draw(st.integers(0, top_k[-1] - 1))] / shares[-1]))
    return logits, torch.tensor(top_k, dtype=torch.int32), torch.tensor(top_p, dtype=torch.float32)


@settings(max_examples=200, deadline=None)
@given(truncated_rows())
def test_top_k_and_the_nucleus_within(case: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    logits, top_k, top_p = case
    together = logits.clone()
    apply_top_k(together, top_k, int(top_k.max()), top_p)
    for row in range(len(logits)):
        alone = logits[row : row + 1].clone()
        apply_top_k(alone, top_k[row : row + 1], int(top_k[row]), top_p[row : row + 1])
        assert torch.equal(alone[0], together[row])


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_min_p(data: st.DataObject) -> None:
    logits = data.draw(st.composite(rows_of)(9))
    log_min_p = -torch.randint(5, (9,), generator=torch.Generator().manual_seed(0)) / 4
    together = logits.clone()
    apply_min_p(together, log_min_p)
    for row in range(len(logits)):
        alone = logits[row : row + 1].clone()
        apply_min_p(alone, log_min_p[row : row + 1])
        assert torch.equal(alone[0], together[row])
