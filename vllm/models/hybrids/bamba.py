"""Bamba (huggingface.co/ibm-ai-platform/Bamba-9B): Llama with Mamba 2 in most layers."""

from __future__ import annotations

from vllm.models.checkpoint_names import CheckpointNames
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.hybrids.options import mamba2_of_hybrid
from vllm.models.hybrids.weights import MAMBA_RENAMES, split_mamba2
from vllm.models.spec import DecoderSpec

_RENAMES = (
    *MAMBA_RENAMES,
    (r"\.feed_forward\.", ".mlp."),
    (r"\.pre_ff_layernorm\.", ".post_attention_layernorm."),
    (r"\.final_layernorm\.", ".norm."),
)


class BambaForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(_RENAMES, (split_mamba2,))

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("num_logits_to_keep", "layer_types", "layers_block_type")
        rotary = reader.rotary(reader.head_dim, partial=0.5)
        reader.only("attn_rotary_emb", rotary.dim)
        attention = reader.attention(rotary=rotary)
        mamba = mamba2_of_hybrid(reader)
        with_attention = reader.get("attn_layer_indices", default=[])
        layers = [attention if index in with_attention else mamba for index in range(reader.num_layers)]
        return reader.decoder(layers, reader.mlp(size=14336), reader.norm(eps=1e-5))
