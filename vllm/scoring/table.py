"""What `vllm score` prints: one line a text, cut to the terminal's width."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size

MAX_ROWS = 60
_MIN_TEXT = 20
_LABEL_WIDTH = 16

Scored = Sequence[tuple[dict[str, Any], bool | None]]
"""Rows of the output file, each with whether its prediction is right (None = unknown)."""


def format_table(scored: Scored, headings: dict[str, str], width: int, num_rows: int) -> str:
    """The first MAX_ROWS of `scored` as a table for a terminal of `width` columns, with a column for each of the first
    two labels; `num_rows` rows are in the output."""
    shown, labels = scored[:MAX_ROWS], list(headings)[:2]
    header = [*(f"P({name})" for name in short_names(list(headings.values()))[:2]), "logprob", "rank", "mass", ""]
    rows = [header, *(_row(record, labels, correct) for record, correct in shown)]
    if not any(row[-1] for row in rows):
        rows = [row[:-1] for row in rows]
    texts = ["text", *(record["text"] for record, _ in shown)]
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    longest = max(cell_len(one_line(text)) for text in texts)
    text_width = max(_MIN_TEXT, min(width - sum(widths) - 2 * len(widths), longest))
    lines = []
    for text, row in zip(texts, rows, strict=True):
        cells = [" " * (size - cell_len(cell)) + cell for cell, size in zip(row, widths, strict=True)]
        lines.append("  ".join([set_cell_size(cut(text, text_width), text_width), *cells]).rstrip())
    if num_rows > len(shown):
        lines.append(f"... and {num_rows - len(shown)} more")
    lines.append("logprob and rank: of the likeliest label; mass: the probability of all labels together")
    return "\n".join(lines)


def short_names(labels: Sequence[str]) -> list[str]:
    """Labels as headings: without surrounding space where they stay distinct so, and cut when long."""
    stripped = [label.strip() for label in labels]
    names = stripped if all(stripped) and len(set(stripped)) == len(labels) else [repr(label) for label in labels]
    return [cut(name, _LABEL_WIDTH) for name in names]


def one_line(text: str) -> str:
    """The text without line breaks and other control characters, which could steer a terminal."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def cut(text: str, width: int) -> str:
    """The text on one line, in at most `width` columns of a terminal."""
    text = one_line(text)
    return text if cell_len(text) <= width else set_cell_size(text, width - 1).rstrip(" .,") + "…"


def _row(record: dict[str, Any], labels: Sequence[str], correct: bool | None) -> list[str]:
    if "error" in record:
        return [*("-" for _ in labels), "-", "-", "-", "failed"]
    prediction = record["prediction"]
    return [
        *(_number(record["probs"][label], 3) for label in labels),
        _number(record["logprobs"].get(prediction), 2),
        str(record["ranks"].get(prediction, "-")),
        _number(record["label_mass"], 3),
        "wrong" if correct is False else "",
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
