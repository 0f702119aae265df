"""XGLM (arXiv:2112.10668) and BioGPT: sinusoidal or learned positions, scaled embeddings, LayerNorm, plain MLP."""

from __future__ import annotations

import math
from typing import Literal

from vllm.models.checkpoint_names import FAIRSEQ, TWO_LAYERS, CheckpointNames
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec, NormSpec, PositionSpec

# Row p + 2 of the position table belongs to position p.
_POSITION_OFFSET = 2

_RENAMES = (
    (r"^biogpt\.", "model."),
    (r"^output_projection\.", "lm_head."),
    (r"^(model\.)?layer_norm\.", "model.norm."),
    *FAIRSEQ,
    *TWO_LAYERS,
)


def describe(reader: ConfigReader, positions: Literal["learned", "sinusoidal"], norm: NormSpec) -> DecoderSpec:
    """Either's decoder."""
    num_positions = reader.integer("max_position_embeddings")
    scales = reader.boolean("scale_embedding", default=True)
    return reader.decoder(
        reader.attention(rotary=False, bias=True),
        reader.mlp("gelu", bias=True, gated=False),
        norm,
        tied=True,
        embedding_scale=math.sqrt(reader.hidden_size) if scales else 1.0,
        positions=PositionSpec(positions, num_positions + _POSITION_OFFSET, _POSITION_OFFSET),
    )


class XGLMForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(_RENAMES, ignored=r".*embed_positions\.weights")

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        return describe(reader, "sinusoidal", NormSpec("layer", 1e-5, bias=True))


class BioGptForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(_RENAMES)

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("layer_norm_eps")
        return describe(reader, "learned", NormSpec("layer", 1e-5, bias=True))
