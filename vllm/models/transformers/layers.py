"""The parts of a transformers module that are replaced by our own: linears, plain norms, embedding, head, attention."""

from __future__ import annotations

import copy
import fnmatch
import inspect
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vllm.attention.backend import AttentionMetadata, KVCache
from vllm.attention.options import AttentionOptions
from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.activation import get_act_fn
from vllm.layers.attention import Attention
from vllm.layers.layernorm import RMSNorm
from vllm.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.layers.linear_method import UNQUANTIZED, LinearMethod
from vllm.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.models.mlp import MLP
from vllm.models.spec import MlpSpec
from vllm.models.transformers.probe import AttentionCall
from vllm.ops.rms_norm import AddedNorm


class _Flattened(LinearBase):
    """A linear layer of [1, T, K], as transformers' modules call theirs."""

    def forward(self, x: Tensor, norm: AddedNorm | None = None) -> Tensor:
        return super().forward(x.reshape(-1, x.shape[-1]), norm).unflatten(0, x.shape[:-1])

    def process_weights_after_loading(self, method: LinearMethod = UNQUANTIZED, gated: bool = False) -> None:
        super().process_weights_after_loading(method, gated)
        if self.weight is None:
            # For models that ask for the weight's dtype or device. Who multiplies with it fails in the trial run.
            self.weight = nn.Parameter(self._empty, requires_grad=False)


class _Replicated(_Flattened, ReplicatedLinear):
    pass


class _Column(_Flattened, ColumnParallelLinear):
    pass


class _Row(_Flattened, RowParallelLinear):
    pass


_STYLES: dict[str, type[_Replicated | _Column | _Row]] = {"colwise": _Column, "rowwise": _Row}


def parallel_style(name: str, plan: dict[str, str]) -> str:
    """How transformers' tensor-parallel plan, of patterns of names, splits the module `name`; "" if it does not."""
    return next((style for pattern, style in plan.items() if fnmatch.fnmatchcase(name, pattern)), "")


def make_linear(linear: nn.Linear, name: str, style: str) -> LinearBase:
    """Our layer of a linear's shape, split as `style` says over the tensor-parallel group. `name` is its own within
    its parent. ValueError: the ranks cannot share its outputs (or inputs) equally."""
    kind, ranks = _STYLES.get(style, _Replicated), get_tp_group().world_size
    width = linear.in_features if kind is _Row else linear.out_features
    if kind is not _Replicated and width % ranks:
        raise ValueError(f"{name} has width {width}, which tensor_parallel_size={ranks} does not divide")
    return kind(linear.in_features, linear.out_features, linear.bias is not None, name)


class _FlatRMSNorm(RMSNorm):
    # Its rows may be heads.
    takes_adapters = False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.reshape(-1, x.shape[-1])).view(x.shape)


def make_norm(module: Any) -> RMSNorm | None:
    """Our norm in place of `module`, if that is a plain RMSNorm: shown by its results. Else None."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    names = [name for name, _ in module.named_parameters()]
    if "RMSNorm" not in type(module).__name__ or names != ["weight"] or not isinstance(eps, float):
        return None
    width, arguments = module.weight.shape, inspect.signature(module.forward).parameters
    if len(width) != 1 or len(arguments) != 1 or list(module.children()):
        return None
    with torch.device("cpu"), torch.no_grad():
        tried = copy.deepcopy(module).to_empty(device="cpu").float()
        generator = torch.Generator().manual_seed(0)
        # Whatever dtype the model is built in.
        tried.weight.copy_(torch.randn(width, generator=generator, dtype=torch.float32))
        x = torch.randn(3, *width, generator=generator, dtype=torch.float32)
        plain = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * tried.weight
        # Equal up to float32's rounding of sums in another order.
        if not torch.allclose(tried(x), plain, rtol=1e-5, atol=1e-5):
            return None
    return _FlatRMSNorm(width[0], eps)


class GatedMLP(MLP):
    """An MLP of [..., H]."""

    def forward(self, x: Tensor, norm: AddedNorm | None = None) -> Tensor:
        return super().forward(x.reshape(-1, x.shape[-1]), norm).view(x.shape)


_GATED_PARTS = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}


def make_mlp(module: Any, name: str, plan: dict[str, str]) -> GatedMLP | None:
    """Our MLP in place of `module`, if that is a plain gated one, shown by its results, that `plan` splits as ours or
    that one rank has. Else None."""
    parts: dict[str, Any] = {part: getattr(module, part, None) for part in _GATED_PARTS}
    ranks = get_tp_group().world_size
    if any(type(part) is not nn.Linear for part in parts.values()):
        return None
    if any(each not in _GATED_PARTS and list(child.parameters()) for each, child in module.named_children()):
        return None
    if list(module.parameters(recurse=False)) or len(inspect.signature(module.forward).parameters) != 1:
        return None
    if ranks > 1 and any(parallel_style(f"{name}.{part}", plan) != style for part, style in _GATED_PARTS.items()):
        return None
    gate, up, down = parts.values()
    sizes = {gate.out_features, up.out_features, down.in_features}
    if len(sizes) > 1 or gate.out_features % ranks or (gate.bias is None) != (up.bias is None):
        return None
    activation = _gated_activation(module)
    if activation is None:
        return None
    spec = MlpSpec(gate.out_features, activation, up_bias=gate.bias is not None, down_bias=down.bias is not None)
    return GatedMLP(spec, gate.in_features)


def _gated_activation(module: Any) -> str | None:
    """The activation of a gated MLP, which computes with small linears in place of its own what a GatedMLP does; None
    if it does anything else."""
    tried = copy.deepcopy(module)
    with torch.device("cpu"), torch.no_grad():
        small = {part: nn.Linear(12, 12, dtype=torch.float32) for part in _GATED_PARTS}
        for part, linear in small.items():
            setattr(tried, part, linear)
        x = 4 * torch.randn(1, 5, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        try:
            result = tried(x)
        except Exception:  # its code may do anything
            return None
        gate, up, down = small.values()
        for name in ("silu", "gelu_pytorch_tanh", "gelu", "relu"):
            # Equal up to float32's rounding; activations differ by far more.
            if torch.allclose(down(get_act_fn(name)(gate(x)) * up(x)), result, rtol=1e-5, atol=1e-6):
                return name
    return None


class TokenEmbedding(VocabParallelEmbedding):
    """The embedding of ids [1, T]."""

    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids.flatten()).unflatten(0, input_ids.shape)


class Head(ParallelLMHead):
    """The output layer. `is_final`: its logits are the model's. `is_rounded`: they have the model's dtype."""

    def __init__(self, linear: nn.Linear, tied_to: VocabParallelEmbedding | None) -> None:
        super().__init__(linear.out_features, linear.in_features, tied_to, linear.bias is not None)
        self.is_final = self.is_rounded = False

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] -> float32 [..., V_rank], or rounded ones."""
        return super().forward(hidden.reshape(-1, hidden.shape[-1])).unflatten(0, hidden.shape[:-1])

    @property
    def plain_weight(self) -> Tensor | None:
        return super().plain_weight if self.is_final and not self.is_rounded else None


class Step:
    """Metadata of a step that attention layers read."""

    def __init__(self) -> None:
        self.kv_caches: list[KVCache] = []
        self.attn: AttentionMetadata | None = None  # None: a trial run without a cache
        self.repeated: list[PagedLayers] = []  # of modules that attend several times

    def begin(self, kv_caches: list[KVCache], attn: AttentionMetadata | None) -> None:
        """The next step's caches and requests."""
        self.kv_caches, self.attn = kv_caches, attn
        for layers in self.repeated:
            layers.turn = 0


class PagedLayer(nn.Module):
    """One attention layer over the paged cache. Keys or values that are narrower than the others are filled up with
    zeros, which changes no result."""

    is_eager: ClassVar[bool] = False

    def __init__(self, call: AttentionCall, step: Step) -> None:
        """ValueError: the ranks cannot share the heads equally."""
        super().__init__()
        self.call, self.step = call, step
        self.index: int  # of its keys and values among the model's
        self.group = get_tp_group()
        if call.num_kv_heads % self.group.world_size:
            raise ValueError(
                f"tensor_parallel_size={self.group.world_size} does not divide the {call.num_kv_heads} key/value heads "
                f"of {call.name}"
            )
        self.width = max(call.key_dim, call.value_dim)
        scale = call.key_dim**-0.5 if call.scale is None else call.scale
        options = AttentionOptions(scale, call.window, call.softcap)
        kv_heads = call.num_kv_heads // self.group.world_size
        self.attn = Attention(self.width, options=options, num_kv_heads=kv_heads)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """[1, Hq, T, Dk], [1, Hkv, T, Dk] and [1, Hkv, T, Dv] of this rank's heads or of all -> [1, T, Hq, Dv]."""
        q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
        if self.step.attn is None:
            return _attend_to_self(q, k, v)[None]
        is_whole = self.group.world_size > 1 and q.shape[1] == self.call.num_heads
        if is_whole:
            q, k, v = self._own_heads(q, k, v)
        value_dim = v.shape[-1]
        if self.call.key_dim != self.call.value_dim:
            q, k, v = (F.pad(x, (0, self.width - x.shape[-1])) for x in (q, k, v))
        if sinks is not None:
            if sinks.shape[0] != q.shape[1]:
                (sinks,) = self._own_heads(sinks[None])
            self.attn.options = replace(self.attn.options, sinks=sinks.flatten().float())
        out = self.attn(q, k, v, self.step.kv_caches[self.index], self.step.attn)
        out = out.view(*q.shape[:2], -1)[..., :value_dim]
        if is_whole:
            out = self.group.all_gather(out).transpose(0, 1).flatten(1, 2)
        return out[None]

    def _own_heads(self, *tensors: Tensor) -> list[Tensor]:
        """This rank's part of the heads of tensors that every rank has whole."""
        rank, ranks = self.group.rank, self.group.world_size
        return [tensor.chunk(ranks, dim=1)[rank] for tensor in tensors]


class PagedLayers(nn.ModuleList):
    """The attention layers of one module, in the order in which it calls them in a step."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self.turn = 0
        self._step = step

    def append(self, module: nn.Module) -> PagedLayers:
        if len(self) == 1:
            self._step.repeated.append(self)
        super().append(module)
        return self

    def next(self) -> Any:
        """The layer whose turn it is."""
        if len(self) == 1:
            return self[0]
        self.turn += 1
        return self[self.turn - 1]


def _attend_to_self(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A function of each token's query, key and value alone, in place of attention: [T, Hq, Dv]."""
    groups = q.shape[1] // k.shape[1]
    weights = torch.linspace(-1, 1, q.shape[-1], device=q.device, dtype=q.dtype)
    gate = torch.sigmoid((q * weights).sum(-1) + (k * weights.flip(0)).sum(-1).repeat_interleave(groups, 1))
    return v.repeat_interleave(groups, 1) * gate[..., None]


def paged_attention_forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, by the module's PagedLayers. What else it is given was checked in the run
    without data."""
    layer = module.paged_layers.next()
    if layer.is_eager and layer.step.attn is not None:
        return layer.attend(module, query, key, value, others if s_aux is None else {**others, "s_aux": s_aux}), None
    return layer(query, key, value, s_aux), None
