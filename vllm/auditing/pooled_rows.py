"""Two rerankers' orders of documents, and two embedders' vectors."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm.auditing.statistics import kendall_tau, mean_interval, ndcg


@dataclass(frozen=True)
class RankingStatistics:
    """Orders of the documents of each query, against the reference's.

    Attributes:
        rows: documents that both could score, of queries with two of them or more.
        queries: of these.
        kendall_tau: tau-b, the mean over queries whose scores are not all alike.
        ndcg10: mean over queries of nDCG at 10, where the reference's first document has gain 10, its second 9 ...
        best_changes: queries whose first document is another one.
        abs_delta_score: mean over all documents.
    """

    rows: int
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
    places: dict[str, int] = {}
    queries, scores = array("q"), (array("d"), array("d"))
    for own, other in pairs:
        if own.get("score") is not None and other.get("score") is not None:
            query = "" if query_field is None else str(own.get(query_field))
            queries.append(places.setdefault(query, len(places)))
            for column, row in zip(scores, (own, other), strict=True):
                column.append(row["score"])
    keys = np.asarray(queries)
    table = np.stack([np.asarray(each) for each in scores])[:, np.argsort(keys, kind="stable")]
    counts = np.bincount(keys)
    firsts, several = np.cumsum(counts) - counts, np.flatnonzero(counts > 1)
    if not len(several):
        return None
    figures = (_of_query(table[:, firsts[each] : firsts[each] + counts[each]]) for each in several)
    taus, gains, changes, sums = np.fromiter(figures, dtype=np.dtype((np.float64, 4))).T
    taus, rows = taus[~np.isnan(taus)], int(counts[several].sum())
    return RankingStatistics(
        rows=rows,
        queries=len(several),
        kendall_tau=float(taus.mean()) if len(taus) else math.nan,
        kendall_tau_interval=mean_interval(taus),
        ndcg10=float(gains.mean()),
        ndcg10_interval=mean_interval(gains),
        best_changes=int(changes.sum()),
        abs_delta_score=float(sums.sum()) / rows,
    )


def _of_query(scores: np.ndarray) -> tuple[float, float, bool, float]:
    """Kendall's tau, nDCG, whether the first document is another one, and the sum of |differences|, of [2, n]."""
    own, other = scores
    return kendall_tau(own, other), ndcg(own, other), own.argmax() != other.argmax(), np.abs(other - own).sum()


_NUM_NEIGHBOURS = 2000


def embedding_statistics(pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> EmbeddingStatistics | None:
    """From rows of both; None: no text has two vectors of one length."""
    cosines = array("d")
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
