"""The picture of `vllm score`: one bar a text."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import Any

from vllm.scoring.table import MAX_ROWS, Scored, cut, short_names

FORMATS = ("png", "svg", "pdf")
_TEXT_COLUMNS = 72
# Distinct for most colour-blind readers, and in print.
_COLOURS = ("#2a78b5", "#d9762b", "#3d9970", "#9b5fb0", "#8c8c8c", "#c9a227", "#c44e6b", "#4fb3bf")
_NO_WINNER = "#bbbbbb"


def draw(scored: Scored, headings: dict[str, str], title: str, image_format: str, num_scored: int) -> bytes:
    """A bar chart of P(first label) of the first MAX_ROWS of `scored`, coloured by the likeliest label, in one of
    FORMATS. Rows with an error have no bar: `num_scored` counts the output's others. An ImportError without
    matplotlib."""
    from matplotlib.figure import Figure

    shown = scored[:MAX_ROWS]
    labels = list(headings)
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
    winners = [label for label in labels if any(record["prediction"] == label for record, _ in shown)]
    _add_legend(figure, [(names[label], colours[label]) for label in winners])
    return _render(figure, image_format)


def _add_bars(axes: Any, shown: Scored, label: str, colours: dict[str, str]) -> None:
    rows = range(len(shown))
    values = [record["probs"][label] or 0.0 for record, _ in shown]
    axes.barh(rows, values, height=0.72, color=[colours.get(record["prediction"], _NO_WINNER) for record, _ in shown])
    for row, (value, (_, correct)) in enumerate(zip(values, shown, strict=True)):
        note = "  wrong" if correct is False else ""
        axes.text(value + 0.01, row, f"{value:.2f}{note}", va="center", fontsize=8, color="#444444")
    axes.set_yticks(rows, [cut(record["text"], _TEXT_COLUMNS) for record, _ in shown], fontsize=8)
    for tick in axes.get_yticklabels():
        # A dollar sign in a text starts no formula.
        tick.set_parse_math(False)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xlim(0, 1.12)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _add_legend(figure: Any, entries: Sequence[tuple[str, str]]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in entries]
    style = {"loc": "outside lower right", "ncols": 4, "fontsize": 8, "frameon": False, "title_fontsize": 8}
    legend = figure.legend(handles=handles, title="likeliest label", **style)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _render(figure: Any, image_format: str) -> bytes:
    # Without pyplot, which would need a display.
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        # A character that the font lacks is drawn as a box.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(buffer, format=image_format, dpi=130)
    return buffer.getvalue()
