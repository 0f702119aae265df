"""Zamba (arXiv:2405.16712) and Zamba 2 (arXiv:2411.15242): Mamba in every layer; before some of them attention and an
MLP over the residual stream and the embeddings together, whose weights several layers share."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from vllm.attention.backend import AttentionMetadata, KVCache
from vllm.distributed.parallel_state import get_tp_group
from vllm.layers.activation import get_act_and_mul_fn
from vllm.layers.attention import Attention, AttentionOptions
from vllm.layers.linear import LinearBase, QKVParallelLinear, ReplicatedLinear, RowParallelLinear, StackedLinear
from vllm.layers.sharding import Shard
from vllm.models.attention import RotaryTables
from vllm.models.checkpoint_names import CheckpointNames, Parts, split_evenly
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import Decoder, DecoderForCausalLM, DecoderLayer, caches_of_layers
from vllm.models.hybrids.options import layer_kinds
from vllm.models.hybrids.weights import MAMBA_RENAMES, split_mamba, split_mamba2
from vllm.models.norms import make_norm
from vllm.models.spec import AttentionSpec, BesideSpec, DecoderSpec, MlpSpec, NormSpec, StateSpec
from vllm.models.states.specs import Mamba2Spec, MambaSpec
from vllm.ops.elementwise import added


@dataclass(frozen=True)
class ZambaSpec(DecoderSpec):
    """`num_blocks` blocks serve the layers with attention, in turn. `adapter_rank`: each of these adds products of that
    rank to the MLP's first one, and with `adapts_attention` to queries, keys and values; 0: it does not."""

    num_blocks: int = 1
    adapter_rank: int = 0
    adapts_attention: bool = False

    @property
    def hybrid_layers(self) -> list[int]:
        """The layers with attention."""
        return [index for index, layer in enumerate(self.layers) if isinstance(layer, BesideSpec)]


class SharedBlock(nn.Module):
    """The weights of attention over [T, 2H] and of the MLP, which several layers use."""

    def __init__(self, attention: AttentionSpec, mlp: MlpSpec, norm: NormSpec, hidden_size: int) -> None:
        super().__init__()
        head_dim, heads = attention.head_dim, attention.num_heads
        self.input_layernorm = make_norm(norm, 2 * hidden_size)
        self.pre_ff_layernorm = make_norm(norm, hidden_size)
        self.qkv_proj = QKVParallelLinear(2 * hidden_size, head_dim, heads, attention.num_kv_heads, False)
        self.o_proj = RowParallelLinear(heads * head_dim, hidden_size, False, "o_proj")
        inner = mlp.intermediate_size
        self.gate_up_proj = StackedLinear(hidden_size, dict.fromkeys(("gate_proj", "up_proj"), inner), mlp.up_bias)
        self.act_and_mul = get_act_and_mul_fn(mlp.activation)
        self.down_proj = RowParallelLinear(inner, hidden_size, mlp.down_bias, "down_proj")
        own = self.input_layernorm, self.pre_ff_layernorm, self.qkv_proj, self.o_proj, self.gate_up_proj, self.down_proj
        for each in own:
            # An adapter may have one for each layer that uses it.
            each.takes_adapters = False


class _Adapter(nn.Module):
    """Up and down projections through `rank` values, one for each of `parts`, of which the rank holds some outputs."""

    def __init__(self, size: int, rank: int, parts: dict[str, Shard], shared_down: bool) -> None:
        super().__init__()
        downs = ["shared"] if shared_down else list(parts)
        self.down = LinearBase(Shard.whole(size), {f"{name}_down": Shard.whole(rank) for name in downs}, False)
        self.ups = nn.ModuleList(
            LinearBase(Shard.whole(rank), {f"{name}_up": rows}, False) for name, rows in parts.items()
        )
        self._rank = rank

    def forward(self, x: Tensor) -> Tensor:
        """[T, size] -> [T, outputs held of all parts]."""
        low = self.down(x).split(self._rank, dim=1)
        pairs = zip(self.ups, low if len(low) > 1 else low * len(self.ups), strict=True)
        return torch.cat([up(part.contiguous()) for up, part in pairs], dim=1)


class SharedUse(nn.Module):
    """One layer's use of a block: keys and values, adapters and the last product are its own."""

    def __init__(self, spec: ZambaSpec, index: int, block: SharedBlock, tables: RotaryTables) -> None:
        super().__init__()
        layer = spec.layers[index]
        assert isinstance(layer, BesideSpec)
        attention, size, group = layer.attention, spec.hidden_size, get_tp_group()
        self.block, self.head_dim = block, attention.head_dim
        self.linear = ReplicatedLinear(size, size, False, "linear")
        self.attn = Attention(
            attention.head_dim,
            rotary=None if attention.rotary is None else tables.get(attention.rotary),
            options=AttentionOptions(attention.scale),
            num_kv_heads=block.qkv_proj.head_counts[1],
        )
        self.qkv_adapter: _Adapter | None = None
        self.mlp_adapter: _Adapter | None = None
        if spec.adapter_rank:
            mlp = spec.mlps[index]
            assert isinstance(mlp, MlpSpec)
            parts = dict.fromkeys(("gate", "up"), Shard.even(mlp.intermediate_size, group))
            self.mlp_adapter = _Adapter(size, spec.adapter_rank, parts, shared_down=True)
        if spec.adapts_attention:
            parts = {name[0]: rows for name, rows in block.qkv_proj.parts.items()}
            self.qkv_adapter = _Adapter(2 * size, spec.adapter_rank, parts, shared_down=False)

    def forward(
        self, positions: Tensor, stream: Tensor, embedded: Tensor, kv_cache: KVCache, attn: AttentionMetadata
    ) -> Tensor:
        """The residual stream and the embeddings, both [T, H] -> [T, H]."""
        block = self.block
        x = block.input_layernorm(torch.cat((stream, embedded), dim=1))
        qkv = block.qkv_proj(x)
        if self.qkv_adapter is not None:
            qkv = added(qkv, self.qkv_adapter(x))
        q, k, v = qkv.view(len(x), -1, self.head_dim).split(block.qkv_proj.head_counts, dim=1)
        x = block.pre_ff_layernorm(block.o_proj(self.attn(q, k, v, kv_cache, attn, None, positions)))
        inner = block.gate_up_proj(x)
        if self.mlp_adapter is not None:
            inner = added(inner, self.mlp_adapter(x))
        return self.linear(block.down_proj(block.act_and_mul(inner)))


class ZambaLayer(DecoderLayer):
    """Mamba, whose input has what a shared block gives added where the layer uses one."""

    def __init__(self, spec: DecoderSpec, index: int, tables: RotaryTables) -> None:
        own = tuple(layer.state if isinstance(layer, BesideSpec) else layer for layer in spec.layers)
        super().__init__(replace(spec, layers=own, mlps=(None,) * len(own)), index, tables)
        self.shared: SharedUse | None = None

    def forward(
        self,
        positions: Tensor,
        stream: Tensor,
        pending: Tensor | None,
        kv_cache: KVCache,
        attn: AttentionMetadata,
        rows: Tensor | None,
        given: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """See DecoderLayer.forward; `given` are the embeddings."""
        if self.shared is None:
            return super().forward(positions, stream, pending, kv_cache, attn, rows)
        assert given is not None and self.input_layernorm is not None and self.self_attn is not None
        if pending is not None:
            stream = added(stream, pending)
        x = self.input_layernorm(added(stream, self.shared(positions, stream, given, kv_cache, attn)))
        out = self.self_attn(positions, x, kv_cache, attn, rows, None)
        return stream if rows is None else stream.index_select(0, rows), out


class _Embedded(nn.Module):
    """Gives every layer the embeddings; the residual stream that begins with them changes in place."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self._num_layers = num_layers

    def forward(self, ids: Tensor, hidden: Tensor) -> tuple[Tensor, ...]:
        return (hidden.clone(),) * self._num_layers


class ZambaDecoder(Decoder):
    """Layers that use a block hold it together."""

    layer_class = ZambaLayer

    def __init__(self, spec: DecoderSpec, max_model_len: int) -> None:
        super().__init__(spec, max_model_len)
        assert isinstance(spec, ZambaSpec)
        self.layer_inputs = _Embedded(len(spec.layers))
        tables = RotaryTables(max_model_len)
        blocks: list[SharedBlock] = []
        for count, index in enumerate(spec.hybrid_layers):
            layer, mlp = spec.layers[index], spec.mlps[index]
            assert isinstance(layer, BesideSpec) and isinstance(mlp, MlpSpec)
            if count < spec.num_blocks:
                blocks.append(SharedBlock(layer.attention, mlp, spec.norm, spec.hidden_size))
            self.layers[index].shared = SharedUse(spec, index, blocks[count % spec.num_blocks], tables)
        self.caches_of_layer = caches_of_layers(self.layers)


_RENAMES = (
    (r"\.shared_transf(ormer)?\.self_attn\.", ".shared.block."),
    (r"\.shared_transf(ormer)?\.feed_forward\.", ".shared.block."),
    (r"\.shared_transf(ormer)?\.", ".shared.block."),
    (r"\.mamba_decoder\.", "."),
    (r"(layers\.\d+)\.linear\.", r"\1.shared.linear."),
    (r"\.final_layernorm\.", ".norm."),
    (r"\.mamba\.(x|dt)_proj_(weight|bias)$", r".mamba.\1_proj.\2"),
    *MAMBA_RENAMES,
)
_OF_BLOCK = re.compile(r"model\.layers\.(\d+)\.shared\.block\.(.+)")
_ADAPTER = re.compile(r"(?:gate_up_proj|linear_([qkv]))_adapter(?:_list)?\.(\d+)\.([01])\.weight")


def _blocks(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """A block's tensors belong to the first layer that uses it, adapters to their own layer."""
    assert isinstance(spec, ZambaSpec)
    match = _OF_BLOCK.fullmatch(name)
    if match is None:
        yield name, tensor
        return
    layers, own = spec.hybrid_layers, match[2]
    adapter = _ADAPTER.fullmatch(own)
    if adapter is None:
        first = layers[layers.index(int(match[1])) % spec.num_blocks]
        yield f"model.layers.{first}.shared.block.{own}", tensor
        return
    part, is_up = adapter[1], adapter[3] == "1"
    to = f"model.layers.{layers[int(adapter[2])]}.shared.{'mlp' if part is None else 'qkv'}_adapter"
    if part is not None:
        yield (f"{to}.ups.{part}_up.weight" if is_up else f"{to}.{part}_down.weight"), tensor
    elif is_up:
        for half, rows in zip(("gate", "up"), tensor.unflatten(0, (2, -1)), strict=True):
            yield f"{to}.ups.{half}_up.weight", rows
    else:
        yield f"{to}.shared_down.weight", tensor


def _heads(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """Zamba's Mamba, whose in_proj has inputs and gates in turn, and whose other tensors have a dimension of heads."""
    if name.endswith(".in_proj.weight") or name.endswith(".in_proj.bias"):
        yield name, tensor.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)
    elif name.endswith((".inputs_proj.weight", ".dt_proj.weight", ".decays.A_log", ".decays.dt_bias", ".decays.D")):
        yield name, tensor.flatten(0, 1)
    else:
        yield name, tensor


class ZambaForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(_RENAMES, (_blocks, _heads, split_mamba))
    decoder_class = ZambaDecoder

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("num_logits_to_keep", "use_mamba_kernels", "use_associative_scan", "attn_layer_period")
        reader.ignore("attn_layer_offset", *_OF_STEPS)
        reader.only("hidden_mamba_act", "silu")
        size = reader.hidden_size
        reader.only("attention_hidden_size", 2 * size)
        channels = reader.integer("mamba_expand", default=2) * size
        rank = reader.get("mamba_dt_rank", default="auto")
        mamba = MambaSpec(
            channels,
            reader.integer("mamba_d_state", default=16),
            -(-size // 16) if rank == "auto" else reader.integer("mamba_dt_rank"),
            reader.integer("mamba_d_conv", default=4),
            conv_bias=reader.boolean("mamba_conv_bias", default=True),
            bias=reader.boolean("mamba_proj_bias", default=False),
            heads=reader.integer("n_mamba_heads", default=2),
        )
        if channels % mamba.heads or mamba.heads == 1:
            raise reader.refuse("n_mamba_heads", f"it must divide {channels}, and be more than 1")
        period, offset = reader.get("attn_layer_period", default=6), reader.get("attn_layer_offset", default=4)
        pattern = ["hybrid" if i % period == offset else "linear_attention" for i in range(reader.num_layers - 3)]
        default = ["linear_attention", "linear_attention", "hybrid", *pattern]
        mlp = reader.mlp("gelu", False, size=14848)
        return _describe(reader, mamba, mlp, default, {"rotary": False})


class Zamba2ForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(_RENAMES, (_blocks, split_evenly("gate_up_proj", "gate_proj", "up_proj"), split_mamba2))
    decoder_class = ZambaDecoder

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("num_logits_to_keep", "use_mamba_kernels", "use_mem_eff_path", "chunk_size", "use_conv_bias")
        reader.ignore("mamba_headdim", "kv_channels", "num_query_groups", "hybrid_layer_ids", *_OF_STEPS)
        reader.only("attention_hidden_size", 2 * reader.hidden_size)
        reader.only("use_long_context", False)
        reader.only("use_shared_mlp_adapter", True)
        bias = reader.boolean("add_bias_linear", default=False)
        groups = reader.integer("mamba_ngroups", default=1)
        inner = int(reader.number("mamba_expand", default=2) * reader.hidden_size)
        heads = reader.integer("n_mamba_heads", default=8)
        if inner % heads or heads % groups:
            raise reader.refuse("n_mamba_heads", f"it must divide {inner}, and mamba_ngroups={groups} divide it")
        mamba = Mamba2Spec(
            heads,
            inner // heads,
            reader.integer("mamba_d_state", default=64),
            groups,
            reader.integer("mamba_d_conv", default=4),
            norm_groups=groups,
            norm_eps=1e-5,
            in_bias=bias,
            out_bias=bias,
            dt_limits=(reader.number("time_step_min", default=0.001), torch.inf),
        )
        regular = (["linear_attention"] * 5 + ["hybrid"]) * 7
        default = ["linear_attention", *regular, *["linear_attention"] * 4, "hybrid", *["linear_attention"] * 3]
        default += ["hybrid", *["linear_attention"] * 2]
        mlp = reader.mlp("gelu", bias, size=4 * reader.hidden_size)
        has_rotary = reader.boolean("use_mem_rope", default=False)
        if not has_rotary:
            reader.ignore("rope_parameters", "rope_scaling", "rope_theta")
        adapts = reader.boolean("use_shared_attention_adapter", default=False)
        own = {
            "num_blocks": reader.integer("num_mem_blocks", default=1),
            "adapter_rank": reader.integer("adapter_rank", default=128),
            "adapts_attention": adapts,
        }
        return _describe(reader, mamba, mlp, default, {"rotary": has_rotary}, **own)


# These options make weights.
_OF_STEPS = ("time_step_min", "time_step_max", "time_step_floor")


def _describe(
    reader: ConfigReader, mamba: StateSpec, mlp: MlpSpec, default: list[str], fields_: dict[str, Any], **own: Any
) -> ZambaSpec:
    """`default`: the layers' kinds; `fields_`: of the attention."""
    kinds = layer_kinds(reader, default, "linear_attention", "hybrid")
    head_dim = reader.integer("attention_head_dim", "head_dim", default=2 * reader.hidden_size // reader.num_heads)
    if fields_["rotary"]:
        fields_["rotary"] = reader.rotary(head_dim)
    attention = reader.attention(head_dim=head_dim, bias=False, scale=(head_dim / 2) ** -0.5, **fields_)
    is_hybrid = [kind == "hybrid" for kind in kinds]
    spec = reader.decoder(
        [BesideSpec(attention, mamba) if each else mamba for each in is_hybrid],
        [mlp if each else None for each in is_hybrid],
        reader.norm(eps=1e-5),
        tied=True,
    )
    return ZambaSpec(**{field.name: getattr(spec, field.name) for field in fields(spec)}, **own)
