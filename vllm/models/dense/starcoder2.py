"""StarCoder2 (arXiv:2402.19173): LayerNorm, rotary positions, plain MLP, biases, and in some models a window."""

from __future__ import annotations

from vllm.models.checkpoint_names import CheckpointNames
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec


class Starcoder2ForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(((r"\.mlp\.c_fc\.", ".mlp.up_proj."), (r"\.mlp\.c_proj\.", ".mlp.down_proj.")))

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("mlp_type", "norm_type", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
        reader.only("scale_attn_weights", True)
        bias = reader.boolean("use_bias", default=True)
        return reader.decoder(
            reader.windowed(reader.attention(bias=bias)),
            reader.mlp("gelu_pytorch_tanh", bias, gated=False),
            reader.layer_norm(),
            tied=True,
        )
