"""From a comparison's results to tables: medians, spreads, ratios, targets, distances from the bounds.

A result is what compare.py writes as JSON:

    engines   name -> {version, notes, threads}, ours first
    rows      row -> {unit, engines: name -> {values, seconds, ...}}
    bounds    row -> {gemm: seconds, memory: seconds}, one a repeat, of the same work
    rates     what the bounds are made of: see bounds.rates_to_json
    pairs     [seconds with ids / seconds without], one a pair of runs
    idle      name -> share of a core that the engine took while others worked
    failures  what could not be measured, in words
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from workloads import ROWS

DOCUMENT = Path(__file__).resolve().parent.parent / "docs" / "performance.md"

OURS = "ours"

# How many times faster than upstream (for memory: how many times less) each row is to be.
TARGETS = {
    "startup": 8.0,
    "score": 1.25,
    "score_prefix": 5.0,
    "fullvocab": 20.0,
    "decode64": 2.0,
    "decode64_ids": 2.2,
    "decode1": 2.0,
    "prompt_logprobs": 2.0,
    "peak_memory": 2.0,
}
# The same for ours with int8 weights, against upstream's bfloat16.
INT8_TARGETS = {"score": 1.9, "decode1": 3.0}
STARTUP_LIMIT_SECONDS = 4.0
IDS_LIMIT = 1.02

# Logits between 16 and 32 are multiples of 0.125 in bf16; a mean over few prompts may be off by two steps.
CHECK_TOLERANCE = 0.25
# Below it an idle engine is one that sleeps, but for a timer now and then.
IDLE_LIMIT = 0.02

# Units of which less is better.
_COSTS = ("s", "MiB")


class Summary(NamedTuple):
    """Of one engine's repeats of a row."""

    median: float
    low: float
    high: float


def summarize(values: Sequence[float]) -> Summary:
    """Median and spread."""
    return Summary(statistics.median(values), min(values), max(values))


def ratio(ours: float, other: float, unit: str) -> float:
    """How many times better `ours` is: above 1 it is the better one."""
    return other / ours if unit in _COSTS else ours / other


def target_of(engine: str, other: str, row: str) -> float | None:
    """The ratio that `engine` is to reach against `other`; None = none was set.

    Against transformers and llama.cpp it is to be ahead: 1, but for llama.cpp's start-up, which imports no torch.
    """
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
    for row in _rows(result):
        for engine in own:
            for other in others:
                line = _ratio_line(result, row, engine, other)
                if line:
                    lines.append(line)
    return (
        markdown_table(["row", "engine", "against", "ratio", "target", "reached"], lines, num_text=3) if lines else ""
    )


def bounds_table(result: dict[str, Any]) -> str:
    """How near ours comes to the row's products alone and to its memory traffic alone."""
    lines = []
    for row in _rows(result):
        bound, cell = result["bounds"].get(row), result["rows"][row]["engines"].get(OURS)
        if bound is None or cell is None:
            continue
        floors = [max(both) for both in zip(bound["gemm"], bound["memory"], strict=True)]
        share = statistics.median(floor / taken for floor, taken in zip(floors, cell["seconds"], strict=False))
        medians = (statistics.median(values) for values in (cell["seconds"], bound["gemm"], bound["memory"]))
        lines.append([row, *(f"{seconds:.3f}" for seconds in medians), f"{share:.0%}"])
    head = ["row", "ours (s)", "GEMM alone (s)", "memory alone (s)", "of the bound"]
    return markdown_table(head, lines, num_text=1) if lines else ""


def kernels_line(result: dict[str, Any]) -> str:
    """Which kernels were the fastest of the bounds' products, and of how many; empty without bounds."""
    if not result.get("rates"):
        return ""
    counts = Counter(product["kernel"] for product in result["rates"]["products"])
    return "GEMM alone: " + ", ".join(f"{count} products by {kernel}" for kernel, count in counts.most_common())


def misses_table(result: dict[str, Any]) -> str:
    """Of each row whose target against upstream is missed, the time that the target allows beside the products alone,
    and what everything but products takes."""
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
    """What 20 ids a position cost ours, from pairs of runs side by side; empty without pairs."""
    if not result["pairs"]:
        return ""
    middle, low, high = summarize(result["pairs"])
    verdict = "yes" if middle <= IDS_LIMIT else "no"
    return (
        f"decode64_ids against decode64, ours: {middle - 1:+.1%} time (median of {len(result['pairs'])} pairs, "
        f"{low - 1:+.1%} to {high - 1:+.1%}; target at most {IDS_LIMIT - 1:+.0%}: {verdict})"
    )


def find_warnings(result: dict[str, Any]) -> list[str]:
    """Why figures may not be comparable: readings that disagree, engines that did not sleep, work scaled."""
    warnings = []
    if result["scale"] != 1:
        warnings.append(f"work scaled by {result['scale']:g}: targets are for whole work")
    for name, share in result["idle"].items():
        if share > IDLE_LIMIT:
            warnings.append(f"{name} took {share:.1%} of a core while others worked")
    for row in _rows(result):
        cells = result["rows"][row]["engines"]
        wanted = cells.get(OURS, {}).get("check")
        for name, cell in cells.items():
            if wanted is not None and cell.get("check") is not None and abs(cell["check"] - wanted) > CHECK_TOLERANCE:
                warnings.append(f"{row}: {name} read a mean logprob of {cell['check']:.3f}, {OURS} {wanted:.3f}")
    return warnings


def replace_section(text: str, name: str, content: str) -> str:
    """The document with everything between `<!-- begin NAME -->` and `<!-- end NAME -->` replaced.

    Raises:
        ValueError: the document does not have the two markers once each, in this order.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"the document must hold {begin!r} and then {end!r}, once each")
    before, after = text.split(begin)[0], text.split(end)[1]
    return f"{before}{begin}\n\n{content.strip()}\n\n{end}{after}"


def write_section(name: str, content: str) -> None:
    """Replace a section of docs/performance.md; see `replace_section`."""
    DOCUMENT.write_text(replace_section(DOCUMENT.read_text(encoding="utf-8"), name, content), encoding="utf-8")


def number(value: float) -> str:
    """Three digits or so."""
    if not value or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]], num_text: int) -> str:
    """A table whose first `num_text` columns are text and the others numbers, to the right."""
    rule = ["---"] * num_text + ["---:"] * (len(head) - num_text)
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


def _rows(result: dict[str, Any]) -> list[str]:
    return [row for row in ROWS if row in result["rows"]]


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
