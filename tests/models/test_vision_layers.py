"""The parts of picture towers that run on our operations, against PyTorch's and transformers' own."""

from __future__ import annotations

import pytest
import torch
from layouts import needs_kernels
from torch import Tensor, nn
from transformers.activations import FastGELUActivation, GELUTanh, NewGELUActivation, QuickGELUActivation
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionAttention

from vllm.models.vision.layers import use_own_layers


@needs_kernels
@pytest.mark.parametrize(
    "plain", [nn.GELU("tanh"), GELUTanh(), NewGELUActivation(), FastGELUActivation(), QuickGELUActivation()]
)
def test_activations(plain: nn.Module) -> None:
    torch.manual_seed(0)
    x = torch.randn(37, 2, 130).mul_(4).transpose(0, 1)
    before, want, rounded = x.clone(), plain(x), plain(x).bfloat16()
    model = nn.Sequential(plain)
    kind = type(plain)
    use_own_layers(model)
    assert type(plain) is not kind and isinstance(plain, kind)
    assert torch.equal(x, before), "others may read what an activation is given"
    torch.testing.assert_close(model(x), want, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(model(x.bfloat16()), rounded, rtol=2e-2, atol=1e-2)


def test_other_activations_stay() -> None:
    """PyTorch's exact ones take no longer than a copy."""
    model = nn.Sequential(nn.GELU(), nn.SiLU(), nn.ReLU())
    kinds = [type(each) for each in model]
    use_own_layers(model)
    assert [type(each) for each in model] == kinds


def attention(seed: int = 0) -> Qwen3VLVisionAttention:
    torch.manual_seed(seed)
    config = Qwen3VLVisionConfig(hidden_size=64, num_heads=2)
    config._attn_implementation = "sdpa"
    return Qwen3VLVisionAttention(config).eval()


def angles_of(length: int, width: int) -> tuple[Tensor, Tensor]:
    angles = torch.randn(length, width // 2).repeat(1, 2)
    return angles.cos(), angles.sin()


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.inference_mode()
def test_rotation(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, own = attention().to(dtype), attention().to(dtype)
    use_own_layers(own)
    assert type(plain).forward is not type(own).forward and isinstance(own, Qwen3VLVisionAttention)
    x, tables, borders = torch.randn(19, 64).to(dtype), angles_of(19, 32), torch.tensor([0, 12, 19])
    want = plain(x, cu_seqlens=borders, position_embeddings=tables)
    got = own(x, cu_seqlens=borders, position_embeddings=tables)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6 if dtype == torch.float32 else 4e-3)
    # It does not call theirs, which others still do.
    refused = RuntimeError("theirs ran")

    def refuse(*tensors: Tensor) -> None:
        raise refused

    monkeypatch.setitem(Qwen3VLVisionAttention.forward.__globals__, "apply_rotary_pos_emb_vision", refuse)
    assert torch.equal(own(x, cu_seqlens=borders, position_embeddings=tables), got)
    with pytest.raises(RuntimeError, match="theirs ran"):
        plain(x, cu_seqlens=borders, position_embeddings=tables)


@needs_kernels
@torch.inference_mode()
def test_angles_that_differ_by_half_are_transformers_affair() -> None:
    plain, own = attention(), attention()
    use_own_layers(own)
    x, borders = torch.randn(7, 64), torch.tensor([0, 7])
    tables = torch.randn(7, 32).cos(), torch.randn(7, 32).sin()
    want = plain(x, cu_seqlens=borders, position_embeddings=tables)
    assert torch.allclose(own(x, cu_seqlens=borders, position_embeddings=tables), want, atol=1e-6)


def apply_rotary_pos_emb_vision(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Another rotation of this name: neighbours against each other."""
    turned = [torch.stack([-each[..., 1::2], each[..., ::2]], -1).flatten(-2) for each in (q, k)]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + turned[0] * sin, k * cos + turned[1] * sin


class Neighbours(nn.Module):
    def forward(self, q: Tensor, k: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return apply_rotary_pos_emb_vision(q, k, *tables)


def test_another_rotation_stays() -> None:
    module = Neighbours()
    use_own_layers(module)
    assert type(module) is Neighbours
