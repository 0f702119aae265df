"""Logits of chosen ids: the numbers of the full product, for every layout of the head's weight."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from memory_group import run_ranks
from torch import Tensor

from vllm.distributed.communicator import Communicator, split_vocab
from vllm.exceptions import VLLMValidationError
from vllm.layers.logits_processor_ext import LogitsProcessorWithIndexedOutput
from vllm.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.ops._dispatch import cpu_ops
from vllm.ops.packed_linear import EXACT, Layout, PackedLinear, pack_as

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Below, at and above a panel's 32 columns, and a head that no panel divides.
SHAPES = ((1, 8), (32, 16), (33, 257), (199, 64), (503, 520))
LAYOUTS: list[Layout] = ["plain"]
if cpu_ops() is not None:
    LAYOUTS += EXACT


def make_head(vocab_size: int, hidden_size: int, dtype: torch.dtype, layout: Layout, tied: bool = False) -> Any:
    """A head whose weight is packed in `layout`, and the weight."""
    weight = torch.randn(vocab_size, hidden_size, generator=torch.Generator().manual_seed(vocab_size)).to(dtype)
    embedding = VocabParallelEmbedding(vocab_size, hidden_size) if tied else None
    head = ParallelLMHead(vocab_size, hidden_size, embedding)
    (head if embedding is None else embedding).weight.data = weight.clone()
    head.process_weights_after_loading()
    head.packed = packed_as(layout, weight)
    return head, weight


def packed_as(layout: Layout, weight: Tensor) -> PackedLinear:
    packed = weight if layout == "plain" else pack_as(weight, layout)
    return PackedLinear(packed, None, layout, tuple(weight.shape))


def some_indices(vocab_size: int) -> list[int]:
    """Both ends, a panel's last and first column, and every kind of repetition and disorder."""
    wanted = (0, vocab_size - 1, 31, 32, 17, 33, 15, 16, 0, vocab_size // 2, *range(vocab_size - 1, -1, -7))
    return [index for index in wanted if index < vocab_size]


def cases() -> list[Any]:
    return [
        pytest.param(layout, dtype, shape, id=f"{layout}-{dtype}-{shape[0]}x{shape[1]}")
        for layout in LAYOUTS
        for dtype in DTYPES
        for shape in SHAPES
        if layout != "packed_bf16_dot" or (dtype == torch.bfloat16 and shape[1] % 2 == 0)
    ]


@pytest.mark.parametrize(("layout", "dtype", "shape"), cases())
def test_chosen_logits_are_the_heads(layout: Layout, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    head, weight = make_head(*shape, dtype, layout)
    indices = some_indices(shape[0])
    layer = LogitsProcessorWithIndexedOutput(shape[0], indices)
    for rows in (0, 1, 3, 40):
        hidden = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows)).to(dtype)
        logits, indexed = layer(head, hidden)
        assert logits.dtype == torch.float32 and torch.equal(logits, head(hidden))
        assert indexed.dtype == torch.float32 and torch.equal(indexed, logits[:, indices])
        alone = layer.indexed_logits(head, hidden)
        assert alone.dtype == torch.float32 and alone.shape == (rows, len(indices))
        if layout == "plain":
            # The library may sum in another order for another shape; float64 tells that no row is mistaken.
            truth = F.linear(hidden.double(), weight[indices].double())
            assert torch.allclose(alone.double(), truth, rtol=0, atol=1e-4)
        else:
            assert torch.equal(alone, indexed)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chosen_logits_need_no_full_product(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    head, _ = make_head(199, 64, torch.bfloat16, layout)
    layer = LogitsProcessorWithIndexedOutput(199, [5, 190])
    hidden = torch.randn(4, 64).bfloat16()
    want = head(hidden)[:, [5, 190]]
    monkeypatch.setattr(ParallelLMHead, "forward", lambda *_: pytest.fail("the full product was made"))
    assert torch.allclose(layer.indexed_logits(head, hidden), want, atol=1e-5)


def test_rows_are_taken_from_the_head_of_the_call() -> None:
    layer = LogitsProcessorWithIndexedOutput(70, [3, 69])
    for seed, tied in ((0, False), (1, True), (0, False)):
        head = ParallelLMHead(70, 48, embedding := VocabParallelEmbedding(70, 48) if tied else None)
        weight = torch.randn(70, 48, generator=torch.Generator().manual_seed(seed))
        (head if embedding is None else embedding).weight.data = weight.clone()
        head.process_weights_after_loading()
        hidden = torch.randn(2, 48, generator=torch.Generator().manual_seed(9))
        assert torch.allclose(layer.indexed_logits(head, hidden), F.linear(hidden, weight[[3, 69]]), atol=1e-4)


@pytest.mark.parametrize("indices", [range(3), (0, 1, 2), np.arange(3), torch.arange(3), [np.int64(0), 1, 2]], ids=type)
def test_kinds_of_indices(indices: Any) -> None:
    layer = LogitsProcessorWithIndexedOutput(10, indices)
    assert layer.return_indices == [0, 1, 2] and all(type(index) is int for index in layer.return_indices)


def test_no_indices_are_no_columns() -> None:
    head, _ = make_head(33, 8, torch.float32, "plain")
    layer = LogitsProcessorWithIndexedOutput(33, [])
    assert layer(head, torch.randn(2, 8))[1].shape == layer.indexed_logits(head, torch.randn(2, 8)).shape == (2, 0)


@pytest.mark.parametrize(
    ("indices", "message"),
    [
        ([1, 10], r"return_indices must be in \[0, 10\), the model's vocabulary; got 10"),
        ([-1], r"return_indices must be in \[0, 10\), the model's vocabulary; got -1"),
        ([2**70], r"got 1180591620717411303424"),
        ([True], "return_indices must hold integers, got bool True"),
        ([1.0], "return_indices must hold integers, got float 1.0"),
        (["1"], "return_indices must hold integers, got str '1'"),
        ("12", "return_indices must be a list of integers, got str"),
        (3, "return_indices must be a list of integers, got int"),
        (np.array(3), "return_indices must be a list of integers, got ndarray"),
        (np.zeros((1, 2), dtype=int), "return_indices must hold integers, got list"),
    ],
    ids=str,
)
def test_bad_indices_name_value_and_limit(indices: Any, message: str) -> None:
    with pytest.raises(VLLMValidationError, match=message) as caught:
        LogitsProcessorWithIndexedOutput(10, indices)
    assert caught.value.parameter == "return_indices"


def test_a_head_of_another_vocabulary_is_refused() -> None:
    head, _ = make_head(33, 8, torch.float32, "plain")
    layer = LogitsProcessorWithIndexedOutput(34, [1])
    for call in (layer, layer.indexed_logits):
        with pytest.raises(ValueError, match="lm_head has 33 outputs, but vocab_size is 34"):
            call(head, torch.randn(2, 8))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_over_several_ranks_the_chosen_logits_are_on_all(world_size: int, layout: Layout) -> None:
    """The logits are those of the whole head, though no rank has it; a rank that owns none takes part, too."""
    vocab_size, dtype = 199, torch.bfloat16
    hidden = torch.randn(4, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    _, weight = make_head(vocab_size, 64, dtype, layout)

    def run(group: Communicator) -> tuple[Tensor, ...]:
        own = split_vocab(vocab_size, world_size)[group.rank]
        head, _ = make_head(vocab_size, 64, dtype, layout)
        head.group, head.vocab_range = group, own
        head.packed = packed_as(layout, weight[own.start : own.stop].contiguous())
        results: list[Tensor] = []
        for indices in ([3, 198, 66, 65, 100, 3], [0, 1], []):
            layer = LogitsProcessorWithIndexedOutput(vocab_size, indices)
            group.num_bytes.clear()
            logits, indexed = layer(head, hidden)
            alone = layer.indexed_logits(head, hidden)
            assert logits.shape == (4, len(own))
            assert sum(group.num_bytes.values()) == 2 * 4 * len(indices) * 4
            results += [indexed, alone]
        return tuple(results)

    first, *others = run_ranks(world_size, run)
    for other in others:
        assert all(torch.equal(one, two) for one, two in zip(first, other, strict=True))
    for indexed, alone, indices in zip(first[::2], first[1::2], ([3, 198, 66, 65, 100, 3], [0, 1], []), strict=True):
        truth = F.linear(hidden.double(), weight[indices].double())
        for values in (indexed, alone):
            assert values.dtype == torch.float32
            assert torch.allclose(values.double(), truth, rtol=0, atol=1e-4)
