"""Rerankers whose published template is in score_templates.py, and how their files or names tell them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from vllm.config import ModelConfig

_HUB_FOLDER = "models--"


@dataclass(frozen=True)
class Family:
    """
    Attributes:
        template: its name in score_templates.TEMPLATES.
        model_type: of config.json.
        name: what a model of the family has in its name.
        words: its `classifier_from_token`.
        marks: what a query holds, and a document begins with, where both come with the template around them.
    """

    template: str
    model_type: str
    name: re.Pattern[str]
    words: tuple[str, ...]
    marks: tuple[str, str] | None = None


def _named(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern, re.IGNORECASE)


_QWEN3 = Family("qwen3-reranker", "qwen3", _named(r"qwen3[-_]?reranker"), ("no", "yes"), ("<Query>:", "<Document>:"))
_QWEN3_VL = Family("qwen3-vl-reranker", "qwen3_vl_text", _named(r"qwen3[-_]?vl[-_]?reranker"), ("no", "yes"))
FAMILIES = (
    _QWEN3,
    _QWEN3_VL,
    Family("bge-reranker-v2-gemma", "gemma", _named(r"bge-reranker-v2-gemma"), ("Yes",)),
    Family("mxbai-rerank-v2", "qwen2", _named(r"mxbai-rerank-\w+-v2"), ("0", "1")),
)


def family_of(config: ModelConfig, served_names: Sequence[str] = ()) -> tuple[Family, str] | None:
    """The family of a model and what tells it: overrides of config.json, or, with the family's model_type, its words as
    classes or its name. None: it is of none that is known."""
    raw = config.hf_config.raw
    if raw.get("is_original_qwen3_reranker"):
        family = _QWEN3_VL if raw.get("model_type") == _QWEN3_VL.model_type else _QWEN3
        return family, "is_original_qwen3_reranker"
    for family in FAMILIES:
        if raw.get("model_type") != family.model_type:
            continue
        if tuple(raw.get("classifier_from_token") or ()) == family.words:
            return family, f"classifier_from_token of {family.model_type}"
        for name in (*_names(config), *served_names):
            if family.name.search(name):
                return family, f"the name {name}"
    return None


def _names(config: ModelConfig) -> Iterator[str]:
    """The names of the model itself: folders around it may be called anything."""
    for given in (config.model, config.path, config.hf_config.raw.get("_name_or_path"), *config.served_model_name):
        if isinstance(given, str):
            path = PurePath(given)
            yield path.name
            # A hub's cache has folders models--ORG--NAME/snapshots/REVISION.
            yield from (part for part in path.parts[-3:-2] if part.startswith(_HUB_FOLDER))
