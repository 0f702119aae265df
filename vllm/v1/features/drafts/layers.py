"""Loads layers that take the target's hidden states."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vllm.config import ModelConfig, VllmConfig
from vllm.config.checkpoint.shards import shard_files
from vllm.config.checkpoint.weight_files import tensor_files
from vllm.config.speculative import num_named_layers
from vllm.loader import get_model
from vllm.models.decoder import Decoder, DecoderForCausalLM
from vllm.models.eagle import EagleHead, stream_layers
from vllm.models.predictor import Predictor

_INSTEAD = "take method='ngram' or 'suffix', or a draft model"


def load_layers(config: VllmConfig, target: Any, device: torch.device) -> tuple[Any, ModelConfig]:
    """This rank's share of the layers that the configuration asks for, and their configuration. ValueError: the
    target's family has none, or its checkpoint, or its blocks give no streams."""
    speculative = config.speculative_config
    assert speculative is not None and speculative.num_speculative_tokens is not None
    if speculative.method == "mtp":
        count = min(num_prediction_layers(config.model_config, type(target)), speculative.num_speculative_tokens)
        part = partial(Predictor, type(target), count)
        return get_model(config.model_config, device, part=part), config.model_config
    # Positions go as far as the target's.
    own = replace(speculative.draft_model_config, max_model_len=config.model_config.max_model_len)
    decoder = getattr(target, "model", None)
    if type(decoder) is not Decoder or decoder.project_out is not None:
        raise ValueError(
            f"speculative_config: method={speculative.method!r} cannot be used with "
            f"{config.model_config.architecture}; {_INSTEAD}"
        )
    if own.hf_config.hidden_size != config.model_config.hf_config.hidden_size:
        raise ValueError(
            f"speculative_config: model={speculative.model!r} has hidden_size={own.hf_config.hidden_size}, and the "
            f"target {config.model_config.hf_config.hidden_size}: it is another model's head"
        )
    folder = Path(own.path)
    names = tensor_files(shard_files(folder))
    head: Any = get_model(own, device, part=partial(EagleHead, folder, speculative.method == "eagle3", set(names)))
    keep_streams(config, target)
    return head, own


def keep_streams(config: VllmConfig, target: Any) -> None:
    """Have the target, or a stage of it, keep the streams that the configured layers take, if they take any."""
    speculative = config.speculative_config
    if speculative is not None and speculative.method == "eagle3":
        folder, decoder = Path(speculative.draft_model_config.path), target.model
        decoder.kept_streams = stream_layers(folder, len(decoder.layers))


def num_prediction_layers(config: ModelConfig, model_class: type) -> int:
    """How many the checkpoint has. ValueError: none, or the model's family has none here."""
    prediction = model_class.prediction if issubclass(model_class, DecoderForCausalLM) else None
    where = f"speculative_config: method='mtp' cannot be used with {config.model}"
    if prediction is None:
        raise ValueError(f"{where}: prediction layers of {config.architecture} are not read; {_INSTEAD}")
    num_layers, raw = config.hf_config.num_hidden_layers, config.hf_config.raw
    if not prediction.have_windows and "sliding_attention" in (raw.get("mtp_layer_types") or ()):
        raise ValueError(f"{where}: mtp_layer_types={raw['mtp_layer_types']} is not supported; {_INSTEAD}")
    if config.load_format == "dummy":
        return num_named_layers(raw)
    count = prediction.count(tensor_files(shard_files(Path(config.path))), num_layers)
    if not count:
        raise ValueError(f"{where}: the checkpoint has no prediction layers; {_INSTEAD}")
    return count
