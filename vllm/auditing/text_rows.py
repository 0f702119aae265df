"""Two models' readings of texts: llama.cpp's statistics of --kl-divergence, over all positions."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
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


# The percentiles that llama.cpp prints.
_KL_LEVELS = (99.9, 99.0, 95.0, 90.0, 10.0, 5.0, 1.0, 0.1)
_DELTA_LEVELS = (99.9, 99.0, 95.0, 90.0, 75.0, 25.0, 10.0, 5.0, 1.0, 0.1)


@dataclass(frozen=True)
class TextStatistics:
    """llama.cpp's statistics of --kl-divergence: KLD, PPL(Q) and PPL(base), same top p, Δp of the text's own tokens.

    An `_error` is the standard error of independent positions, as llama.cpp has it; `_interval` is of 95 %, by the
    bootstrap of whole texts.

    Attributes:
        texts, positions: read.
        kl_mean, kl_max, kl_p999, kl_p99, kl_median, kl_min: nats.
        kl_percentiles: by level in percent, nats.
        top1_agreement: share of positions whose likeliest token is the same.
        reference_perplexity, perplexity, perplexity_ratio: of the base, of the candidate, and the second by the first.
        perplexity_difference: the second less the first.
        log_perplexity_ratio: logarithm of the ratio.
        perplexity_correlation: of the logarithms of both.
        delta_p_mean, delta_p_rms: of the probability of the text's own tokens, candidate less reference.
        delta_p_percentiles: by level in percent; 50 is the median, 100 the maximum, 0 the minimum.
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
    kl_min: float
    kl_percentiles: dict[str, float]
    top1_agreement: float
    top1_agreement_error: float
    reference_perplexity: float
    reference_perplexity_error: float
    perplexity: float
    perplexity_error: float
    perplexity_ratio: float
    perplexity_ratio_error: float
    perplexity_difference: float
    perplexity_difference_error: float
    log_perplexity_ratio: float
    log_perplexity_ratio_error: float
    perplexity_correlation: float
    delta_p_mean: float
    delta_p_mean_error: float
    delta_p_rms: float
    delta_p_rms_error: float
    delta_p_percentiles: dict[str, float]


def text_table(pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> TextTable | None:
    """From rows of the reference and of the candidate; None: no text could be read by both."""
    index, counts, same_top = array("q"), array("q"), bytearray()
    kl, reference, candidate = array("d"), array("f"), array("f")
    for own, other in pairs:
        if "error" in own or "error" in other or not other["kl"]:
            continue
        index.append(own["index"])
        counts.append(len(other["kl"]))
        kl.extend(other["kl"])
        reference.extend(own["own_logprobs"])
        candidate.extend(other["own_logprobs"])
        same_top.extend(other["same_top"])
    if not index:
        return None
    arrays = [np.asarray(each) for each in (index, counts, kl, reference, candidate)]
    return TextTable(*[*arrays, np.frombuffer(same_top, dtype=bool)])


def text_statistics(table: TextTable) -> TextStatistics:
    """Statistics of a table."""
    own, other = table.reference.astype(np.float64), table.candidate.astype(np.float64)
    changes = np.exp(other) - np.exp(own)
    kl = _percentiles(table.kl, _KL_LEVELS)
    mean_square, same = float((changes**2).mean()), float(table.same_top.mean())
    count = len(table.kl)
    return TextStatistics(
        texts=len(table.index),
        positions=count,
        kl_mean=float(table.kl.mean()),
        kl_mean_error=_error(table.kl),
        kl_mean_interval=bootstrap(
            np.stack([table.text_sums(table.kl), table.num_positions.astype(np.float64)], axis=1),
            lambda sums: sums[:, 0] / sums[:, 1],
        ),
        kl_max=float(table.kl.max()),
        kl_p999=kl["99.9"],
        kl_p99=kl["99"],
        kl_median=float(np.median(table.kl)),
        kl_min=float(table.kl.min()),
        kl_percentiles=kl,
        top1_agreement=same,
        top1_agreement_error=math.sqrt(same * (1 - same) / (count - 1)) if count > 1 else math.nan,
        **_perplexities(-own, -other),
        delta_p_mean=float(changes.mean()),
        delta_p_mean_error=_error(changes),
        delta_p_rms=math.sqrt(mean_square),
        delta_p_rms_error=_error(changes**2) / (2 * math.sqrt(mean_square)) if mean_square else 0.0,
        delta_p_percentiles=_percentiles(changes, (100.0, *_DELTA_LEVELS, 50.0, 0.0)),
    )


def _perplexities(reference: np.ndarray, candidate: np.ndarray) -> dict[str, float]:
    """Figures of both perplexities and their ratio, from losses [positions]; errors are those of first order."""
    means, errors = [float(each.mean()) for each in (reference, candidate)], [_error(reference), _error(candidate)]
    covariance = float(np.mean(reference * candidate) - means[0] * means[1]) / max(1, len(reference) - 1)
    ratio, own = means[1] - means[0], [math.exp(mean) for mean in means]
    # Rounding may leave a variance of 0 below it.
    ratio_error = math.sqrt(max(0.0, errors[0] ** 2 + errors[1] ** 2 - 2 * covariance))
    widths = [value * error for value, error in zip(own, errors, strict=True)]
    spread = widths[0] ** 2 + widths[1] ** 2 - 2 * own[0] * own[1] * covariance
    return {
        "reference_perplexity": own[0],
        "reference_perplexity_error": widths[0],
        "perplexity": own[1],
        "perplexity_error": widths[1],
        "perplexity_ratio": math.exp(ratio),
        "perplexity_ratio_error": math.exp(ratio) * ratio_error,
        "perplexity_difference": own[1] - own[0],
        "perplexity_difference_error": math.nan if math.isnan(spread) else math.sqrt(max(0.0, spread)),
        "log_perplexity_ratio": ratio,
        "log_perplexity_ratio_error": ratio_error,
        "perplexity_correlation": covariance / (errors[0] * errors[1]) if errors[0] * errors[1] else math.nan,
    }


def _error(values: np.ndarray) -> float:
    """The standard error of a mean; NaN of one value."""
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _percentiles(values: np.ndarray, levels: Sequence[float]) -> dict[str, float]:
    found = np.quantile(values, [level / 100 for level in levels]).tolist()
    return {f"{level:g}": value for level, value in zip(levels, found, strict=True)}


def llama_cpp_lines(found: TextStatistics) -> list[str]:
    """The statistics as `llama-perplexity --kl-divergence` prints them: its names, its digits."""

    def number(value: float, error: float) -> str:
        return f"{value:10.6f} ± {error:10.6f}"

    def percent(value: float, error: float) -> str:
        return f"{100 * value:6.3f} ± {100 * error:5.3f} %"

    kl = [f"{level:4.1f}%   KLD: {found.kl_percentiles[f'{level:g}']:10.6f}" for level in _KL_LEVELS]
    delta = [f"{level:4.1f}%   Δp: {100 * found.delta_p_percentiles[f'{level:g}']:6.3f}%" for level in _DELTA_LEVELS]
    ends = {name: 100 * found.delta_p_percentiles[level] for name, level in (("Maximum", "100"), ("Minimum", "0"))}
    ratio = number(found.log_perplexity_ratio, found.log_perplexity_ratio_error)
    return [
        "====== Perplexity statistics ======",
        f"Mean PPL(Q)                   : {number(found.perplexity, found.perplexity_error)}",
        f"Mean PPL(base)                : {number(found.reference_perplexity, found.reference_perplexity_error)}",
        f"Cor(ln(PPL(Q)), ln(PPL(base))): {100 * found.perplexity_correlation:6.2f}%",
        f"Mean ln(PPL(Q)/PPL(base))     : {ratio}",
        f"Mean PPL(Q)/PPL(base)         : {number(found.perplexity_ratio, found.perplexity_ratio_error)}",
        f"Mean PPL(Q)-PPL(base)         : {number(found.perplexity_difference, found.perplexity_difference_error)}",
        "",
        "====== KL divergence statistics ======",
        f"Mean    KLD: {number(found.kl_mean, found.kl_mean_error)}",
        f"Maximum KLD: {found.kl_max:10.6f}",
        *kl[:4],
        f"Median  KLD: {found.kl_median:10.6f}",
        *kl[4:],
        f"Minimum KLD: {found.kl_min:10.6f}",
        "",
        "====== Token probability statistics ======",
        f"Mean    Δp: {percent(found.delta_p_mean, found.delta_p_mean_error)}",
        f"Maximum Δp: {ends['Maximum']:6.3f}%",
        *delta[:5],
        f"Median  Δp: {100 * found.delta_p_percentiles['50']:6.3f}%",
        *delta[5:],
        f"Minimum Δp: {ends['Minimum']:6.3f}%",
        f"RMS Δp    : {percent(found.delta_p_rms, found.delta_p_rms_error)}",
        f"Same top p: {percent(found.top1_agreement, found.top1_agreement_error)}",
    ]
