"""Which models can be split by layers."""

from __future__ import annotations

from vllm.config.checkpoint.config import HFConfig
from vllm.models.decoder import Decoder, DecoderForCausalLM
from vllm.models.registry import TRANSFORMERS, import_model_class, model_entry


def check_splits(config: HFConfig, model_impl: str) -> None:
    """Whether a model can be split by layers.

    Raises:
        ValueError: it cannot; the message says why, and what to do instead.
    """
    entry = model_entry(config.architectures, model_impl, config.raw)
    made = None if entry == TRANSFORMERS else import_model_class(entry)
    if made is None or not issubclass(made, DecoderForCausalLM):
        problem = "runs by a module of its own"
    elif made.decoder_class is not Decoder or made.spec_of(config).per_layer_input is not None:
        problem = "has layers that take more than the rows of the layer before"
    elif any(getattr(layer, "kv_source", None) is not None for layer in made.spec_of(config).layers):
        problem = "has layers that read other layers' keys and values"
    else:
        return
    name = ", ".join(config.architectures)
    raise ValueError(f"pipeline_parallel_size: {name} {problem}, and is not split by layers: use tensor_parallel_size")
