"""An audit as a table of a terminal."""

from __future__ import annotations

import io
import math
import shutil

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm.auditing.results import Audit, Candidate, Cost
from vllm.auditing.text_rows import TextStatistics, llama_cpp_lines
from vllm.scoring.report import cut

_NAME_WIDTH = 40
_NUM_FLIPS, _NUM_SHARES, _NUM_GROUPS = 5, 3, 12


def audit_table(audit: Audit) -> str:
    """The audit's figures, a line a model, the first flips, groups by field, and what the budget says."""
    names, columns = _columns(audit)
    # A terminal that is narrower breaks lines; no figure is cut.
    width = max(shutil.get_terminal_size((160, 24)).columns, 240)
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("model", "rows", *names, "seconds", "MiB"):
        table.add_column(name, justify="left" if name == "model" else "right", no_wrap=True)
    table.add_row(_name(audit.reference.name), str(audit.reference.rows), *[""] * len(names), *_cost(audit.reference))
    for candidate, cells in zip(audit.candidates, columns, strict=True):
        table.add_row(_name(candidate.name), str(candidate.rows), *cells, *_cost(candidate))
    out = io.StringIO()
    Console(file=out, width=width, no_color=True, highlight=False).print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    more = [line for each in audit.candidates for line in (*_flips(each), *_groups(each))]
    return "\n".join([*lines, *more, *_texts(audit), *_budget(audit)])


def _name(name: str) -> Text:
    return Text(cut(name if len(name) <= _NAME_WIDTH else f"…{name[1 - _NAME_WIDTH :]}", _NAME_WIDTH))


def _columns(audit: Audit) -> tuple[list[str], list[list[str]]]:
    """Headings of the kind of audit, and each candidate's cells."""
    if audit.kind in ("labels", "questions"):
        names = ["flips", "|Δ logprob|", "99 %", "KL", "TV", "mass lost"]
        has_gold = any(each.labels is not None and each.labels.gold is not None for each in audit.candidates)
        names += ["Δ accuracy", "McNemar p", "Δ ECE"] if has_gold else []
        return names, [_label_cells(each, has_gold) for each in audit.candidates]
    if audit.kind == "text":
        names = ["KL", "99.9 %", "|Δ logprob|", "same top", "PPL ratio"]
        return names, [_text_cells(each) for each in audit.candidates]
    if audit.kind == "rerank":
        names, attributes = ["Kendall's tau", "nDCG@10", "first changes"], ("kendall_tau", "ndcg10", "best_changes")
        return names, [_cells(each.ranking, attributes) for each in audit.candidates]
    names, attributes = ["cosine", "least", "neighbours"], ("cosine_mean", "cosine_min", "neighbour_agreement")
    return names, [_cells(each.embedding, attributes) for each in audit.candidates]


def _label_cells(candidate: Candidate, has_gold: bool) -> list[str]:
    found = candidate.labels
    if found is None:
        return ["-"] * (9 if has_gold else 6)
    delta = found.abs_delta_logprob
    figures = (delta["mean"], delta["p99"], found.kl_mean, found.tv_mean, found.mass_lost)
    cells = [f"{found.flips} ({found.flip_share:.2%})", *(_number(each) for each in figures)]
    if has_gold:
        gold = found.gold
        cells += ["-"] * 3 if gold is None else [
            f"{gold.accuracy_change:+.3f}",
            f"{gold.mcnemar_p:.2g}",
            f"{gold.ece_change:+.3f}",
        ]  # fmt: skip
    return cells


def _text_cells(candidate: Candidate) -> list[str]:
    found = candidate.text
    if found is None:
        return ["-"] * 5
    values = (found.kl_p999, found.abs_delta_logprob["mean"], found.top1_agreement, found.perplexity_ratio)
    cells = [
        f"{value:{form}}" if math.isfinite(value) else "-"
        for value, form in zip(values, (".6f", ".6f", ".3%", ".6f"), strict=True)
    ]
    return [f"{found.kl_mean:.6f} ± {found.kl_mean_error:.6f}" if math.isfinite(found.kl_mean) else "-", *cells]


def _flips(candidate: Candidate) -> list[str]:
    """The first flips, with both distributions."""
    found = candidate.labels
    if found is None or not found.flipped:
        return []
    shown = found.flipped[:_NUM_FLIPS]
    lines = [f"flips of {candidate.name}, {len(shown)} of {found.flips} (row: reference -> candidate):"]
    for flip in shown:
        lines.append(f"  {flip.index}: {_shares(flip.reference_probs)} -> {_shares(flip.candidate_probs)}")
    return [*lines, ""]


def _shares(probs: dict[str, float]) -> str:
    best = sorted(probs.items(), key=lambda each: -each[1])[:_NUM_SHARES]
    return ", ".join(f"{name.strip()} {share:.3f}" for name, share in best)


def _groups(candidate: Candidate) -> list[str]:
    """The groups by fields, the largest first."""
    lines = []
    for name, groups in candidate.by.items():
        lines.append(f"{candidate.name} by {name}:")
        for each in groups[:_NUM_GROUPS]:
            delta = _number(each.abs_delta_logprob["mean"])
            flips = f"{each.flips} flips ({each.flip_share:.2%})"
            lines.append(f"  {each.group}: {each.rows} rows, {flips}, |Δ logprob| {delta}, KL {_number(each.kl_mean)}")
        left = len(groups) - _NUM_GROUPS
        lines += [f"  {left} further groups are in --output", ""] if left > 0 else [""]
    return lines


def _texts(audit: Audit) -> list[str]:
    """The figures of texts in full, as llama.cpp prints them."""
    blocks = [
        [
            f"{each.name} (Q) against {audit.reference.name} (base)",
            "",
            *llama_cpp_lines(each.text),
            "",
            *_absent(each.text),
        ]
        for each in audit.candidates
        if each.text is not None
    ]
    return [line for block in blocks for line in block]


def _absent(found: TextStatistics) -> list[str]:
    lines = [f"{name}: {why}" for name, why in found.absent.items()]
    return [*lines, ""] if lines else []


def _cells(found: object, names: tuple[str, ...]) -> list[str]:
    return [_number(getattr(found, name)) if found is not None else "-" for name in names]


def _number(value: float) -> str:
    return f"{value:.4g}" if isinstance(value, int) or math.isfinite(value) else "∞" if value == math.inf else "-"


def _cost(cost: Cost) -> list[str]:
    return [
        f"{value:.{digits}f}" if math.isfinite(value) else "-"
        for value, digits in ((cost.seconds, 2), (cost.peak_mib, 0))
    ]


def _budget(audit: Audit) -> list[str]:
    if audit.budget is None:
        return []
    found = audit.budget
    lines = [f"budget {found.figure} <= {found.limit:g}, with {found.confidence:.0%} confidence, the cheapest first:"]
    for each in found.candidates:
        verdict = "keeps it" if each.keeps else "does not"
        lines.append(f"  {each.name}: {_number(each.value)}, at most {_number(each.upper_limit)}: {verdict}")
    return [*lines, f"cheapest that keeps it: {found.cheapest}" if found.cheapest is not None else "none keeps it"]
