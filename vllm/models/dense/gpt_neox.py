"""GPT-NeoX and Pythia (arXiv:2204.06745): attention and MLP in parallel, each with its norm; partial rotary
positions. Its Japanese kin has them one after another."""

from __future__ import annotations

from dataclasses import replace

from vllm.models.checkpoint_names import MEGATRON, CheckpointNames, split_grouped_qkv
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class GPTNeoXForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        (
            (r"^gpt_neox(_japanese)?\.", "model."),
            (r"^(model\.)?embed_in\.", "model.embed_tokens."),
            (r"^(model\.)?final_layer_norm\.", "model.norm."),
            (r"^embed_out\.", "lm_head."),
            (r"\.attention\.dense_bias$", ".self_attn.o_proj.bias"),
            *MEGATRON,
        ),
        (split_grouped_qkv,),
        r".*\.attention\.(masked_)?bias|.*\.attention\.rotary_emb\.inv_freq",
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        rotary = reader.rotary(
            reader.head_dim, partial=0.25, theta_names=("rotary_emb_base",), share_names=("rotary_pct",)
        )
        # Files have them beside the older names that count.
        for newer, older, value in (
            ("rope_theta", "rotary_emb_base", rotary.rope.theta),
            ("partial_rotary_factor", "rotary_pct", rotary.dim / reader.head_dim),
        ):
            if reader.get(newer, default=value) != value:
                raise reader.refuse(newer, f"{older} says {value}")
        is_parallel = reader.boolean("use_parallel_residual", default=True)
        return reader.decoder(
            reader.attention(bias=reader.boolean("attention_bias", default=True), rotary=rotary),
            reader.mlp("gelu", bias=True, gated=False),
            reader.layer_norm(),
            block="parallel_two" if is_parallel else "pre",
        )


class GPTNeoXJapaneseForCausalLM(GPTNeoXForCausalLM):
    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        rotary = reader.rotary(reader.head_dim, theta_names=("rotary_emb_base",), share_names=("rotary_pct",))
        attention = reader.attention(bias=False, rotary=rotary)
        # The last layer alone has a bias, that of its output.
        layers = [attention] * (reader.num_layers - 1) + [replace(attention, o_bias=True)]
        size = reader.integer("intermediate_multiple_size", default=4) * reader.hidden_size
        reader.only("intermediate_size", size)
        mlp = reader.mlp("gelu", bias=False, gated=False, size=size)
        return reader.decoder(layers, mlp, reader.layer_norm(), tied=True)
