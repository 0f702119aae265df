"""Two rerankers' orders of documents, and two embedders' vectors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm.auditing.statistics import kendall_tau, mean_interval, ndcg


@dataclass(frozen=True)
class RankingStatistics:
    """Orders of the documents of each query, against the reference's.

    Attributes:
        queries: with two documents or more that both could score.
        kendall_tau: tau-b, the mean over queries whose scores are not all alike.
        ndcg10: mean over queries of nDCG at 10, where the reference's first document has gain 10, its second 9 ...
        best_changes: queries whose first document is another one.
        abs_delta_score: mean over all documents.
    """

    queries: int
    kendall_tau: float
    kendall_tau_interval: tuple[float, float]
    ndcg10: float
    ndcg10_interval: tuple[float, float]
    best_changes: int
    abs_delta_score: float


@dataclass(frozen=True)
class EmbeddingStatistics:
    """Cosines of the two models' vectors of the same text.

    Attributes:
        cosine_mean, cosine_min: over the rows.
        neighbour_agreement: share of rows, of the first 2,000, whose nearest other row is the same.
    """

    rows: int
    cosine_mean: float
    cosine_mean_interval: tuple[float, float]
    cosine_min: float
    neighbour_agreement: float


def ranking_statistics(
    pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]], query_field: str | None
) -> RankingStatistics | None:
    """From rows of both; `query_field` None: all have one query. None: there is no query with two documents."""
    found: dict[str, list[tuple[float, float]]] = {}
    for own, other in pairs:
        if own.get("score") is not None and other.get("score") is not None:
            query = "" if query_field is None else str(own.get(query_field))
            found.setdefault(query, []).append((own["score"], other["score"]))
    tables = [np.asarray(scores) for scores in found.values() if len(scores) > 1]
    if not tables:
        return None
    taus = np.asarray([kendall_tau(*table.T) for table in tables])
    taus = taus[~np.isnan(taus)]
    gains = np.asarray([ndcg(*table.T) for table in tables])
    changes = sum(int(table[:, 0].argmax() != table[:, 1].argmax()) for table in tables)
    deltas = np.concatenate([np.abs(table[:, 1] - table[:, 0]) for table in tables])
    mean = float(taus.mean()) if len(taus) else float("nan")
    return RankingStatistics(
        len(tables), mean, mean_interval(taus), float(gains.mean()), mean_interval(gains), changes, float(deltas.mean())
    )


_NUM_NEIGHBOURS = 2000


def embedding_statistics(pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> EmbeddingStatistics | None:
    """From rows of both; None: no text has two vectors of one length."""
    cosines: list[float] = []
    first: list[tuple[np.ndarray, np.ndarray]] = []
    for own, other in pairs:
        if own.get("embedding") is None or other.get("embedding") is None:
            continue
        a, b = (np.asarray(each["embedding"], dtype=np.float64) for each in (own, other))
        a, b = a / np.linalg.norm(a), b / np.linalg.norm(b)
        if len(a) == len(b):
            cosines.append(float(a @ b))
        if len(first) < _NUM_NEIGHBOURS:
            first.append((a, b))
    if not cosines:
        return None
    values = np.asarray(cosines)
    nearest = [_nearest(np.stack(each)) for each in zip(*first, strict=True)]
    same = float((nearest[0] == nearest[1]).mean()) if len(first) > 1 else 1.0
    return EmbeddingStatistics(len(values), float(values.mean()), mean_interval(values), float(values.min()), same)


def _nearest(vectors: np.ndarray) -> np.ndarray:
    """The place of each row's nearest other row, [n]."""
    similar = vectors @ vectors.T
    np.fill_diagonal(similar, -np.inf)
    return np.asarray(similar.argmax(1))
