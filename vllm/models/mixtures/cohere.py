"""Command's mixtures: attention and mixture in parallel, interleaved rotary positions in layers with a window."""

from __future__ import annotations

from dataclasses import replace

from vllm.models.checkpoint_names import CheckpointNames, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.spec import DecoderSpec, MlpSpec, MoeSpec


class Cohere2MoeForCausalLM(DecoderForCausalLM):
    names = CheckpointNames(transforms=(split_experts(),))

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        reader.ignore("order_of_interleaved_layers", "position_embedding_type", "rotary_pct", "use_embedding_sharing")
        reader.ignore("use_gated_activation", "use_parallel_block", "use_parallel_embedding")
        eps = reader.optional_number("rms_norm_eps")
        norm = reader.layer_norm(bias=False) if eps is None else reader.norm()
        reader.ignore("layer_norm_eps")
        num_dense = reader.count("first_k_dense_replace", default=0)
        mlps = cls._mlps(reader, num_dense)
        head_dim = reader.head_dim_or(128)
        attention = reader.attention(head_dim=head_dim, rotary=reader.rotary(head_dim, interleaved=True))
        prefix = reader.integer("prefix_dense_sliding_window_pattern", default=1)
        pattern = reader.integer("sliding_window_pattern", "_sliding_window_pattern", default=4)
        places = [*range(num_dense), *range(reader.num_layers - num_dense)]
        kinds = [
            "sliding_attention" if (place + 1) % (prefix if i < num_dense else pattern) else "full_attention"
            for i, place in enumerate(places)
        ]
        layers = reader.windowed(attention, default_window=4096, default_kinds=kinds)
        layers = tuple(
            layer if layer.window or (prefix == 1 and isinstance(mlp, MlpSpec)) else replace(layer, rotary=None)
            for layer, mlp in zip(layers, mlps, strict=True)
        )
        scale = reader.number("logit_scale", default=0.0625)
        return reader.decoder(layers, mlps, norm, tied=True, block="parallel", logits_scale=scale)

    @classmethod
    def _mlps(cls, reader: ConfigReader, num_dense: int) -> tuple[MlpSpec | MoeSpec, ...]:
        scores = reader.get("expert_selection_fn", default="softmax")
        if scores not in ("softmax", "sigmoid"):
            raise reader.refuse("expert_selection_fn", "it must be softmax or sigmoid")
        ways = reader.get("shared_expert_combination_strategy", default="average")
        if ways not in ("sum", "average"):
            raise reader.refuse("shared_expert_combination_strategy", "it must be sum or average")
        size = reader.integer("intermediate_size", default=22528)
        num_shared = reader.count("num_shared_experts", default=0)
        renormalised = reader.boolean("norm_topk_prob", default=True)
        mixture = reader.mixture(
            size,
            8,
            2,
            scores=scores,
            compares_logits=True,
            renormalised=renormalised and scores == "sigmoid",
            shared_size=num_shared * size,
            sum_scale=0.5 if num_shared and ways == "average" else 1.0,
        )
        mlp = MlpSpec(reader.integer("prefix_dense_intermediate_size", default=size), mixture.activation)
        return reader.mixed(mixture, mlp, reader.first_dense(num_dense))
