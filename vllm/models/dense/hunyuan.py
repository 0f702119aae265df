"""Hunyuan, dense (huggingface.co/tencent/Hunyuan-7B-Instruct): Llama with norms of heads after the rotation."""

from __future__ import annotations

from vllm.models.checkpoint_names import CheckpointNames
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class HunYuanDenseV1ForCausalLM(DecoderForCausalLM):
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
        reader.ignore("text_start_id", "text_end_id")
        norm = reader.norm(eps=1e-5)
        attention = reader.attention(qk_norm=norm, qk_norm_after_rotary=True)
        return reader.decoder(attention, reader.mlp(bias=False), norm)
