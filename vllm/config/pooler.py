"""Pooling models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from vllm.config.unserved import UnservedConfig, as_config, choice, number
from vllm.exceptions import shown
from vllm.transformers_utils.sentence_transformers import SentencePooling

SequencePoolingType = Literal["CLS", "LAST", "MEAN"]
TokenPoolingType = Literal["ALL", "STEP"]


@dataclass
class PoolerConfig(UnservedConfig):
    """How hidden states are made one vector."""

    instead: ClassVar[str] = (
        "of pooler_config, pooling_type (CLS, MEAN, LAST) and use_activation are served, and PoolingParams(dimensions=)"
    )
    harmless: ClassVar[frozenset[str]] = frozenset({"enable_flash_late_interaction"})

    task: str | None = None
    pooling_type: SequencePoolingType | TokenPoolingType | None = choice(None, "CLS", "LAST", "MEAN", "ALL", "STEP")
    seq_pooling_type: SequencePoolingType | None = choice(None, "CLS", "LAST", "MEAN")
    tok_pooling_type: TokenPoolingType | None = choice(None, "ALL", "STEP")
    use_activation: bool | None = None
    enable_flash_late_interaction: bool = True
    dimensions: int | None = number(None, 1)
    enable_chunked_processing: bool = False
    max_embed_len: int | None = number(None, 1)
    logit_mean: float | None = None
    logit_sigma: float | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None

    def applied_to(self, pooling: SentencePooling) -> SentencePooling:
        """A model's pooling, with the type that this asks for."""
        kind = self.seq_pooling_type or self.pooling_type
        return pooling if kind is None else replace(pooling, modes=(_MODES[kind],))


_MODES = {"CLS": "cls", "MEAN": "mean", "LAST": "lasttoken"}
_SERVED = frozenset({"pooling_type", "seq_pooling_type", "use_activation"})


def runner_fields(args: Any, is_pooling_model: bool) -> dict[str, Any]:
    """The fields of ModelConfig that say how a model runs and pools, by engine arguments.

    Raises:
        ValueError: what is asked for does not suit the model, or is not done.
    """
    runner, convert = args.runner, args.convert
    pooler = as_config("pooler_config", PoolerConfig, args.pooler_config) or PoolerConfig()
    if runner not in ("auto", "generate", "pooling"):
        raise ValueError(f"runner must be 'auto', 'generate' or 'pooling', got {runner!r}")
    if convert not in ("auto", "none"):
        raise ValueError(f"convert must be 'auto' or 'none', got {convert!r}: models are served as what they are")
    if not is_pooling_model:
        if runner == "pooling" or not pooler.is_neutral():
            asked = "runner='pooling'" if runner == "pooling" else "pooler_config"
            raise ValueError(f"{asked} needs an encoder (BERT, RoBERTa, XLM-RoBERTa), and this model generates")
        return {"runner": "generate", "pooler_config": pooler}
    if runner == "generate":
        raise ValueError("runner='generate' needs a model that generates, and this one is an encoder: use 'pooling'")
    if args.tensor_parallel_size * args.data_parallel_size > 1:
        raise ValueError("tensor_parallel_size and data_parallel_size must be 1 for an encoder")
    for name, value in pooler.asked().items():
        if name not in _SERVED or value in ("ALL", "STEP"):
            raise ValueError(f"pooler_config: {name}={shown(value)} is not supported: {PoolerConfig.instead}")
    return {"runner": "pooling", "pooler_config": pooler}
