"""Pooling models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from vllm.config.unserved import UnservedConfig, choice, number

SequencePoolingType = Literal["CLS", "LAST", "MEAN"]
TokenPoolingType = Literal["ALL", "STEP"]


@dataclass
class PoolerConfig(UnservedConfig):
    """How hidden states are made one vector."""

    instead: ClassVar[str] = (
        "pooling models (embeddings, classifiers, rerankers) are not served; LLM.score_labels reads the probabilities "
        "of chosen answers from a generating model"
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
