"""The first GPT: norms on the residual stream after attention and after the MLP."""

from __future__ import annotations

from vllm.models.checkpoint_names import CheckpointNames, split_qkv, transposed
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.dense.gpt2 import GPT2_MASKS, GPT2_RENAMES, describe
from vllm.models.spec import DecoderSpec


class OpenAIGPTLMHeadModel(DecoderForCausalLM):
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
        # What it calls gelu is the approximation by tanh.
        activation = "gelu_new" if name == "gelu" else name
        attention = reader.attention(rotary=False, bias=True)
        return describe(reader, attention, activation, default_positions=512, block="post", final_norm=None)
