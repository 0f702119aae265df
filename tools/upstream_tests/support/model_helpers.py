"""Stands where upstream's tests expect their helpers for models (`tests.models.utils`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class EmbedModelInfo:
    """A model of embeddings."""

    name: str
    revision: str | None = None
    is_matryoshka: bool = False
    matryoshka_dimensions: list[int] | None = None
    dtype: str = "auto"
    hf_dtype: str = "float32"
    hf_overrides: dict[str, Any] | None = None
    further: dict[str, Any] = field(default_factory=dict)


def check_embeddings_close(
    *,
    embeddings_0_lst: Sequence[Any],
    embeddings_1_lst: Sequence[Any],
    name_0: str,
    name_1: str,
    tol: float = 1e-3,
) -> None:
    """That the cosine of each two is 1 within `tol`."""
    assert len(embeddings_0_lst) == len(embeddings_1_lst)
    for index, pair in enumerate(zip(embeddings_0_lst, embeddings_1_lst, strict=True)):
        one, other = (torch.as_tensor(each).float().flatten() for each in pair)
        cosine = torch.nn.functional.cosine_similarity(one, other, dim=0).item()
        assert cosine >= 1 - tol, f"{name_0} and {name_1} differ at {index}: cosine {cosine}"


def softmax(data: Any) -> torch.Tensor:
    """Over the last dimension; of a single number its logistic function."""
    values = torch.as_tensor(data)
    return values.sigmoid() if values.shape[-1] == 1 else values.softmax(-1)


def matryoshka_fy(tensor: Any, dimensions: int) -> torch.Tensor:
    """The first numbers, normalised."""
    return torch.nn.functional.normalize(torch.as_tensor(tensor)[..., :dimensions], dim=-1)
