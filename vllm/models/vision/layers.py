"""The parts of a picture tower that run on our operations: linears, patch embeddings, activations, the rotation of
queries and keys, and attention of whole pictures.

On CPUs without bfloat16 arithmetic PyTorch's products are many times slower, and their bits depend on what shares one.
Its approximation of GELU by a tangent and transformers' rotation take several times as long on any CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from vllm.ops.activation import activation_, has_activation_kernel
from vllm.ops.packed_attention import packed_attention
from vllm.ops.packed_linear import PackedLinear, pack_linear, packed_linear, unpack_linear
from vllm.ops.rotary import rotary_embedding_

ATTENTION = "vllm_pictures"


class Packed:
    """A product whose weight [N, ...] is packed once it is loaded; its class is set when the module has been built."""

    weight: Any
    bias: Any
    packed: PackedLinear | None = None
    _shape: torch.Size

    def pack(self) -> None:
        """Hold the weight as the CPU multiplies it fastest; on other devices nothing changes."""
        if self.packed is not None:
            return
        weight = self.weight.data
        packed = pack_linear(weight.flatten(1), None if self.bias is None else self.bias.data)
        if packed.layout == "plain":
            return
        self._shape, self.packed = weight.shape, packed
        # Modules ask for the weight's dtype.
        self.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)

    def unpack(self) -> None:
        """Undo `pack`, so that a tensor can be given another value."""
        if self.packed is None:
            return
        weight, bias = unpack_linear(self.packed, self.weight.dtype)
        self.packed = None
        self.weight = nn.Parameter(weight.view(self._shape), requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias, requires_grad=False)


class _Linear(Packed, nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return super().forward(x)
        return packed_linear(x.reshape(-1, x.shape[-1]).contiguous(), self.packed).view(*x.shape[:-1], -1)


class _Patches:
    """A convolution whose patches do not overlap: a product of each."""

    kernel_size: tuple[int, ...]
    packed: PackedLinear | None

    def forward(self, x: Tensor) -> Tensor:
        """[N, C, *sizes] -> [N, C', *patches]"""
        if self.packed is None:
            return super().forward(x)  # type: ignore[misc,no-any-return]
        counts = [size // edge for size, edge in zip(x.shape[2:], self.kernel_size, strict=True)]
        parts: list[int] = []
        for axis, (count, edge) in enumerate(zip(counts, self.kernel_size, strict=True)):
            x = x.narrow(2 + axis, 0, count * edge)
            parts += [count, edge]
        rank = len(counts)
        cut = x.reshape(*x.shape[:2], *parts)
        order = [0, *range(2, 2 + 2 * rank, 2), 1, *range(3, 3 + 2 * rank, 2)]
        rows = cut.permute(order).flatten(1 + rank).flatten(0, rank).contiguous()
        return packed_linear(rows, self.packed).view(len(x), *counts, -1).movedim(-1, 1)


class _Patches2d(Packed, _Patches, nn.Conv2d):
    pass


class _Patches3d(Packed, _Patches, nn.Conv3d):
    pass


class _Curve:
    """A module that is an activation of each value. Others may read what it is given."""

    curve: str

    def forward(self, x: Tensor) -> Tensor:
        if not has_activation_kernel(x):
            return super().forward(x)  # type: ignore[misc,no-any-return]
        return activation_(x.clone(memory_format=torch.contiguous_format), self.curve)


@cache
def _own_curves() -> dict[tuple[type[nn.Module], str], type[Any]]:
    """By a module's class and its `approximate`, where it has one, that with our operation: those that PyTorch takes
    longer for than for a copy."""
    from transformers import activations as those

    curves: dict[tuple[type[nn.Module], str], str] = {
        (nn.GELU, "tanh"): "gelu_tanh",
        (those.GELUTanh, ""): "gelu_tanh",
        (those.NewGELUActivation, ""): "gelu_tanh",
        (those.FastGELUActivation, ""): "gelu_tanh",
        (those.QuickGELUActivation, ""): "quick_gelu",
    }
    return {key: type(key[0].__name__, (_Curve, key[0]), {"curve": curve}) for key, curve in curves.items()}


_ROTATION = "apply_rotary_pos_emb_vision"


@cache
def _with_own_rotation(kind: type[nn.Module]) -> type[nn.Module] | None:
    """The class of a module whose `forward` calls transformers' rotation of queries and keys, with ours instead."""
    forward: Any = kind.forward
    names = getattr(forward, "__globals__", {})
    plain = names.get(_ROTATION)
    if plain is None or _ROTATION not in forward.__code__.co_names or not _is_known_rotation(plain):
        return None
    parts = forward.__name__, forward.__defaults__, forward.__closure__
    own = FunctionType(forward.__code__, {**names, _ROTATION: partial(_rotate, plain)}, *parts)
    own.__kwdefaults__ = forward.__kwdefaults__
    return type(kind.__name__, (kind,), {"forward": own})


def _is_known_rotation(plain: Callable[..., tuple[Tensor, Tensor]]) -> bool:
    """Whether it turns a head's first half against its second."""
    heads, angles = torch.arange(1.0, 9.0).view(2, 1, 4), torch.tensor([[0.3, 0.5], [0.7, 0.9]]).repeat(1, 2)
    tables = angles.cos(), angles.sin()
    want, found = plain(heads, -heads, *tables), (heads.clone(), -heads)
    _rotate_in_place(*found, *tables)
    return all(torch.allclose(one, other) for one, other in zip(want, found, strict=True))


def _rotate(
    plain: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries and keys [T, H, D] by angles whose cosines and sines are [T, D]. They are parts of a product that nothing
    else reads, and are changed."""
    is_usual = q.dim() == k.dim() == 3 and cos.shape == (len(q), q.shape[-1]) and q.stride(-1) == k.stride(-1) == 1
    # Looking at tables would wait for other devices.
    if q.device.type != "cpu" or not is_usual or not _has_equal_halves(cos) or not _has_equal_halves(sin):
        return plain(q, k, cos, sin)
    _rotate_in_place(q, k, cos, sin)
    return q, k


def _has_equal_halves(table: Tensor) -> bool:
    return torch.equal(*table.chunk(2, dim=-1))


def _rotate_in_place(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    half = cos.shape[-1] // 2
    tables = torch.cat([cos[:, :half], sin[:, :half]], dim=-1).float()
    rotary_embedding_(torch.arange(len(q)), q, k, tables)


_KINDS: dict[type[nn.Module], type[Any]] = {nn.Linear: _Linear, nn.Conv2d: _Patches2d, nn.Conv3d: _Patches3d}


def use_own_layers(model: nn.Module) -> None:
    """Let linears, patch embeddings, activations and rotations of a module be ours."""
    for module in model.modules():
        module.__class__ = _own_class(module) or type(module)


def _own_class(module: Any) -> type[Any] | None:
    kind: Any = type(module)
    if kind in _KINDS:
        return _KINDS[kind] if kind is nn.Linear or _cuts_patches(module) else None
    return _own_curves().get((kind, getattr(module, "approximate", ""))) or _with_own_rotation(kind)


def _cuts_patches(convolution: Any) -> bool:
    padding = () if convolution.padding == "valid" else convolution.padding
    is_plain = convolution.groups == 1 and not any(padding) and set(convolution.dilation) == {1}
    return is_plain and convolution.kernel_size == convolution.stride


def packed_layers(model: nn.Module) -> list[Packed]:
    """The layers that `use_own_layers` made ours."""
    return [module for module in model.modules() if isinstance(module, Packed)]


def register_attention() -> None:
    """Make `ATTENTION` known to transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(ATTENTION, picture_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def picture_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Attention as transformers calls it. query: [B, H, T, D]; key, value: [B, Hkv, T', D]; returns [B, T, H, D].
    Where every token sees all of its picture, our operation runs it."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    batch, _, length, width = query.shape
    sees_all = attention_mask is None or _hides_nothing(attention_mask)
    is_causal = options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    others = [options.get(name) for name in ("sliding_window", "softcap", "s_aux", "position_bias")]
    is_usual = key.shape[2] == length and value.shape[-1] == width and all(each is None for each in others)
    if not sees_all or is_causal or not is_usual:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **options)  # type: ignore[no-any-return]
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    borders = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32)
    scale = options.get("scaling")
    out = packed_attention(q, k, v, borders, width**-0.5 if scale is None else scale)
    return out.unflatten(0, (batch, length)), None


def _hides_nothing(mask: Tensor) -> bool:
    return bool(mask.all()) if mask.dtype == torch.bool else not bool(mask.any())
