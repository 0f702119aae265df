"""take_packed_rows: the product of some outputs alone, bias included."""

from __future__ import annotations

import pytest
import torch
from backends import DTYPES, chosen
from layouts import CPP_LEVELS, LEVELS, needs_kernels
from test_packed_linear import EXACT as EXACT_DTYPES
from test_packed_linear import packed

from vllm.ops._dispatch import force
from vllm.ops.packed_linear import (
    Layout,
    PackedLinear,
    pack_as,
    pack_linear,
    packed_embedding,
    packed_linear,
    take_packed_rows,
)


@pytest.mark.parametrize("backend", LEVELS)
@pytest.mark.parametrize(("layout", "dtype"), EXACT_DTYPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_rows_are_the_columns_of_the_whole_product(
    backend: str, layout: Layout, dtype: torch.dtype, with_bias: bool
) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(130, 300).to(dtype), torch.randn(9, 300).to(dtype)
    bias = torch.randn(130).to(dtype) if with_bias else None
    rows = torch.cat([torch.randperm(130), torch.tensor([129, 0, 0])])
    with chosen(backend):
        whole = packed(backend, weight, bias, layout)
        taken = take_packed_rows(whole, rows)
        assert taken.shape == (133, 300) and taken.layout == whole.layout
        got, want = packed_linear(x, taken), packed_linear(x, whole)[:, rows]
    if whole.layout == "plain":
        # The library chooses the order of its sums by the shape: a last bit may differ.
        assert torch.allclose(got, want, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)
    else:
        assert torch.equal(got, want)


def test_another_layout_hides_its_rows() -> None:
    opaque = PackedLinear(torch.zeros(4, 3), None, "packed_fp16", (4, 3))
    with pytest.raises(ValueError, match="must have one of the layouts packed_f32, packed_bf16_dot, got 'packed_fp16'"):
        take_packed_rows(opaque, torch.tensor([1]))


@pytest.mark.parametrize("backend", CPP_LEVELS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocab", "hidden", "tokens"), [(1, 1, 1), (31, 3, 20), (300, 576, 40), (33, 8, 0)])
def test_an_embedding_reads_the_packed_head(
    backend: str, vocab: int, hidden: int, tokens: int, dtype: torch.dtype, index_dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocab, hidden, generator=generator).to(dtype)
    ids = torch.randint(0, vocab, (tokens,), generator=generator, dtype=index_dtype)
    with chosen(backend):
        head = pack_linear(weight, None, float_out=True)
        assert torch.equal(packed_embedding(ids, head), weight[ids.long()])
        if dtype == torch.bfloat16 and hidden % 2 == 0:
            laid_out = PackedLinear(pack_as(weight, "packed_bf16_dot"), None, "packed_bf16_dot", (vocab, hidden))
            assert torch.equal(packed_embedding(ids, laid_out), weight[ids.long()])


@needs_kernels
@pytest.mark.parametrize("bad", [-1, 5])
def test_an_id_outside_the_packed_head(bad: int) -> None:
    with force("cpp"), pytest.raises(RuntimeError, match=rf"rows must be in \[0, 5\), got {bad}"):
        packed_embedding(torch.tensor([0, bad]), pack_linear(torch.zeros(5, 2), None))


def test_other_layouts_hold_no_rows() -> None:
    plain = PackedLinear(torch.zeros(4, 3), None, "plain", (4, 3))
    with pytest.raises(ValueError, match="must have one of the layouts packed_f32, packed_bf16_dot, got 'plain'"):
        packed_embedding(torch.tensor([1]), plain)
