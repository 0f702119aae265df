"""Gemma (arXiv:2403.08295), Gemma 2, Gemma 3 (text) and VaultGemma: norms with 1 + weight, scaled embeddings, tied
heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from vllm.models.checkpoint_names import OUTPUT_NORMS, CheckpointNames
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import AttentionSpec, Block, DecoderSpec, MlpSpec, NormSpec

_MLP_NORM = (r"\.pre_feedforward_layernorm\.", ".post_attention_layernorm.")
BOTH_NORMS = CheckpointNames((*OUTPUT_NORMS, _MLP_NORM))


def describe(
    reader: ConfigReader,
    block: Block,
    layers: Sequence[AttentionSpec],
    softcap: float | None,
    mlp: MlpSpec | Sequence[MlpSpec] | None = None,
    norm: NormSpec | None = None,
) -> DecoderSpec:
    """A Gemma of these layers; `softcap` is the family's default for logits, `norm` 1 + weight if None."""
    # In files of Gemma 2 and later it is an older option beside the one that counts.
    reader.ignore("hidden_act")
    # "vision" is about images' tokens.
    if reader.get("use_bidirectional_attention") in (True, "all"):
        # The file's windows are those of causal layers: here a half is before a token and a half is after it.
        halved = [None if layer.window is None else layer.window // 2 + 1 for layer in layers]
        layers = [replace(layer, window=window) for layer, window in zip(layers, halved, strict=True)]
    return reader.decoder(
        layers,
        mlp or reader.mlp("gelu_pytorch_tanh", bias=False, activation_names=("hidden_activation",)),
        norm or reader.norm(offset=1.0),
        tied=True,
        block=block,
        embedding_scale=math.sqrt(reader.hidden_size),
        logits_softcap=reader.optional_number("final_logit_softcapping", default=softcap),
    )


def attention_of(reader: ConfigReader, **fields: Any) -> AttentionSpec:
    """Attention with the scale that Gemma 2 has brought."""
    return reader.attention(
        head_dim=reader.integer("head_dim", default=256),
        scale=reader.number("query_pre_attn_scalar", default=256.0) ** -0.5,
        **fields,
    )


class GemmaForCausalLM(DecoderForCausalLM):
    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        attention = reader.attention(head_dim=reader.integer("head_dim", default=256))
        mlp = reader.mlp("gelu_pytorch_tanh", bias=False, activation_names=("hidden_act",))
        if mlp.activation == "gelu":
            # The published files say this and do not mean it.
            mlp = replace(mlp, activation="gelu_pytorch_tanh")
        if reader.get("hidden_activation", default=mlp.activation) != mlp.activation:
            raise reader.refuse("hidden_activation", f"hidden_act says {mlp.activation}")
        return describe(reader, "pre", (attention,) * reader.num_layers, None, mlp)


class Gemma2ForCausalLM(DecoderForCausalLM):
    names = BOTH_NORMS
    block: ClassVar[Block] = "both"

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("cache_implementation")
        reader.only("sliding_window_size", reader.get("sliding_window", default=4096))
        kinds = reader.every_nth_full(2)
        attention = attention_of(reader, softcap=reader.optional_number("attn_logit_softcapping", default=50.0))
        layers = reader.windowed(attention, default_window=4096, default_kinds=kinds)
        return describe(reader, cls.block, layers, 30.0)


class VaultGemmaForCausalLM(Gemma2ForCausalLM):
    names = CheckpointNames((_MLP_NORM,))
    block = "pre"


class Gemma3ForCausalLM(DecoderForCausalLM):
    names = BOTH_NORMS

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("cache_implementation")
        pattern = reader.integer("sliding_window_pattern", "_sliding_window_pattern", default=6)
        attention = attention_of(reader, rotary=False, qk_norm=reader.norm(offset=1.0))
        kinds = reader.every_nth_full(pattern)
        layers = reader.by_kind(attention, kinds, default_window=4096, theta=1e6, sliding_theta=10000.0)
        return describe(reader, "both", layers, None)
