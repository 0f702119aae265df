"""Llama (arXiv:2302.13971): pre-norm blocks, rotary positions, grouped-query attention, gated MLP; and models that
differ from it by an option or two."""

from __future__ import annotations

import math
from dataclasses import replace

from vllm.models.checkpoint_names import CheckpointNames
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class LlamaForCausalLM(DecoderForCausalLM):
    """Also SmolLM2, Yi, Vicuna, and the dense DeepSeek models."""

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        return reader.decoder(reader.attention(), reader.mlp(), reader.norm())


class ArceeForCausalLM(DecoderForCausalLM):
    """AFM (huggingface.co/arcee-ai/AFM-4.5B): a plain MLP of squared ReLU."""

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        return reader.decoder(reader.attention(), reader.mlp("relu2", gated=False), reader.norm(eps=1e-5))


class CwmForCausalLM(DecoderForCausalLM):
    """Code World Model (arXiv:2510.02387): a window in three of four layers."""

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.need("rope_parameters", "rope_scaling")
        attention = reader.attention(head_dim=reader.integer("head_dim", default=128), bias=False, rotary=False)
        attention = replace(attention, rotary=reader.rotary(attention.head_dim, theta=1000000.0))
        kinds = reader.every_nth_full(4, is_first=True)
        layers = reader.windowed(attention, default_window=8192, default_kinds=kinds)
        return reader.decoder(layers, reader.mlp(), reader.norm(eps=1e-5))


class Ernie4_5ForCausalLM(DecoderForCausalLM):
    """ERNIE 4.5 (huggingface.co/baidu/ERNIE-4.5-0.3B-PT): interleaved rotary positions."""

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        bias = reader.boolean("use_bias", default=False)
        head_dim = reader.head_dim_or(128)
        rotary = reader.rotary(head_dim, theta=500000.0, interleaved=True)
        return reader.decoder(
            reader.attention(head_dim=head_dim, bias=bias, rotary=rotary),
            reader.mlp(bias=bias),
            reader.norm(eps=1e-5),
            tied=True,
        )


class HeliumForCausalLM(DecoderForCausalLM):
    """Helium (huggingface.co/kyutai/helium-1-preview-2b): interleaved rotary positions."""

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        head_dim = reader.head_dim_or(128)
        rotary = reader.rotary(head_dim, theta=100000.0, interleaved=True)
        attention = reader.attention(head_dim=head_dim, o_bias=False, rotary=rotary)
        return reader.decoder(attention, reader.mlp(), reader.norm(eps=1e-8))


class HunYuanDenseV1ForCausalLM(DecoderForCausalLM):
    """Hunyuan, dense (huggingface.co/tencent/Hunyuan-7B-Instruct): norms of heads after the rotation."""

    names = CheckpointNames(
        (
            (r"\.self_attn\.query_layernorm\.", ".self_attn.q_norm."),
            (r"\.self_attn\.key_layernorm\.", ".self_attn.k_norm."),
        )
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("attention_head_dim", "cla_share_factor", "mask_init_id", "norm_type", "pool_type", "use_qk_norm")
        reader.ignore("im_start_id", "im_end_id", "im_newline_id", "pad_id", "sep_id", "eod_id")
        reader.ignore("text_start_id", "text_end_id", "dense_list", "class_num", "enable_lm_head_fp32")
        reader.only("use_rotary_pos_emb", True)
        norm = reader.norm(eps=1e-5)
        attention = reader.attention(qk_norm=norm, qk_norm_after_rotary=True)
        return reader.decoder(attention, reader.mlp(bias=False), norm)


class MiniCPMForCausalLM(DecoderForCausalLM):
    """MiniCPM (arXiv:2404.06395): factors on embeddings, residuals and logits."""

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        base = reader.integer("dim_model_base", default=reader.hidden_size)
        return reader.decoder(
            reader.attention(),
            reader.mlp(),
            reader.norm(),
            tied=True,
            embedding_scale=reader.number("scale_emb", default=1.0),
            residual_scale=reader.number("scale_depth", default=math.sqrt(reader.num_layers))
            / math.sqrt(reader.num_layers),
            logits_scale=base / reader.hidden_size,
        )


class SeedOssForCausalLM(DecoderForCausalLM):
    """Seed-OSS (huggingface.co/ByteDance-Seed/Seed-OSS-36B-Instruct): a bias on queries, keys and values."""

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        attention = reader.attention(
            head_dim=reader.head_dim_or(128),
            bias=False,
            qkv_bias=reader.boolean("attention_bias", default=True),
            o_bias=reader.boolean("attention_out_bias", default=False),
        )
        return reader.decoder(attention, reader.mlp(), reader.norm())


class SmolLM3ForCausalLM(DecoderForCausalLM):
    """SmolLM3 (huggingface.co/HuggingFaceTB/SmolLM3-3B): no positions in every fourth layer."""

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        flags = reader.with_positions()
        rotary = reader.rotary(reader.head_dim, theta=2000000.0)
        kinds = ["full_attention" if flag else "sliding_attention" for flag in flags]
        layers = reader.windowed(reader.attention(rotary=rotary), switch="use_sliding_window", default_kinds=kinds)
        layers = tuple(
            layer if flag else replace(layer, rotary=None) for layer, flag in zip(layers, flags, strict=True)
        )
        return reader.decoder(layers, reader.mlp(), reader.norm(), tied=True)
