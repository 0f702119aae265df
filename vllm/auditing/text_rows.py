"""Two models' readings of texts: llama.cpp's statistics of --kl-divergence, over all positions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm.auditing.statistics import bootstrap


@dataclass(frozen=True)
class TextTable:
    """Positions of all texts that both models could read.

    Attributes:
        index: int64 [texts], places in the file.
        num_positions: int64 [texts].
        kl: float64 [positions], nats, reference to candidate, over the whole vocabulary.
        reference, candidate: float32 [positions], logprobs of the texts' own tokens.
        same_top: bool [positions], whether the likeliest token is the same.
    """

    index: np.ndarray
    num_positions: np.ndarray
    kl: np.ndarray
    reference: np.ndarray
    candidate: np.ndarray
    same_top: np.ndarray

    def text_sums(self, values: np.ndarray) -> np.ndarray:
        """Sums over each text's positions, float64 [texts]."""
        starts = np.concatenate([[0], np.cumsum(self.num_positions)[:-1]])
        return np.asarray(np.add.reduceat(values.astype(np.float64), starts))


@dataclass(frozen=True)
class TextStatistics:
    """llama.cpp's names, where it has them: KLD, same top p, PPL(Q)/PPL(base), Δp of the text's own tokens.

    Attributes:
        texts, positions: read.
        kl_mean, kl_max, kl_p999, kl_p99, kl_median: nats; `kl_mean_error` is the standard error of independent
            positions, as llama.cpp has it, `kl_mean_interval` of 95 % by the bootstrap of whole texts.
        top1_agreement: share of positions whose likeliest token is the same.
        reference_perplexity, perplexity, perplexity_ratio: of the base, of the candidate, and the second by the first.
        delta_p_mean, delta_p_rms: of the probability of the text's own tokens, candidate less reference.
    """

    texts: int
    positions: int
    kl_mean: float
    kl_mean_error: float
    kl_mean_interval: tuple[float, float]
    kl_max: float
    kl_p999: float
    kl_p99: float
    kl_median: float
    top1_agreement: float
    reference_perplexity: float
    perplexity: float
    perplexity_ratio: float
    delta_p_mean: float
    delta_p_rms: float


def text_table(pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> TextTable | None:
    """From rows of the reference and of the candidate; None: no text could be read by both."""
    parts: list[tuple[np.ndarray, ...]] = []
    for own, other in pairs:
        if "error" in own or "error" in other or not other["kl"]:
            continue
        columns = ((other["kl"], np.float64), (own["own_logprobs"], np.float32), (other["own_logprobs"], np.float32))
        arrays = [np.asarray(values, dtype=kind) for values, kind in columns]
        parts.append((np.asarray([own["index"]]), *arrays, np.asarray(other["same_top"], dtype=bool)))
    if not parts:
        return None
    index, kl, reference, candidate, same_top = (np.concatenate(each) for each in zip(*parts, strict=True))
    counts = np.asarray([len(part[1]) for part in parts], dtype=np.int64)
    return TextTable(index, counts, kl, reference, candidate, same_top)


def text_statistics(table: TextTable) -> TextStatistics:
    """Statistics of a table."""
    own, other = table.reference.astype(np.float64), table.candidate.astype(np.float64)
    perplexities = math.exp(-own.mean()), math.exp(-other.mean())
    changes = np.exp(other) - np.exp(own)
    levels = dict(zip(("p999", "p99", "median"), np.quantile(table.kl, [0.999, 0.99, 0.5]).tolist(), strict=True))
    count = len(table.kl)
    error = float(table.kl.std(ddof=1)) / math.sqrt(count) if count > 1 else math.nan
    return TextStatistics(
        texts=len(table.index),
        positions=count,
        kl_mean=float(table.kl.mean()),
        kl_mean_error=error,
        kl_mean_interval=bootstrap(
            np.stack([table.text_sums(table.kl), table.num_positions.astype(np.float64)], axis=1),
            lambda sums: sums[:, 0] / sums[:, 1],
        ),
        kl_max=float(table.kl.max()),
        kl_p999=levels["p999"],
        kl_p99=levels["p99"],
        kl_median=levels["median"],
        top1_agreement=float(table.same_top.mean()),
        reference_perplexity=perplexities[0],
        perplexity=perplexities[1],
        perplexity_ratio=perplexities[1] / perplexities[0],
        delta_p_mean=float(changes.mean()),
        delta_p_rms=math.sqrt(float((changes**2).mean())),
    )
