"""Llama 4's text decoder (huggingface.co/meta-llama/Llama-4-Scout-17B-16E): interleaved rotary positions in most
layers, which attend within chunks of a sequence, scores that grow with the position in the others, experts whose inputs
are weighed."""

from __future__ import annotations

from dataclasses import replace

from vllm.models.checkpoint_names import CheckpointNames, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import AttentionSpec, DecoderSpec, MlpSpec, MoeSpec, NormSpec


class Llama4ForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(
        (
            (r"\.feed_forward\.", ".mlp."),
            (r"\.mlp\.router\.", ".mlp.gate."),
            (r"\.mlp\.shared_expert\.", ".mlp.shared_experts."),
        ),
        (split_experts(is_transposed=True),),
    )

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("router_jitter_noise", "for_llm_compressor")
        layers = cls._layers(reader)
        longest = reader.integer("max_position_embeddings", default=131072)
        chunk = None
        if not reader.is_given("attention_chunk_size") or reader.get("attention_chunk_size") is not None:
            chunk = reader.integer("attention_chunk_size", default=8192)
        kinds = ["full_attention" if layer.rotary is None or chunk is None else "chunked_attention" for layer in layers]
        kinds = reader.kinds("layer_types", kinds, "full_attention", "chunked_attention")
        if chunk is None and "chunked_attention" in kinds:
            raise reader.refuse("attention_chunk_size", "layer_types names chunked_attention")
        chunked = [replace(layer, chunk=chunk) for layer in layers]
        layers = [chunked[i] if kind == "chunked_attention" else layers[i] for i, kind in enumerate(kinds)]
        return reader.decoder(layers, cls._mlps(reader), reader.norm(eps=1e-5), max_positions=longest)

    @classmethod
    def _layers(cls, reader: ConfigReader) -> list[AttentionSpec]:
        head_dim = reader.head_dim_or(128)
        rotary = reader.rotary(head_dim, theta=500000.0, interleaved=True)
        eps = reader.norm(eps=1e-5).eps
        norm = NormSpec("rms", eps, weight=False) if reader.boolean("use_qk_norm", default=True) else None
        rotating = reader.attention(head_dim=head_dim, rotary=rotary, qk_norm=norm, qk_norm_after_rotary=True)
        growth = reader.number("attn_scale", default=0.1), reader.number("floor_scale", default=8192)
        other = replace(rotating, rotary=None, qk_norm=None, qk_norm_after_rotary=False)
        # The first checkpoints have a number.
        if reader.get("attn_temperature_tuning", default=True):
            other = replace(other, query_growth=growth, growth_start=1)
        return [rotating if flag else other for flag in reader.with_positions()]

    @classmethod
    def _mlps(cls, reader: ConfigReader) -> list[MlpSpec | MoeSpec]:
        size = reader.integer("intermediate_size", default=8192)
        mixture = reader.mixture(
            size, 16, 1, scores="sigmoid", compares_logits=True, weighs_inputs=True, shared_size=size
        )
        dense = MlpSpec(reader.integer("intermediate_size_mlp", default=16384), mixture.activation)
        step = reader.integer("interleave_moe_layer_step", default=1)
        sparse = reader.get("moe_layers", default=list(range(step - 1, reader.num_layers, step)))
        return [mixture if index in sparse else dense for index in range(reader.num_layers)]
