"""MiniMax M2 (huggingface.co/MiniMaxAI/MiniMax-M2): norms over the whole width, part of each head rotates, a sigmoid of
each logit."""

from __future__ import annotations

from dataclasses import replace

from vllm.models.checkpoint_names import BLOCK_SPARSE, CheckpointNames, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class MiniMaxM2ForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        (*BLOCK_SPARSE, (r"\.mlp\.e_score_correction_bias", ".mlp.gate.e_score_correction_bias")),
        (split_experts(),),
        r".*\.mtp\..*",
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("router_jitter_noise", "mlp_intermediate_size", "shared_moe_mode")
        reader.ignore("num_mtp_modules", "mtp_transformer_layers", "use_mtp")
        reader.only("attn_type_list", [1] * reader.num_layers)
        reader.only("qk_norm_type", "per_layer")
        reader.only("scoring_func", "sigmoid")
        for name in ("use_qk_norm", "use_routing_bias"):
            reader.only(name, True)
        head_dim = reader.head_dim_or(128)
        rotary = reader.rotary(head_dim, theta=5000000.0, partial=1.0)
        rotated, raw = reader.get("rotary_dim"), reader.config.raw
        shares = (raw, raw.get("rope_parameters") or raw.get("rope_scaling") or {})
        if rotated is not None and all("partial_rotary_factor" not in each for each in shares):
            rotary = replace(rotary, dim=reader.integer("rotary_dim"))
        attention = reader.attention(
            head_dim=head_dim, bias=False, rotary=rotary, qk_norm=reader.norm(), qk_norm_over="width"
        )
        mixture = reader.mixture(
            reader.integer("intermediate_size", default=1536),
            256,
            8,
            scores="sigmoid",
            correction=True,
            renormalised=True,
        )
        return reader.decoder(attention, mixture, reader.norm())
