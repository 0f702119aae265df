"""Attention of bfloat16 in matrix tiles, which take up to 16 rows: the same bits for any number of them.

`test_emulated_levels.py` runs these tests, and those of attention, on CPUs that have no such tiles.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from layouts import needs_kernels, needs_tiles
from preloaded import FORKED
from test_emulated_levels import library
from test_latent_attention import make_batch as make_latent_batch
from test_packed_attention import starts_of
from test_paged_attention import Batch, make_batch
from torch import Tensor

from vllm.ops.packed_attention import packed_attention

__all__ = ["library"]
HERE = Path(__file__).parent
pytestmark = needs_kernels


def one_request(queries: int, tokens: int, head_dim: int = 48, heads: tuple[int, int] = (1, 1)) -> Batch:
    return make_batch([(queries, tokens)], torch.bfloat16, heads, head_dim)


@pytest.mark.parametrize("head_dim", [16, 80, 144])
def test_any_number_of_rows(head_dim: int) -> None:
    batch = one_request(40, 100, head_dim)
    whole = batch.run("cpp")
    for rows in range(1, 40):
        assert torch.equal(batch.part(0, 40 - rows).run("cpp"), whole[40 - rows :])


@pytest.mark.parametrize("tiny", ["q", "k_cache", "v_cache"])
def test_any_number_of_rows_of_tiny_numbers(tiny: str) -> None:
    """Matrix tiles count numbers below the smallest normal one as zero."""
    batch = one_request(40, 100)
    numbers = getattr(batch, tiny)
    numbers.copy_((numbers.float() * 2.0**-126).to(numbers.dtype))
    whole = batch.run("cpp")
    for rows in (1, 3, 4, 5, 17):
        assert torch.equal(batch.part(0, 40 - rows).run("cpp"), whole[40 - rows :])


@pytest.mark.parametrize("dims", [(16, 16), (48, 2), (80, 48)], ids=str)
def test_any_number_of_rows_of_latents(dims: tuple[int, int]) -> None:
    batch = make_latent_batch([(40, 100)], torch.bfloat16, 1, dims)
    whole = batch.run("cpp")
    for rows in range(1, 40):
        assert torch.equal(batch.part(0, 40 - rows, 40).run("cpp"), whole[40 - rows :])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_no_numbers_stay_alone(value: float) -> None:
    batch = one_request(40, 100)
    whole = batch.run("cpp")
    batch.q[7] = value
    assert batch.run("cpp")[7].isnan().all()
    others = torch.arange(40) != 7
    assert torch.equal(batch.run("cpp")[others], whole[others])


def attended() -> Tensor:
    """Many rows and few, over parts of chunks, whole ones and several segments."""
    torch.manual_seed(0)
    results = []
    for tokens in (1, 40, 64, 300):
        queries = min(tokens, 35)
        batch = one_request(queries, tokens, 80, (3, 1))
        results += [batch.run("cpp"), batch.part(0, queries - 1).run("cpp")]
        rows = (torch.randn(tokens, heads, 80).bfloat16() for heads in (3, 1, 1))
        results.append(packed_attention(*rows, starts_of([tokens]), 0.1))
        results.append(make_latent_batch([(queries, tokens)], torch.bfloat16, 3, (80, 48)).run("cpp"))
    return torch.cat(results)


@needs_tiles
def test_the_emulation_gives_the_bits_of_the_instructions(library: Path, tmp_path: Path) -> None:
    code = f"""
import sys, torch
from pathlib import Path
sys.path[:0] = {[str(HERE), str(HERE.parent / "support")]}
from vllm.ops import _dispatch
_dispatch.LIBRARY = Path({str(library)!r})
from test_tile_attention import attended
torch.save(attended(), {str(tmp_path / "attended.pt")!r})
"""
    subprocess.run([sys.executable, "-c", FORKED + code], check=True)
    assert torch.equal(attended(), torch.load(tmp_path / "attended.pt"))
