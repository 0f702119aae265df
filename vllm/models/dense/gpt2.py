"""GPT-2, and what has its names: learned positions, LayerNorm, plain MLP."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vllm.models.checkpoint_names import CheckpointNames, split_grouped_qkv, split_qkv, transposed
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import AttentionSpec, DecoderSpec, PositionSpec

GPT2_RENAMES = (
    (r"^transformer\.", ""),
    (r"^h\.", "model.layers."),
    (r"^wte\.", "model.embed_tokens."),
    (r"^wpe\.", "model.embed_positions."),
    (r"^ln_f\.", "model.norm."),
    (r"\.ln_1\.", ".input_layernorm."),
    (r"\.ln_2\.", ".post_attention_layernorm."),
    (r"\.attn\.c_attn\.", ".self_attn.qkv_proj."),
    (r"\.attn\.c_proj\.", ".self_attn.o_proj."),
    (r"\.mlp\.c_fc\.", ".mlp.up_proj."),
    (r"\.mlp\.c_proj\.", ".mlp.down_proj."),
)
# The causal mask, in older checkpoints.
GPT2_MASKS = r".*\.attn(\.attention)?\.(masked_)?bias"


def scaled_layers(reader: ConfigReader, attention: AttentionSpec) -> list[AttentionSpec]:
    """`attention` with the factor on the scores of each layer."""
    scale = reader.head_dim**-0.5 if reader.boolean("scale_attn_weights", default=True) else 1.0
    by_layer = reader.boolean("scale_attn_by_inverse_layer_idx", default=False)
    return [replace(attention, scale=scale / (i + 1) if by_layer else scale) for i in range(reader.num_layers)]


def describe(
    reader: ConfigReader,
    attention: AttentionSpec | Sequence[AttentionSpec],
    activation: str = "gelu_new",
    default_positions: int | None = 1024,
    **fields: Any,
) -> DecoderSpec:
    """A decoder with learned positions, LayerNorm and a plain MLP of four times the width."""
    num_positions = reader.integer("n_positions", "max_position_embeddings", default=default_positions)
    return reader.decoder(
        attention,
        reader.mlp(activation, bias=True, gated=False, size=4 * reader.hidden_size),
        reader.layer_norm(),
        tied=True,
        max_positions=num_positions,
        positions=PositionSpec("learned", num_positions),
        **fields,
    )


class GPT2LMHeadModel(DecoderForCausalLM):
    """Its weights are stored as [inputs, outputs]."""

    names = CheckpointNames(GPT2_RENAMES, (transposed("qkv_proj|o_proj|up_proj|down_proj"), split_qkv), GPT2_MASKS)

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        return describe(reader, scaled_layers(reader, reader.attention(rotary=False, bias=True)))


class GPTBigCodeForCausalLM(DecoderForCausalLM):
    """GPT-BigCode, SantaCoder and StarCoder (arXiv:2301.03988): one key/value head for all queries."""

    names = CheckpointNames(GPT2_RENAMES, (split_grouped_qkv,), GPT2_MASKS)

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("inference_runner", "validate_runner_input", "pre_allocate_kv_cache", "pad_key_length")
        reader.ignore("max_batch_size")
        kv_heads = 1 if reader.boolean("multi_query", default=True) else reader.num_heads
        attention = reader.attention(rotary=False, bias=True, num_kv_heads=kv_heads)
        return describe(reader, scaled_layers(reader, attention), "gelu_pytorch_tanh")


class GPTNeoForCausalLM(DecoderForCausalLM):
    """GPT-Neo (github.com/EleutherAI/gpt-neo): scores are not scaled, some layers have a window."""

    names = CheckpointNames(
        (
            (r"\.attn\.attention\.out_proj\.", ".self_attn.o_proj."),
            (r"\.attn\.attention\.([qkv]_proj)\.", r".self_attn.\1."),
            *GPT2_RENAMES,
        ),
        ignored=GPT2_MASKS,
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        kinds = [kind for cycle, count in reader.get("attention_types") or () for kind in cycle * count]
        kinds = reader.get("attention_layers", default=kinds)
        if len(kinds) != reader.num_layers or set(kinds) - {"global", "local"}:
            raise reader.refuse("attention_types", f"they must name global or local for {reader.num_layers} layers")
        window = reader.integer("window_size", default=256)
        attention = reader.attention(rotary=False, bias=False, o_bias=True, scale=1.0)
        layers = [replace(attention, window=window if kind == "local" else None) for kind in kinds]
        return describe(reader, layers, default_positions=None)


class OpenAIGPTLMHeadModel(DecoderForCausalLM):
    """The first GPT: norms on the residual stream after attention and after the MLP."""

    names = CheckpointNames(
        (
            (r"^(transformer\.)?tokens_embed\.", "model.embed_tokens."),
            (r"^(transformer\.)?positions_embed\.", "model.embed_positions."),
            *GPT2_RENAMES,
        ),
        (transposed("qkv_proj|o_proj|up_proj|down_proj"), split_qkv),
        GPT2_MASKS,
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        name = reader.get("afn", default="gelu")
        # Its gelu is the approximation by tanh.
        activation = "gelu_new" if name == "gelu" else name
        attention = reader.attention(rotary=False, bias=True)
        return describe(reader, attention, activation, default_positions=512, block="post", final_norm=None)
