"""The first GPT: norms on the residual stream after attention and after the MLP."""

from __future__ import annotations

from vllm.models.checkpoint_names import CheckpointNames, split_qkv, transposed
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.dense.gpt2 import GPT2_MASKS, GPT2_RENAMES
from vllm.models.spec import DecoderSpec, PositionSpec


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
        num_positions = reader.integer("n_positions", default=512)
        return reader.decoder(
            reader.attention(rotary=False, bias=True),
            # What it calls gelu is the approximation by tanh.
            reader.mlp("gelu_new" if name == "gelu" else name, bias=True, gated=False, size=4 * reader.hidden_size),
            reader.layer_norm(),
            tied=True,
            block="post",
            final_norm=None,
            positions=PositionSpec("learned", num_positions),
        )
