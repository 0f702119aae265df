"""Methods of engines, of their configuration and of the registry that only upstream's callers call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from vllm.config.checkpoint.text_part import WHOLE
from vllm.inputs.text_options import text_options
from vllm.models.registry import PAIRS, encoder_archs, pooling_kind, resolve_model_class
from vllm.sampling_params import SamplingParams
from vllm.upstream.inputs import tokens_input

if TYPE_CHECKING:
    from torch import nn

    from vllm.config import ModelConfig, ParallelConfig
    from vllm.entrypoints.async_llm import AsyncLLM
    from vllm.entrypoints.llm import LLM

MaxLoRARanks = Literal[1, 8, 16, 32, 64, 128, 256, 320, 512]
"""For annotations: here an adapter may have any rank up to max_lora_rank, and that any value from 1 on."""

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def architectures(self: ModelConfig) -> list[str]:
    """The architectures that config.json names."""
    whole = self.hf_config.raw.get(WHOLE) or {}
    return list(whole.get("architectures") or self.hf_config.architectures)


def is_moe(self: ModelConfig) -> bool:
    """Whether some layer is a mixture of experts, by config.json."""
    raw = self.hf_config.raw
    return any(isinstance(count := raw.get(name), int) and count > 1 for name in _NUM_EXPERTS)


def uses_mrope(self: ModelConfig) -> bool:
    """Whether positions have several parts, as those of images have."""
    raw = self.hf_config.raw
    ropes = (raw.get("rope_parameters"), raw.get("rope_scaling"))
    return any("mrope_section" in rope for rope in ropes if isinstance(rope, Mapping))


def get_num_layers(self: ModelConfig, parallel_config: Any = None) -> int:
    """Layers of the decoder."""
    return self.hf_config.num_hidden_layers


def get_num_attention_heads(self: ModelConfig, parallel_config: Any = None) -> int:
    """Query heads of a rank of `parallel_config`; None: all."""
    return self.hf_config.num_attention_heads // getattr(parallel_config, "tensor_parallel_size", 1)


def use_mla(self: ModelConfig) -> bool:
    """Whether keys and values are compressed to one latent vector a token, by config.json."""
    return isinstance(self.hf_config.raw.get("kv_lora_rank"), int)


def get_head_size(self: ModelConfig) -> int:
    """Size of a head of the KV cache; of a latent vector with its rotary part, where there is one."""
    raw = self.hf_config.raw
    return raw["kv_lora_rank"] + raw.get("qk_rope_head_dim", 0) if use_mla(self) else self.hf_config.head_dim


def get_total_num_kv_heads(self: ModelConfig) -> int:
    """Heads of the KV cache, of all ranks together."""
    return 1 if use_mla(self) else self.hf_config.num_key_value_heads


def get_num_kv_heads(self: ModelConfig, parallel_config: Any = None) -> int:
    """Heads of the KV cache of a rank of `parallel_config`; None: all."""
    return max(1, get_total_num_kv_heads(self) // getattr(parallel_config, "tensor_parallel_size", 1))


def resolve_model_cls(
    self: Any, architectures: str | Sequence[str], model_config: Any = None
) -> tuple[type[nn.Module], str]:
    """The class of the first architecture that is known, and its name.

    Raises:
        ValueError: none of them is, or its class cannot be imported.
    """
    names = _listed(architectures)
    return resolve_model_class(names), next(name for name in names if name in self.get_supported_archs())


def is_text_generation_model(self: Any, architectures: str | Sequence[str], model_config: Any = None) -> bool:
    """Whether one of the architectures has a model here; all of them generate text."""
    return self.find(_listed(architectures)) is not None


def is_pooling_model(self: Any, architectures: str | Sequence[str], model_config: Any = None) -> bool:
    """Whether the architecture is an encoder, or a decoder whose name ends as those do that pool."""
    names = _listed(architectures)
    is_encoder = self.find(names) is None and not encoder_archs().isdisjoint(names)
    return pooling_kind(names) is not None or is_encoder


def is_multimodal_model(self: Any, architectures: str | Sequence[str], model_config: Any = None) -> bool:
    """Whether the model reads pictures; without `model_config`, whether one of the architectures is among those of
    transformers that do, of which some are refused when their engine starts."""
    if model_config is not None:
        return bool(model_config.reads_images)
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as READERS

    return not {*PAIRS, *READERS.values()}.isdisjoint(_listed(architectures))


def _listed(architectures: str | Sequence[str]) -> list[str]:
    return [architectures] if isinstance(architectures, str) else list(architectures)


def rank(self: ParallelConfig) -> int:
    """0, of an engine that is one process.

    Raises:
        AttributeError: there are several, which have this configuration in common.
    """
    if self.world_size > 1:
        raise AttributeError("the ranks have one ParallelConfig: get_tp_group().rank is a process's own")
    return 0


def get_sliding_window(self: ModelConfig) -> int | None:
    """Tokens that a query sees, by config.json; None: all."""
    raw = self.hf_config.raw
    window = raw.get("sliding_window")
    return window if isinstance(window, int) and raw.get("use_sliding_window") is not False else None


def read_generation_config(self: ModelConfig) -> dict[str, Any]:
    """The values of generation_config.json that are no defaults of transformers'."""
    from vllm.upstream.hf_configs import try_get_generation_config

    found = try_get_generation_config(self.path, self.trust_remote_code, self.revision)
    return {} if found is None else dict(found.to_diff_dict())


def get_diff_sampling_param(self: ModelConfig) -> dict[str, Any]:
    """The values that requests that name none sample with, beside SamplingParams' defaults."""
    return dict(self.default_sampling_params)


def preprocess_completions(
    self: LLM, prompts: Any, tokenization_kwargs: Mapping[str, Any] | None = None
) -> Sequence[Any]:
    """Prompts for `generate` with the ids of their texts; those of embeddings as they are.

    Raises:
        VLLMValidationError: see `generate`.
    """
    given = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
    if given and all(isinstance(each, int) for each in given):
        given = [given]
    options = text_options(tokenization_kwargs)
    params = options.applied(SamplingParams())
    found = self.llm_engine.input_processor.process_prompts(given, [params] * len(given), options=options)
    return [
        tokens_input(own.token_ids, prompt=own.text, cache_salt=own.cache_salt) if own.embeds is None else prompt
        for prompt, own in zip(given, found, strict=True)
    ]


def preprocess_completion(self: LLM, prompt: Any, tokenization_kwargs: Mapping[str, Any] | None = None) -> Any:
    """The only one of `preprocess_completions`."""
    (found,) = preprocess_completions(self, [prompt], tokenization_kwargs)
    return found


class CoreClients:
    """An AsyncLLM's engine cores to a caller that reaches for them."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine

    async def abort_requests_async(self, request_ids: Iterable[str]) -> None:
        """Drop requests by the ids they were added with; unknown ids are ignored."""
        await self._engine.abort(request_ids)
