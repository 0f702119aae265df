"""JetMoE (arXiv:2404.07413): mixtures of attention heads and of MLPs."""

from __future__ import annotations

from torch import Tensor

from vllm.models.checkpoint_names import CheckpointNames, Parts, split_evenly, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec, HeadMixtureSpec, NormSpec
from vllm.ops.choose_experts import ExpertChoice


def _by_key_heads(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """Experts' projections of queries [E, Hkv D, H] and outputs [E, H, Hkv D] as one, by key heads, then experts."""
    head_dim = spec.attentions[0].head_dim
    if name.endswith(".self_attn.q_proj.weight"):
        tensor = tensor.unflatten(1, (-1, head_dim)).transpose(0, 1).flatten(0, 2)
    elif name.endswith(".self_attn.o_proj.weight"):
        tensor = tensor.unflatten(2, (-1, head_dim)).permute(1, 2, 0, 3).flatten(1)
    yield name, tensor


class JetMoeForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        (
            (r"\.self_attention\.experts\.router\.layer\.", ".self_attn.gate."),
            (r"\.self_attention\.experts\.input_linear\.", ".self_attn.q_proj."),
            (r"\.self_attention\.experts\.output_linear\.", ".self_attn.o_proj."),
            (r"\.self_attention\.experts\.bias", ".self_attn.o_proj.bias"),
            (r"\.self_attention\.", ".self_attn."),
            (r"\.mlp\.input_linear\.weight", ".mlp.experts.gate_up_proj"),
            (r"\.mlp\.output_linear\.weight", ".mlp.experts.down_proj"),
            (r"\.mlp\.router\.layer\.", ".mlp.gate."),
            (r"\.mlp\.bias", ".mlp.output_bias"),
        ),
        (_by_key_heads, split_evenly("kv_proj", "k_proj", "v_proj"), split_experts()),
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        size = reader.integer("intermediate_size", default=5632)
        mixture = reader.mixture(size, 8, 2, compares_logits=True, output_bias=True)
        kv_heads = reader.integer("num_key_value_heads", default=16)
        num_heads = kv_heads * mixture.choice.num_chosen
        if reader.integer("num_attention_heads", default=num_heads) != num_heads:
            raise reader.refuse("num_attention_heads", f"a token takes {num_heads}: key heads times chosen experts")
        head_dim = reader.integer("head_dim", "kv_channels", default=128)
        attention = HeadMixtureSpec(
            num_heads,
            kv_heads,
            head_dim,
            o_bias=True,
            rotary=reader.rotary(head_dim),
            num_experts=mixture.num_experts,
            choice=ExpertChoice(mixture.choice.num_chosen, compares_logits=True),
        )
        # The layers' norms have a constant epsilon.
        norm = NormSpec("rms", 1e-6)
        return reader.decoder(attention, mixture, norm, tied=True, final_norm=reader.norm())
