"""rotary_embedding_ against float64, in place on views of qkv rows."""

from __future__ import annotations

import pytest
import torch
from backends import DTYPES, assert_accurate, backends, run
from torch import Tensor

from vllm.ops.rotary import rotary_embedding_


def rotated(heads: Tensor, positions: Tensor, table: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    half = table.shape[1] // 2
    cos, sin = table[positions.long()].to(dtype)[:, None].split(half, dim=-1)
    first, second, rest = heads.to(dtype).split([half, half, heads.shape[-1] - 2 * half], dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


@pytest.mark.parametrize("backend", backends("rotary_embedding_"))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("positions_dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize(
    ("tokens", "q_heads", "k_heads", "head_dim", "rot_dim"),
    [
        (0, 2, 1, 8, 8),
        (1, 1, 1, 2, 2),
        (5, 9, 3, 64, 64),
        (3, 8, 8, 80, 32),
        (4, 14, 2, 128, 128),
        (2, 3, 1, 10, 6),
    ],
)
def test_rotary(
    backend: str,
    dtype: torch.dtype,
    positions_dtype: torch.dtype,
    tokens: int,
    q_heads: int,
    k_heads: int,
    head_dim: int,
    rot_dim: int,
) -> None:
    torch.manual_seed(tokens)
    qkv = torch.randn(tokens, (q_heads + 2 * k_heads) * head_dim).to(dtype)
    sizes = [each * head_dim for each in (q_heads, k_heads, k_heads)]
    q, k, v = (part.unflatten(-1, (-1, head_dim)) for part in qkv.split(sizes, dim=-1))
    angles = torch.rand(50, rot_dim // 2) * 100
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    positions = torch.randint(0, 50, (tokens,), dtype=positions_dtype)
    expected = [rotated(part, positions, table) for part in (q, k)]
    plain = [rotated(part, positions, table, dtype).to(dtype) for part in (q, k)]
    untouched = [part[..., rot_dim:].clone() for part in (q, k)]
    v_before = v.clone()
    run(backend, rotary_embedding_, positions, q, k, table)
    for part in range(2):
        assert_accurate(backend, (q, k)[part], expected[part], plain[part])
        assert torch.equal((q, k)[part][..., rot_dim:], untouched[part])
    assert torch.equal(v, v_before)
