"""Two models' readings of texts: llama.cpp's statistics of --kl-divergence, over all positions."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm.auditing.statistics import abs_deltas, bootstrap, sizes


@dataclass(frozen=True)
class TextTable:
    """Positions of all texts that both models could read.

    Attributes:
        index: int64 [texts], places in the file.
        num_positions: int64 [texts].
        kl: float64 [positions], nats, reference to candidate, over the whole vocabulary; None: of a server, which does
            not give that.
        reference, candidate: float32 [positions], logprobs of the texts' own tokens.
        same_top: int8 [positions], whether the likeliest token is the same; -1: a server does not tell.
        num_unread: positions without a logprob of a server.
    """

    index: np.ndarray
    num_positions: np.ndarray
    kl: np.ndarray | None
    reference: np.ndarray
    candidate: np.ndarray
    same_top: np.ndarray
    num_unread: int = 0

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
        top1_positions: positions of which it is the share: those whose likeliest token is known.
        abs_delta_logprob: nats, of the texts' own tokens: mean, p99, max.
        reference_perplexity, perplexity, perplexity_ratio: of the base, of the candidate, and the second by the first.
        perplexity_difference: the second less the first.
        log_perplexity_ratio: logarithm of the ratio.
        perplexity_correlation: of the logarithms of both.
        delta_p_mean, delta_p_rms: of the probability of the text's own tokens, candidate less reference.
        delta_p_percentiles: by level in percent; 50 is the median, 100 the maximum, 0 the minimum.
        absent: why figures are NaN, or of fewer positions, by name; empty unless the candidate is a server.
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
    top1_positions: int
    abs_delta_logprob: dict[str, float]
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
    absent: dict[str, str] = field(default_factory=dict)


def text_table(pairs: Iterable[tuple[dict[str, Any], dict[str, Any]]]) -> TextTable | None:
    """From rows of the reference and of the candidate; None: no text could be read by both."""
    index, counts, same_top = array("q"), array("q"), array("b")
    kl, reference, candidate = array("d"), array("f"), array("f")
    has_kl, num_unread = True, 0
    for own, other in pairs:
        if "error" in own or "error" in other:
            continue
        read = [place for place, value in enumerate(other["own_logprobs"]) if value is not None]
        num_unread += len(other["own_logprobs"]) - len(read)
        if not read:
            continue
        index.append(own["index"])
        counts.append(len(read))
        has_kl = has_kl and "kl" in other
        kl.extend(other.get("kl", ()))
        reference.extend(own["own_logprobs"][place] for place in read)
        candidate.extend(other["own_logprobs"][place] for place in read)
        same_top.extend(-1 if other["same_top"][place] is None else other["same_top"][place] for place in read)
    if not index:
        return None
    return TextTable(
        np.asarray(index),
        np.asarray(counts),
        np.asarray(kl) if has_kl else None,
        np.asarray(reference),
        np.asarray(candidate),
        np.asarray(same_top),
        num_unread,
    )


def text_statistics(table: TextTable) -> TextStatistics:
    """Statistics of a table."""
    changes = np.exp(table.candidate.astype(np.float64)) - np.exp(table.reference.astype(np.float64))
    count = len(table.reference)
    kl_values = np.full(1, math.nan) if table.kl is None else table.kl
    kl = _percentiles(kl_values, _KL_LEVELS)
    mean_square, tops = float((changes**2).mean()), table.same_top[table.same_top >= 0]
    same = float(tops.mean()) if len(tops) else math.nan
    return TextStatistics(
        texts=len(table.index),
        positions=count,
        kl_mean=float(kl_values.mean()),
        kl_mean_error=_error(kl_values),
        kl_mean_interval=_interval_by_text(table),
        kl_max=float(kl_values.max()),
        kl_p999=kl["99.9"],
        kl_p99=kl["99"],
        kl_median=float(np.median(kl_values)),
        kl_min=float(kl_values.min()),
        kl_percentiles=kl,
        top1_agreement=same,
        top1_agreement_error=math.sqrt(same * (1 - same) / (len(tops) - 1)) if len(tops) > 1 else math.nan,
        top1_positions=len(tops),
        abs_delta_logprob=sizes(abs_deltas(table.reference, table.candidate)),
        **_perplexities(-table.reference, -table.candidate),
        delta_p_mean=float(changes.mean()),
        delta_p_mean_error=_error(changes),
        delta_p_rms=math.sqrt(mean_square),
        delta_p_rms_error=_error(changes**2) / (2 * math.sqrt(mean_square)) if mean_square else 0.0,
        delta_p_percentiles=_percentiles(changes, (100.0, *_DELTA_LEVELS, 50.0, 0.0)),
        absent=_absent(table, len(tops)),
    )


def _interval_by_text(table: TextTable) -> tuple[float, float]:
    """The bootstrap's interval of the mean KL, by whole texts."""
    if table.kl is None:
        return math.nan, math.nan
    features = np.stack([table.text_sums(table.kl), table.num_positions.astype(np.float64)], axis=1)
    return bootstrap(features, lambda sums: sums[:, 0] / sums[:, 1])


def _absent(table: TextTable, num_tops: int) -> dict[str, str]:
    """Why figures of a server are not there, by name."""
    found, count = {}, len(table.reference)
    if table.kl is None:
        found["kl"] = "a server gives some tokens at each position, not the whole vocabulary"
    if num_tops < count:
        found["top1_agreement"] = f"the server names the likeliest token at {num_tops} of {count} positions"
    if table.num_unread:
        found["positions"] = (
            f"the server gives no logprob at {table.num_unread} of {count + table.num_unread} positions"
        )
    return found


def _perplexities(reference: np.ndarray, candidate: np.ndarray) -> dict[str, float]:
    """Figures of both perplexities and their ratio, from losses, float32 [positions]; errors are those of first order.

    Products of losses are float32 and their sums float64, as llama.cpp has them: a perplexity of three digits shows the
    difference in the last of those that it prints."""
    count, losses = len(reference), (reference, candidate)
    means = [float(each.mean(dtype=np.float64)) for each in losses]

    def covariance(i: int, j: int) -> float:
        """The covariance of two means; NaN of one position."""
        product = float((losses[i] * losses[j]).mean(dtype=np.float64)) - means[i] * means[j]
        return product / (count - 1) if count > 1 else math.nan

    variances, shared = [covariance(0, 0), covariance(1, 1)], covariance(0, 1)
    ratio, own = means[1] - means[0], [_exp(mean) for mean in means]
    errors = [_root(each) for each in variances]
    ratio_error = _root(sum(variances) - 2 * shared)
    spread = own[0] * own[0] * variances[0] + own[1] * own[1] * variances[1] - 2 * own[0] * own[1] * shared
    return {
        "reference_perplexity": own[0],
        "reference_perplexity_error": own[0] * errors[0],
        "perplexity": own[1],
        "perplexity_error": own[1] * errors[1],
        "perplexity_ratio": _exp(ratio),
        "perplexity_ratio_error": _exp(ratio) * ratio_error,
        "perplexity_difference": own[1] - own[0],
        "perplexity_difference_error": _root(spread),
        "log_perplexity_ratio": ratio,
        "log_perplexity_ratio_error": ratio_error,
        "perplexity_correlation": shared / (errors[0] * errors[1]) if errors[0] * errors[1] else math.nan,
    }


def _exp(value: float) -> float:
    """inf beyond the largest float: a server may give any logprobs."""
    with np.errstate(over="ignore"):
        return float(np.exp(value))


def _root(variance: float) -> float:
    """The standard deviation; rounding may leave a variance of 0 below it. NaN stays."""
    return float(np.sqrt(np.maximum(0.0, variance)))


def _error(values: np.ndarray) -> float:
    """The standard error of a mean; NaN of one value."""
    return float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def _percentiles(values: np.ndarray, levels: Sequence[float]) -> dict[str, float]:
    found = np.quantile(values, [level / 100 for level in levels]).tolist()
    return {f"{level:g}": value for level, value in zip(levels, found, strict=True)}


def llama_cpp_lines(found: TextStatistics) -> list[str]:
    """The statistics as `llama-perplexity --kl-divergence` prints them: its names, its digits; "-" is not known."""

    def one(value: float, form: str) -> str:
        return f"{value:{form}}" if not math.isnan(value) else f"{'-':>{form.partition('.')[0]}}"

    def number(value: float, error: float) -> str:
        return f"{one(value, '10.6f')} ± {one(error, '10.6f')}"

    def percent(value: float, error: float) -> str:
        return f"{one(100 * value, '6.3f')} ± {one(100 * error, '5.3f')} %"

    kl = [f"{level:4.1f}%   KLD: {one(found.kl_percentiles[f'{level:g}'], '10.6f')}" for level in _KL_LEVELS]
    delta = [f"{level:4.1f}%   Δp: {100 * found.delta_p_percentiles[f'{level:g}']:6.3f}%" for level in _DELTA_LEVELS]
    ends = {name: 100 * found.delta_p_percentiles[level] for name, level in (("Maximum", "100"), ("Minimum", "0"))}
    ratio = number(found.log_perplexity_ratio, found.log_perplexity_ratio_error)
    return [
        "====== Perplexity statistics ======",
        f"Mean PPL(Q)                   : {number(found.perplexity, found.perplexity_error)}",
        f"Mean PPL(base)                : {number(found.reference_perplexity, found.reference_perplexity_error)}",
        f"Cor(ln(PPL(Q)), ln(PPL(base))): {one(100 * found.perplexity_correlation, '6.2f')}%",
        f"Mean ln(PPL(Q)/PPL(base))     : {ratio}",
        f"Mean PPL(Q)/PPL(base)         : {number(found.perplexity_ratio, found.perplexity_ratio_error)}",
        f"Mean PPL(Q)-PPL(base)         : {number(found.perplexity_difference, found.perplexity_difference_error)}",
        "",
        "====== KL divergence statistics ======",
        f"Mean    KLD: {number(found.kl_mean, found.kl_mean_error)}",
        f"Maximum KLD: {one(found.kl_max, '10.6f')}",
        *kl[:4],
        f"Median  KLD: {one(found.kl_median, '10.6f')}",
        *kl[4:],
        f"Minimum KLD: {one(found.kl_min, '10.6f')}",
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
