"""An audit as one page of HTML, whose plots are SVG in it: nothing is loaded from elsewhere."""

from __future__ import annotations

import html
import io
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from vllm.auditing.label_tables import LabelTable, row_values
from vllm.auditing.report import audit_table
from vllm.auditing.results import Audit, Candidate
from vllm.auditing.statistics import abs_deltas, margins
from vllm.decisions.evaluation import Reliability
from vllm.scoring.files import write_atomically

_NUM_BINS = 12
_MOST_POINTS = 5000
_NUM_FLIPS = 50
# An SVG file says of itself when and by which program it was made, with addresses.
_METADATA = ("Date", "Creator", "Format", "Type")
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "pre{overflow-x:auto;font-size:13px;background:#f6f6f6;padding:1rem}svg{max-width:100%;height:auto}"
    "table{border-collapse:collapse;font-size:13px}td,th{padding:.2rem .8rem .2rem 0;text-align:left}"
)


def save_page(audit: Audit, path: str | Path) -> None:
    """Write the page. ImportError: matplotlib is not installed; CliError: it cannot be written."""
    write_atomically(Path(path), page(audit).encode())


def page(audit: Audit) -> str:
    """The page. ImportError: matplotlib is not installed."""
    title = html.escape(f"Audit of {audit.rows} against {audit.reference.name}")
    parts = [f"<h1>{title}</h1><pre>{html.escape(audit_table(audit))}</pre>"]
    for heading, draw in _plots(audit):
        parts.append(f"<h2>{html.escape(heading)}</h2>{_svg(draw)}")
    for candidate in audit.candidates:
        if candidate.labels is not None and candidate.labels.flipped:
            parts.append(_flips(candidate))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{_STYLE}</style>'
        f"</head><body>{''.join(parts)}</body></html>\n"
    )


def _plots(audit: Audit) -> list[tuple[str, Callable[[Any], None]]]:
    plots: list[tuple[str, Callable[[Any], None]]] = [("Cost against error", lambda axes: _costs(axes, audit))]
    if any(each.label_tables for each in audit.candidates):
        plots += [
            ("Flips by the reference's margin", lambda axes: _over_margins(axes, audit)),
            ("|Δ logprob| by the prompt's length", lambda axes: _over_lengths(axes, audit)),
        ]
    if any(each.labels is not None and each.labels.gold is not None for each in audit.candidates):
        plots.append(("Reliability before and after", lambda axes: _reliability(axes, audit)))
    return plots


def _svg(draw: Callable[[Any], None]) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    draw(axes)
    axes.spines[["top", "right"]].set_visible(False)
    handles, names = axes.get_legend_handles_labels()
    if handles:
        legend = axes.legend(handles, names, frameon=False, fontsize=8)
        for text in legend.get_texts():
            text.set_parse_math(False)
    out = io.StringIO()
    with warnings.catch_warnings():
        # A character that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(out, format="svg", metadata=dict.fromkeys(_METADATA))
    return out.getvalue()[out.getvalue().index("<svg") :]


def _named(candidate: Candidate) -> str:
    """Its name; an underscore at the beginning would keep it out of a legend."""
    return candidate.name.lstrip("_")


def _tables(audit: Audit) -> list[tuple[str, LabelTable]]:
    several = any(len(each.label_tables) > 1 for each in audit.candidates)
    return [
        (f"{_named(each)}: {name}" if several else _named(each), table)
        for each in audit.candidates
        for name, table in each.label_tables.items()
    ]


def _over_margins(axes: Any, audit: Audit) -> None:
    for name, table in _tables(audit):
        lead = margins(table.reference)
        lead = np.where(np.isfinite(lead), lead, 0.0)
        edges = np.unique(np.quantile(lead, np.linspace(0, 1, _NUM_BINS + 1)))
        own = np.clip(np.searchsorted(edges, lead, side="right") - 1, 0, max(0, len(edges) - 2))
        counts = np.bincount(own)
        used = counts > 0
        middles, shares = (np.bincount(own, weights=each)[used] / counts[used] for each in (lead, table.flipped))
        axes.plot(middles, shares, marker="o", label=name)
    axes.set_xlabel("reference's best label ahead of its second, nats")
    axes.set_ylabel("share of flips")


def _over_lengths(axes: Any, audit: Audit) -> None:
    for name, table in _tables(audit):
        deltas = abs_deltas(table.reference, table.candidate).mean(1)
        step = max(1, len(deltas) // _MOST_POINTS)
        finite = np.isfinite(deltas[::step])
        axes.plot(
            table.lengths[::step][finite], deltas[::step][finite], linestyle="", marker=".", alpha=0.5, label=name
        )
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("mean |Δ logprob|, nats")


def _reliability(axes: Any, audit: Audit) -> None:
    axes.plot([0, 1], [0, 1], color="#999999", linewidth=0.8, linestyle=":")
    seen = False
    for candidate in audit.candidates:
        gold = candidate.labels and candidate.labels.gold
        if not gold:
            continue
        if not seen:
            _curve(axes, gold.reference_reliability, "reference")
            seen = True
        _curve(axes, gold.candidate_reliability, _named(candidate))
    axes.set_xlabel("probability of the prediction")
    axes.set_ylabel("share that is right")


def _curve(axes: Any, bins: Reliability, name: str) -> None:
    used = bins.counts > 0
    axes.plot(bins.confidences[used], bins.accuracies[used], marker="o", label=name)


def _costs(axes: Any, audit: Audit) -> None:
    for candidate in audit.candidates:
        error = _error(candidate)
        if error is not None:
            axes.plot([candidate.seconds], [error], linestyle="", marker="o", label=_named(candidate))
    axes.set_xlabel(f"seconds of reading (the reference took {audit.reference.seconds:.1f})")
    axes.set_ylabel("1 - Kendall's tau, or 1 - cosine" if audit.kind in ("rerank", "embed") else "mean KL, nats")


def _error(candidate: Candidate) -> float | None:
    if candidate.text is not None:
        return candidate.text.kl_mean if math.isfinite(candidate.text.kl_mean) else None
    if candidate.ranking is not None:
        return 1 - candidate.ranking.kendall_tau
    if candidate.embedding is not None:
        return 1 - candidate.embedding.cosine_mean
    if not candidate.label_tables:
        return None
    return float(np.concatenate([row_values(each).kl for each in candidate.label_tables.values()]).mean())


def _flips(candidate: Candidate) -> str:
    assert candidate.labels is not None
    rows = [
        f"<tr><td>{flip.index}</td><td>{_distribution(flip.reference_probs)}</td>"
        f"<td>{_distribution(flip.candidate_probs)}</td><td>{flip.margin:.4f}</td></tr>"
        for flip in candidate.labels.flipped[:_NUM_FLIPS]
    ]
    head = "<tr><th>row</th><th>reference</th><th>candidate</th><th>margin</th></tr>"
    name = html.escape(candidate.name)
    return f"<h2>Flips of {name}: {candidate.labels.flips}</h2><table>{head}{''.join(rows)}</table>"


def _distribution(shares: dict[str, float]) -> str:
    best = sorted(shares.items(), key=lambda each: -each[1])[:4]
    return html.escape(", ".join(f"{name.strip()} {share:.3f}" for name, share in best))
