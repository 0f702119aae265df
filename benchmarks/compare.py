"""Print a markdown table of what `benchmarks/engine.py` measured: one line a row, one column an engine.

    python benchmarks/compare.py ours.jsonl transformers.jsonl vllm.jsonl

The first engine is compared with each of the others; a ratio above 1 says that it is faster.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from workloads import ROWS

# Logits between 16 and 32 are multiples of 0.125 in bf16; a mean over few prompts may be off by two steps.
CHECK_TOLERANCE = 0.25


def main() -> None:
    """Read the files, print the table, then what makes it doubtful."""
    parser = argparse.ArgumentParser(description="A markdown table of benchmark results, with ratios.")
    parser.add_argument("files", nargs="+", type=Path, help="JSON lines of benchmarks/engine.py")
    parser.add_argument("--median", action="store_true", help="compare medians, not the best repeats")
    args = parser.parse_args()
    records = read_records(args.files)
    if not records:
        raise SystemExit("no results in " + ", ".join(map(str, args.files)))
    print(make_table(records, "median" if args.median else "value"))
    for warning in find_warnings(records):
        print(f"warning: {warning}", file=sys.stderr)


def read_records(files: Iterable[Path]) -> list[dict[str, Any]]:
    """All results in the files; of several for one engine and row, the last one in its first one's place."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path in files:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("{"):
                record = json.loads(line)
                found[record["engine"], record["row"]] = record
    return list(found.values())


def make_table(records: list[dict[str, Any]], key: str = "value") -> str:
    """The table; `key` is "value" (best repeat) or "median"."""
    engines = _engines(records)
    by_cell = {(record["row"], record["engine"]): record for record in records}
    base = engines[0]
    names = {record["engine"]: f"{record['engine']} {record['version']}" for record in records}
    head = [
        "row",
        "unit",
        *(names[engine] for engine in engines),
        *(f"{base} / {other}" for other in engines[1:]),
    ]
    lines = [head, ["---", "---", *["---:"] * (2 * len(engines) - 1)]]
    for row in (row for row in ROWS if any((row, engine) in by_cell for engine in engines)):
        cells = [by_cell.get((row, engine)) for engine in engines]
        unit = next(cell["unit"] for cell in cells if cell)
        ratios = [_ratio(cells[0], other, key) for other in cells[1:]]
        lines.append([row, unit, *(_number(cell, key) for cell in cells), *ratios])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def find_warnings(records: list[dict[str, Any]]) -> list[str]:
    """Why figures may not be comparable: other machines, models, settings, or readings that disagree."""
    warnings = []
    for name in ("machine", "threads", "dtype", "scale"):
        values = {json.dumps(record[name]) for record in records}
        if len(values) > 1:
            warnings.append(f"{name} differs: {', '.join(sorted(values))}")
    base = _engines(records)[0]
    checks = {record["row"]: record["check"] for record in records if record["engine"] == base}
    for record in records:
        own, wanted = record["check"], checks.get(record["row"])
        if own is not None and wanted is not None and abs(own - wanted) > CHECK_TOLERANCE:
            warnings.append(f"{record['row']}: {record['engine']} read a mean logprob of {own}, {base} {wanted}")
    return warnings


def _engines(records: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(record["engine"] for record in records))


def _number(record: dict[str, Any] | None, key: str) -> str:
    if record is None:
        return "-"
    value = record[key]
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _ratio(base: dict[str, Any] | None, other: dict[str, Any] | None, key: str) -> str:
    if base is None or other is None:
        return "-"
    ratio = base[key] / other[key]
    return f"{1 / ratio if base['unit'] == 's' else ratio:.2f}x"


if __name__ == "__main__":
    main()
