"""MiniMax 01 and M1 (arXiv:2501.08313): lightning attention in most layers of a mixture, attention in the others."""

from __future__ import annotations

from torch import Tensor

from vllm.models.checkpoint_names import BLOCK_SPARSE, CheckpointNames, Parts, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import AnyMixer, DecoderSpec
from vllm.models.states.specs import LightningSpec

_RENAMES = (*BLOCK_SPARSE, (r"\.self_attn\.output_gate\.", ".self_attn.gate_proj."))


def _split_heads(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """qkv_proj: of each head query, key and value."""
    if not name.endswith(".self_attn.qkv_proj.weight"):
        yield name, tensor
        return
    heads = tensor.unflatten(0, (spec.cached[0].num_heads, 3, -1))
    for index, part in enumerate(("q_proj", "k_proj", "v_proj")):
        yield name.replace("qkv_proj", part), heads[:, index].flatten(0, 1)


class MiniMaxForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        _RENAMES,
        (_split_heads, split_experts()),
        r".*\.self_attn\.(slope_rate|query_decay|key_decay|diagonal_decay)",
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("block_size", "router_jitter_noise")
        reader.only("hidden_act", "silu")
        count = reader.num_layers
        attention = reader.attention(bias=False, rotary=reader.rotary(reader.head_dim, theta=1000000.0))
        default = ["full_attention" if (index + 1) % 2 else "linear_attention" for index in range(count)]
        kinds = reader.kinds("layer_types", default, "linear_attention", "full_attention")
        layers: list[AnyMixer] = [
            attention if kind == "full_attention" else _lightning(reader, index) for index, kind in enumerate(kinds)
        ]
        mixture = reader.mixture(reader.integer("intermediate_size", default=14336), 8, 2, renormalised=True)
        for name in ("full_attn_beta_factor", "linear_attn_beta_factor", "mlp_beta_factor"):
            reader.only(name, 1)
        after = reader.number("mlp_alpha_factor", default=1.0)
        by_kind = {
            kind: reader.number(f"{name}_attn_alpha_factor", default=1.0)
            for kind, name in (("full_attention", "full"), ("linear_attention", "linear"))
        }
        scales = tuple((by_kind[kind], after) for kind in kinds)
        norm = reader.norm(eps=1e-5)
        return reader.decoder(layers, mixture, norm, residual_of_norm=True, stream_scales=scales)


def _lightning(reader: ConfigReader, index: int) -> LightningSpec:
    """Heads' memories last longer from layer to layer."""
    factor = 1 - index / (reader.num_layers - 1 + 1e-5) + 1e-5
    rates = tuple(2 ** (-8 * (head + 1) / reader.num_heads) * factor for head in range(reader.num_heads))
    return LightningSpec(rates, reader.head_dim, 1e-6)
