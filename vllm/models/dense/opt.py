"""OPT (arXiv:2205.01068): learned positions, LayerNorm before or, in the 350m model, after each part of a block."""

from __future__ import annotations

from vllm.models.checkpoint_names import FAIRSEQ, TWO_LAYERS, CheckpointNames
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec, NormSpec, PositionSpec

# Row p + 2 of the position table belongs to position p.
_POSITION_OFFSET = 2


class OPTForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        (
            (r"^(model\.)?decoder\.", "model."),
            (r"^(model\.)?final_layer_norm\.", "model.norm."),
            *FAIRSEQ,
            *TWO_LAYERS,
        )
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        bias = reader.boolean("enable_bias", default=True)
        affine = reader.boolean("layer_norm_elementwise_affine", default=True)
        norm = NormSpec("layer", 1e-5, weight=affine, bias=affine)
        norm_before = reader.boolean("do_layer_norm_before", default=True)
        has_final_norm = norm_before and not reader.boolean("_remove_final_layer_norm", default=False)
        num_positions = reader.integer("max_position_embeddings")
        return reader.decoder(
            reader.attention(rotary=False, bias=bias),
            reader.mlp("relu", bias, gated=False),
            norm,
            tied=True,
            block="pre" if norm_before else "post",
            final_norm=norm if has_final_norm else None,
            embedding_size=reader.integer("word_embed_proj_dim", default=reader.hidden_size),
            positions=PositionSpec("learned", num_positions + _POSITION_OFFSET, _POSITION_OFFSET),
        )
