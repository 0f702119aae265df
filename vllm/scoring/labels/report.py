"""The report that `vllm score` ends with: a line or a bar a text, and the accuracy."""

from __future__ import annotations

import io
import shutil
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.cells import cell_len, set_cell_size

from vllm.scoring.files import Item
from vllm.scoring.labels.records import Labels, verdict
from vllm.scoring.report import MAX_ROWS, RowReport, Timing, cut, draw_picture, one_line, short_names

_MIN_TEXT = 20
_PICTURE_TEXT = 72
# Distinct for most colour-blind readers, and in print.
_COLOURS = ("#2a78b5", "#d9762b", "#3d9970", "#9b5fb0", "#8c8c8c", "#c9a227", "#c44e6b", "#4fb3bf")
_NO_WINNER = "#bbbbbb"

Scored = Sequence[tuple[dict[str, Any], bool | None]]
"""Rows of the output file, each with whether its prediction is right (None = unknown)."""


class LabelReport(RowReport):
    """The first rows, as a table and as a picture at `picture` (None: none), and the accuracy."""

    def __init__(self, labels: Labels, input_name: str, picture: Path | None) -> None:
        super().__init__("score", input_name)
        self._labels, self._picture = labels, picture
        self._num_judged = self._num_correct = 0
        self._shown: list[tuple[dict[str, Any], bool | None]] = []
        self._drawn: list[tuple[dict[str, Any], bool | None]] = []

    def add(self, record: dict[str, Any], item: Item, is_new: bool) -> None:
        super().add(record, item, is_new)
        correct = verdict(record, item, self._labels)
        self._num_judged += correct is not None
        self._num_correct += correct is True
        if len(self._shown) < MAX_ROWS:
            self._shown.append((record, correct))
        if "error" not in record and len(self._drawn) < MAX_ROWS:
            self._drawn.append((record, correct))

    def print_rows(self) -> None:
        width = shutil.get_terminal_size((120, 24)).columns
        print(format_table(self._shown, self._labels.headings(), width, self.num_rows), end="\n\n")

    def conclude(self, output: Path, model_name: str, timing: Timing, quiet: bool) -> None:
        """Print the results, unless `quiet`, and draw the first rows without an error."""
        if not quiet:
            self.print_rows()
        drawn = self._picture is not None and self._draw(self._picture, f"{self._input_name}, scored by {model_name}")
        if quiet:
            return
        lines = [f"picture:    {self._picture}"] if drawn else []
        if self._num_judged:
            share = self._num_correct / self._num_judged
            lines.append(f"accuracy:   {self._num_correct} of {self._num_judged} ({share:.1%})")
        self.print_results(output, timing, *lines)

    def _draw(self, picture: Path, title: str) -> bool:
        headings, num_scored = self._labels.headings(), self.num_rows - self.num_failed
        return bool(self._drawn) and draw_picture(
            picture, lambda form: draw(self._drawn, headings, title, form, num_scored)
        )


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


def draw(scored: Scored, headings: dict[str, str], title: str, image_format: str, num_scored: int) -> bytes:
    """A bar chart of P(first label), coloured by the likeliest label, in one of PICTURE_FORMATS: of the first MAX_ROWS
    of `scored`, which are rows without an error; the output has `num_scored`. An ImportError without matplotlib."""
    # Without pyplot, which would need a display.
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    shown, labels = scored[:MAX_ROWS], list(headings)
    names = dict(zip(labels, short_names(list(headings.values())), strict=True))
    colours = {label: _COLOURS[i % len(_COLOURS)] for i, label in enumerate(labels)}
    figure = Figure(figsize=(11, 1.4 + 0.27 * len(shown)), layout="constrained")
    axes = figure.add_subplot()
    _add_bars(axes, shown, labels[0], colours)
    axes.set_xlabel(f"P({names[labels[0]]}) among the labels", parse_math=False)
    if len(labels) == 2:
        axes.axvline(0.5, color="#666666", linewidth=0.8, linestyle=":")
    more = f" (the first {len(shown)} of {num_scored})" if num_scored > len(shown) else ""
    figure.suptitle(title + more, fontsize=11, parse_math=False)
    predictions = {record["prediction"] for record, _ in shown}
    handles = [Patch(color=colours[label], label=names[label]) for label in labels if label in predictions]
    style: dict[str, Any] = {"ncols": 4, "fontsize": 8, "frameon": False, "title_fontsize": 8}
    legend = figure.legend(handles=handles, title="likeliest label", loc="outside lower right", **style)
    for text in legend.get_texts():
        text.set_parse_math(False)
    image = io.BytesIO()
    with warnings.catch_warnings():
        # A character that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(image, format=image_format, dpi=130)
    return image.getvalue()


def _add_bars(axes: Any, shown: Scored, label: str, colours: dict[str, str]) -> None:
    rows = range(len(shown))
    values = [record["probs"][label] or 0.0 for record, _ in shown]
    axes.barh(rows, values, height=0.72, color=[colours.get(record["prediction"], _NO_WINNER) for record, _ in shown])
    for row, (value, (_, correct)) in enumerate(zip(values, shown, strict=True)):
        note = "  wrong" if correct is False else ""
        axes.text(value + 0.01, row, f"{value:.2f}{note}", va="center", fontsize=8, color="#444444")
    axes.set_yticks(rows, [cut(record["text"], _PICTURE_TEXT) for record, _ in shown], fontsize=8)
    for tick in axes.get_yticklabels():
        # A dollar sign in a text starts no formula.
        tick.set_parse_math(False)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, 1.12)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
