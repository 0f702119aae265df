"""Parts that Gemma 3n and Gemma 4 share: last layers that read the keys and values of earlier ones, and an input of
each layer's own."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import Tensor

from vllm.models.checkpoint_names import CheckpointNames, Parts
from vllm.models.config_reader import ConfigReader
from vllm.models.dense.gemma import BOTH_NORMS
from vllm.models.spec import DecoderSpec, PerLayerInputSpec


def kv_sources(reader: ConfigReader, kinds: Sequence[str], default: int) -> list[int | None]:
    """By layer, whose keys and values it reads: of the last num_kv_shared_layers (`default` if the config has none),
    those of the last layer of its kind before these. None = its own."""
    shared = reader.count("num_kv_shared_layers", default=default)
    first = len(kinds) - shared
    last_of_kind = {kind: index for index, kind in enumerate(kinds[: max(first, 0)])}
    if set(kinds) - set(last_of_kind):
        raise reader.refuse("num_kv_shared_layers", "no layer of a kind has keys and values of its own")
    return [last_of_kind[kind] if index >= first else None for index, kind in enumerate(kinds)]


def per_layer_input(reader: ConfigReader, default_size: int, activation: str) -> PerLayerInputSpec | None:
    """The layers' own inputs, if the config gives them a width."""
    size = reader.count("hidden_size_per_layer_input", default=default_size)
    vocab_size = reader.integer("vocab_size_per_layer_input", default=262144)
    return PerLayerInputSpec(size, vocab_size, activation) if size else None


def _without_shared_keys(name: str, tensor: Tensor, spec: DecoderSpec) -> Parts:
    """Published checkpoints have keys and values of layers that read other layers'."""
    found = re.search(r"layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.", name)
    if found is None or int(found[1]) >= len(spec.layers) or spec.attentions[int(found[1])].kv_source is None:
        yield name, tensor


NAMES = CheckpointNames(
    (
        *BOTH_NORMS.renames,
        (r"(embed_tokens_per_layer|per_layer_model_projection|per_layer_projection_norm)\.", r"layer_inputs.\1."),
        (r"(per_layer_input_gate|per_layer_projection|post_per_layer_input_norm)\.", r"layer_input.\1."),
    ),
    (_without_shared_keys,),
)
