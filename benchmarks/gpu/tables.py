"""Tables of gpu_check.py's JSON result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from report import markdown_table, number


def rows_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The measured rows: see make_row."""
    return [
        row
        for part, cases in result["parts"].items()
        if part != "tests"
        for case in cases.values()
        for row in case.get("result", {}).get("rows", ())
    ]


def missed(result: dict[str, Any]) -> list[str]:
    """Rows that miss their target."""
    return [row["row"] for row in rows_of(result) if row["met"] is False]


def failures(result: dict[str, Any]) -> list[str]:
    """A line for each failure and each case that was not run."""
    return list(_failures(result))


def _failures(result: dict[str, Any]) -> Iterator[str]:
    for part, cases in result["parts"].items():
        if not cases:
            yield f"{part}: not run"
        elif part == "tests":
            if not cases.get("ok"):
                named = ", ".join(cases.get("failed", ())) or f"pytest ended with {cases.get('statuses')}"
                yield f"tests: {named}"
        else:
            for name, case in cases.items():
                if "error" in case:
                    yield f"{part}, {name}: {case['error'].strip().splitlines()[-1]}"


def make_table(result: dict[str, Any]) -> str:
    """The rows, then a line for each other check and each failure."""
    lines = [
        [
            row["row"],
            row["work"],
            _value(row["value"], row["unit"]),
            "" if row["target"] is None else _target(row),
            {True: "yes", False: "NO", None: ""}[row["met"]],
        ]
        for row in rows_of(result)
    ]
    parts = [markdown_table(["row", "work", "measured", "target", "reached"], lines, num_text=2)] if lines else []
    parts += [_facts(result), *(f"FAILED {line}" for line in failures(result))]
    return "\n\n".join(part for part in parts if part)


def make_section(result: dict[str, Any]) -> str:
    """The section of docs/performance.md."""
    facts = _card(result)
    card = ", ".join(f"{name} {facts[name]}" for name in ("cuda", "torch", "triton", "transformers") if facts.get(name))
    driver = facts.get("nvidia_smi")
    driver = f", driver {driver['driver_version']}" if isinstance(driver, dict) else ""
    return (
        f"{facts.get('card', 'unknown card')}{driver}, {card}; {result['date']}; `{result['command']}`\n\n"
        + make_table(result)
    )


def _facts(result: dict[str, Any]) -> str:
    sentences = []
    rates = {
        name: value
        for case in result["parts"].get("card", {}).values()
        for name, value in case.get("result", {}).items()
    }
    if "copy_bytes_per_second" in rates:
        sentences.append(f"Copy bandwidth {rates['copy_bytes_per_second'] / 1e12:.3g} TB/s.")
    if "matrix_flops_per_second" in rates:
        sentences.append(f"bfloat16 products {rates['matrix_flops_per_second'] / 1e12:.3g} TFLOP/s.")
    if host := rates.get("host_flops"):
        each = ", ".join(f"{level} {value / 1e12:.3g}" for level, value in host.items())
        sentences.append(f"bfloat16 products of the host, {rates['host']}, by level: {each} TFLOP/s.")
    if checks := result["parts"].get("kernels"):
        sound = sum("error" not in case for case in checks.values())
        sentences.append(f"Kernels against float64: {sound} of {len(checks)} checks hold (seed {result['seed']}).")
    if counts := result["parts"].get("tests", {}).get("counts"):
        sentences.append(
            "Tests: " + ", ".join(f"{count} {name.lower()}" for name, count in sorted(counts.items())) + "."
        )
    sentences.append(f"{result['seconds']:.0f} s in all.")
    return " ".join(sentences)


def _card(result: dict[str, Any]) -> dict[str, Any]:
    return result["parts"].get("card", {}).get("facts", {}).get("result", {})


def _target(row: dict[str, Any]) -> str:
    return f"at {'least' if row['at_least'] else 'most'} {_value(row['target'], row['unit'])}"


def _value(value: float, unit: str) -> str:
    if unit == "x":
        return f"{value:.3g}x"
    return f"{value:.0%} {unit}" if unit.startswith("of ") else f"{number(value)} {unit}"
