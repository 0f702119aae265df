"""Tables and the chart of compare.py's JSON result, and the sections of docs/performance.md.

engines   name -> {version, notes}, ours first
rows      row -> {unit, engines: name -> {values, seconds, ...}}
bounds    row -> {gemm: seconds, attention: seconds, memory: seconds}, one a repeat
rates     see bounds.rates_to_json
pairs     [seconds with ids / seconds without], one a pair of runs
failures  messages
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from workloads import ALL_ROWS

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "performance.md"

OURS = "ours"

# The ratio to reach against upstream in each row.
TARGETS = {
    "startup": 8.0,
    "score": 1.25,
    "score_prefix": 5.0,
    "questions": 5.0,
    "fullvocab": 20.0,
    "decode64": 2.0,
    "decode64_ids": 2.2,
    "decode1": 2.0,
    "prompt_logprobs": 2.0,
    "peak_memory": 2.0,
}
# Ours with int8 weights against upstream's bfloat16.
INT8_TARGETS = {"score": 1.9, "decode1": 3.0}
STARTUP_LIMIT_SECONDS = 4.0
IDS_LIMIT = 1.02

# bfloat16 logits between 16 and 32 are multiples of 0.125; a mean over few prompts may be off by two steps.
CHECK_TOLERANCE = 0.25
_COSTS = ("s", "MiB")  # units of which less is better


class Summary(NamedTuple):
    """One engine's repeats of a row."""

    median: float
    low: float
    high: float


def summarize(values: Sequence[float]) -> Summary:
    """Median and spread."""
    return Summary(statistics.median(values), min(values), max(values))


def ratio(ours: float, other: float, unit: str) -> float:
    """How many times better `ours` is."""
    return other / ours if unit in _COSTS else ours / other


def target_of(engine: str, other: str, row: str) -> float | None:
    """The ratio for `engine` to reach against `other`, if any: 1 against transformers and llama.cpp, except llama.cpp's
    start-up, which does not import torch."""
    if other == "upstream":
        return (TARGETS if engine == OURS else INT8_TARGETS).get(row)
    if engine != OURS or other.startswith(OURS):
        return None
    return None if (other, row) == ("llama.cpp", "startup") else 1.0


def make_tables(result: dict[str, Any]) -> str:
    """All tables of a comparison, as markdown."""
    parts = [medians_table(result), ratios_table(result), bounds_table(result), kernels_line(result)]
    parts += [misses_table(result), ids_line(result)]
    parts += [f"- {failure}" for failure in result["failures"]]
    return "\n\n".join(part for part in parts if part)


def medians_table(result: dict[str, Any]) -> str:
    """One column an engine: median (lowest to highest)."""
    engines = result["engines"]
    titles = [f"{name} {engine['version']}" for name, engine in engines.items()]
    lines = []
    for row in _rows(result):
        cells = result["rows"][row]
        lines.append([row, cells["unit"], *(_spread(cells["engines"].get(name)) for name in engines)])
    return markdown_table(["row", "unit", *titles], lines, num_text=2)


def ratios_table(result: dict[str, Any]) -> str:
    """Every engine of ours against every peer: ratio of medians, target, and whether it was reached."""
    own = [name for name in result["engines"] if name.startswith(OURS)]
    others = [name for name in result["engines"] if not name.startswith(OURS)]
    lines = []
    for row, engine, other in itertools.product(_rows(result), own, others):
        line = _ratio_line(result, row, engine, other)
        if line:
            lines.append(line)
    head = ["row", "engine", "against", "ratio", "target", "reached"]
    return markdown_table(head, lines, num_text=3) if lines else ""


def bounds_table(result: dict[str, Any]) -> str:
    """Ours against the time of the row's products and attention, and of its memory traffic alone."""
    lines = []
    for row in _rows(result):
        bound, cell = result["bounds"].get(row), result["rows"][row]["engines"].get(OURS)
        if bound is None or cell is None:
            continue
        parts = (bound["gemm"], bound["attention"], bound["memory"])
        floors = [max(gemm + attention, memory) for gemm, attention, memory in zip(*parts, strict=True)]
        share = statistics.median(floor / taken for floor, taken in zip(floors, cell["seconds"], strict=False))
        medians = (statistics.median(values) for values in (cell["seconds"], *parts))
        lines.append([row, *(f"{seconds:.3f}" for seconds in medians), f"{share:.0%}"])
    head = ["row", "ours (s)", "GEMM alone (s)", "attention alone (s)", "memory alone (s)", "of the bound"]
    return markdown_table(head, lines, num_text=1) if lines else ""


def kernels_line(result: dict[str, Any]) -> str:
    """The fastest kernels of the bounds' products, with counts; empty without bounds."""
    if not result.get("rates"):
        return ""
    counts = Counter(product["kernel"] for product in result["rates"]["products"])
    return "GEMM alone: " + ", ".join(f"{count} products by {kernel}" for kernel, count in counts.most_common())


def misses_table(result: dict[str, Any]) -> str:
    """For each row that misses its target against upstream: the time beside the products that the target allows, and
    that ours takes."""
    lines = []
    for row in _rows(result):
        bound, cells = result["bounds"].get(row), result["rows"][row]["engines"]
        target = target_of(OURS, "upstream", row)
        if bound is None or target is None or OURS not in cells or "upstream" not in cells:
            continue
        taken, allowed = (statistics.median(cells[name]["seconds"]) for name in (OURS, "upstream"))
        allowed /= target
        if taken <= allowed:
            continue
        products = statistics.median(bound["gemm"])
        seconds = (taken, allowed, products, allowed - products, taken - products)
        lines.append([row, *(f"{value:.3f}" for value in seconds)])
    head = ["missed", "ours (s)", "target allows (s)", "GEMM alone (s)", "allowed beside it (s)", "taken beside it (s)"]
    return markdown_table(head, lines, num_text=1) if lines else ""


def ids_line(result: dict[str, Any]) -> str:
    """The cost of 20 ids a position for ours, from pairs of runs; empty without pairs."""
    if not result["pairs"]:
        return ""
    middle, low, high = summarize(result["pairs"])
    verdict = "yes" if middle <= IDS_LIMIT else "no"
    return (
        f"decode64_ids against decode64, ours: {middle - 1:+.1%} time (median of {len(result['pairs'])} pairs, "
        f"{low - 1:+.1%} to {high - 1:+.1%}; target at most {IDS_LIMIT - 1:+.0%}: {verdict})"
    )


def find_warnings(result: dict[str, Any]) -> list[str]:
    """Why figures may not be comparable: different readings, scaled work."""
    warnings = []
    if result["scale"] != 1:
        warnings.append(f"work scaled by {result['scale']:g}: targets are for whole work")
    for row in _rows(result):
        cells = result["rows"][row]["engines"]
        wanted = cells.get(OURS, {}).get("check")
        for name, cell in cells.items():
            if wanted is not None and cell.get("check") is not None and abs(cell["check"] - wanted) > CHECK_TOLERANCE:
                warnings.append(f"{row}: {name} read a mean logprob of {cell['check']:.3f}, {OURS} {wanted:.3f}")
    return warnings


def replace_section(text: str, name: str, content: str) -> str:
    """The document with new content between `<!-- begin NAME -->` and `<!-- end NAME -->`, which must be there once."""
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the document must hold {begin!r} and then {end!r}, once each")
    before, after = text.split(begin)[0], text.split(end)[1]
    return f"{before}{begin}\n\n{content.strip()}\n\n{end}{after}"


def write_section(name: str, content: str) -> None:
    """`replace_section` in docs/performance.md."""
    DOCUMENT.write_text(replace_section(DOCUMENT.read_text(encoding="utf-8"), name, content), encoding="utf-8")


def number(value: float) -> str:
    """About three digits."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]], num_text: int) -> str:
    """A table whose first `num_text` columns are text; the others are right-aligned."""
    rule = ["---"] * num_text + ["---:"] * (len(head) - num_text)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


def _rows(result: dict[str, Any]) -> list[str]:
    return [row for row in ALL_ROWS if row in result["rows"]]


def _spread(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "-"
    middle, low, high = summarize(cell["values"])
    if len(cell["values"]) == 1:
        return number(middle)
    return f"{number(middle)} ({number(low)} to {number(high)})"


def _ratio_line(result: dict[str, Any], row: str, engine: str, other: str) -> list[str] | None:
    cells, unit = result["rows"][row]["engines"], result["rows"][row]["unit"]
    if engine not in cells or other not in cells:
        return None
    ours = summarize(cells[engine]["values"]).median
    reached = ratio(ours, summarize(cells[other]["values"]).median, unit)
    target = target_of(engine, other, row)
    if target is None:
        return [row, engine, other, f"{reached:.2f}x", "", ""]
    wanted, met = f"{target:g}x" if target > 1 else "ahead", reached >= target
    if (row, other) == ("startup", "upstream"):
        wanted += f", under {STARTUP_LIMIT_SECONDS:g} s"
        met = met and ours < STARTUP_LIMIT_SECONDS
    return [row, engine, other, f"{reached:.2f}x", wanted, "yes" if met else "no"]


def draw_chart(result: dict[str, Any], path: Path) -> bool:
    """Draw our ratios against each peer on a logarithmic axis, with the targets against upstream, in the format of the
    path's suffix. False, and no file, without matplotlib or peers."""
    others = [name for name in result["engines"] if not name.startswith(OURS)]
    try:
        import matplotlib
    except ImportError:
        return False
    if not others:
        return False
    matplotlib.use("Agg")
    # Makes the file reproducible.
    matplotlib.rcParams["svg.hashsalt"] = "benchmarks"
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, NullFormatter

    rows = [row for row in ALL_ROWS if row in result["rows"] and OURS in result["rows"][row]["engines"]]
    figure, axes = pyplot.subplots(figsize=(8, 1 + 0.25 * len(rows) * (len(others) + 1)), layout="constrained")
    height = 0.8 / len(others)
    for number, other in enumerate(others):
        bars = [(place + number * height, _chart_ratio(result, row, other)) for place, row in enumerate(rows)]
        places, ratios = zip(*((place, value) for place, value in bars if value is not None), strict=True)
        drawn = axes.barh(places, [value - 1 for value in ratios], height, left=1, label=f"against {other}")
        axes.bar_label(drawn, [f"{value:.2f}x" for value in ratios], padding=3, fontsize=8)
    if "upstream" in others:
        first = others.index("upstream") * height
        axes.plot([TARGETS[row] for row in rows], [place + first for place in range(len(rows))], "k|", markersize=12)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}x"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.margins(x=0.15)
    axes.set_yticks([place + (len(others) - 1) * height / 2 for place in range(len(rows))], rows)
    axes.invert_yaxis()
    axes.set_xlabel("times better than the other engine; a bar's mark is its target")
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)
    return True


def _chart_ratio(result: dict[str, Any], row: str, other: str) -> float | None:
    cells = result["rows"][row]
    if other not in cells["engines"]:
        return None
    ours, peer = (summarize(cells["engines"][name]["values"]).median for name in (OURS, other))
    return ratio(ours, peer, cells["unit"])
