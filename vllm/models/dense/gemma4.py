"""Gemma 4 (huggingface.co/google/gemma-4-E2B-it), the text decoder: heads of another size in layers without a window,
keys that are values too, layers that read earlier ones' keys, and mixtures beside MLPs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from vllm.config.checkpoint.config import RopeConfig
from vllm.models.checkpoint_names import Parts, split_experts
from vllm.models.config_reader import ConfigReader
from vllm.models.decoder import DecoderForCausalLM
from vllm.models.dense.gemma import describe
from vllm.models.dense.gemma_shared import NAMES, kv_sources, per_layer_input
from vllm.models.spec import AttentionSpec, DecoderSpec, MlpSpec, MoeSpec, RotarySpec

_ROPES = {
    "sliding_attention": RopeConfig("default", 10000.0),
    "full_attention": RopeConfig("proportional", 1e6, {"share": 0.25}),
}


def _mixture(reader: ConfigReader, mlp: Any) -> MoeSpec:
    """The mixture beside a layer's MLP."""
    return reader.mixture(
        reader.integer("moe_intermediate_size"),
        None,
        None,
        activation="gelu_pytorch_tanh",
        activation_names=("hidden_activation",),
        renormalised=True,
        shared=mlp,
        branch_norm=reader.norm(),
    )


def _of_mixture(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """The MLP beside a mixture, and the router's weight, which is divided by the root of the hidden size."""
    if isinstance(spec.mlps[0], MoeSpec):
        name = re.sub(r"\.mlp\.(gate|up|down)_proj\.", r".mlp.shared_experts.\1_proj.", name)
        if name.endswith(".mlp.router_norm.weight"):
            tensor = tensor.float() * spec.hidden_size**-0.5
    yield name, tensor


_MIXTURE_NAMES = (
    (r"(layers\.\d+)\.experts\.", r"\1.mlp.experts."),
    (r"(layers\.\d+)\.router\.proj\.", r"\1.mlp.gate."),
    (r"(layers\.\d+)\.router\.scale$", r"\1.mlp.router_norm.weight"),
    (r"(layers\.\d+)\.router\.per_expert_scale$", r"\1.mlp.expert_scale"),
    (r"\.post_feedforward_layernorm_1\.", ".mlp.shared_norm."),
    (r"\.pre_feedforward_layernorm_2\.", ".mlp.input_norm."),
    (r"\.post_feedforward_layernorm_2\.", ".mlp.output_norm."),
)


class Gemma4ForCausalLM(DecoderForCausalLM):
    names = replace(
        NAMES, renames=(*NAMES.renames, *_MIXTURE_NAMES), transforms=(*NAMES.transforms, _of_mixture, split_experts())
    )
    per_layer_size: ClassVar[int] = 256
    default_window: ClassVar[int] = 512

    @classmethod
    def describe(cls, reader: ConfigReader) -> DecoderSpec:
        kinds = reader.layer_kinds(reader.every_nth_full(6))
        kinds = [*kinds[:-1], "full_attention"]
        sources = kv_sources(reader, kinds, 0)
        spec = describe(reader, "both", cls.layers(reader, kinds, sources), None, norm=reader.norm())
        (mlp, *_) = spec.mlps
        assert isinstance(mlp, MlpSpec)
        if reader.boolean("use_double_wide_mlp", default=False):
            wide = replace(mlp, intermediate_size=2 * mlp.intermediate_size)
            spec = replace(spec, mlps=tuple(mlp if source is None else wide for source in sources))
        if reader.boolean("enable_moe_block", default=False):
            spec = replace(spec, mlps=tuple(_mixture(reader, each) for each in spec.mlps))
        reader.ignore("num_experts", "top_k_experts", "moe_intermediate_size")
        given = per_layer_input(reader, cls.per_layer_size, mlp.activation)
        return replace(spec, layer_scale=True, per_layer_input=given)

    @classmethod
    def layers(cls, reader: ConfigReader, kinds: Sequence[str], sources: Sequence[int | None]) -> list[AttentionSpec]:
        """The attention of each layer."""
        norm, window = reader.norm(), reader.integer("sliding_window", default=cls.default_window)
        base = reader.attention(
            rotary=False,
            head_dim=reader.integer("head_dim", default=256),
            scale=1.0,
            qk_norm=norm,
            v_norm=replace(norm, weight=False),
        )
        shares_values = reader.boolean("attention_k_eq_v", default=False)
        layers = []
        for (head_dim, kv_heads), kind, source in zip(cls.sizes(reader, base, kinds), kinds, sources, strict=True):
            layer = replace(base, head_dim=head_dim, num_kv_heads=kv_heads, kv_source=source)
            layer = replace(layer, rotary=cls.rotary(reader, head_dim, kind))
            is_full = kind == "full_attention"
            layers.append(replace(layer, window=None if is_full else window, value_is_key=shares_values and is_full))
        return layers

    @classmethod
    def rotary(cls, reader: ConfigReader, head_dim: int, kind: str) -> RotarySpec:
        """Rotary positions of layers of a kind."""
        if reader.get("rope_scaling"):
            raise reader.refuse("rope_scaling", "this model has rope_parameters for each kind of layer")
        if reader.get("rope_parameters") is None:
            return RotarySpec(head_dim, _ROPES[kind])
        return reader.rotary(head_dim, kind=kind)

    @classmethod
    def sizes(cls, reader: ConfigReader, base: AttentionSpec, kinds: Sequence[str]) -> list[tuple[int, int]]:
        """By layer, the width of a head and the number of key heads: in files by transformers for each layer, in
        published ones for layers without a window."""
        wide = reader.integer("global_head_dim", default=512)
        heads = reader.integer("num_global_key_value_heads", default=base.num_kv_heads)
        if not reader.boolean("attention_k_eq_v", default=False):
            heads = base.num_kv_heads
        given = reader.get("per_layer_config")
        sizes = []
        for index, kind in enumerate(kinds):
            own: dict[str, Any] = {"head_dim": base.head_dim, "num_key_value_heads": base.num_kv_heads}
            if given is not None:
                own |= given.get(str(index), {})
            elif kind == "full_attention":
                own = {"head_dim": wide, "num_key_value_heads": heads}
            if own.keys() - {"head_dim", "num_key_value_heads"}:
                raise reader.refuse("per_layer_config", "layers may differ in head_dim and num_key_value_heads")
            if base.num_heads % own["num_key_value_heads"]:
                raise reader.refuse("num_key_value_heads", f"they must divide {base.num_heads} query heads")
            sizes.append((own["head_dim"], own["num_key_value_heads"]))
        return sizes


class Gemma4UnifiedForCausalLM(Gemma4ForCausalLM):
    """Without inputs of the layers' own."""

    per_layer_size = 0
    default_window = 1024
