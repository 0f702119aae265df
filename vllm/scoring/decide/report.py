"""The report that `vllm decide` ends with: the first rows, measures on known answers, reliability diagrams."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.cells import cell_len, set_cell_size

from vllm.decisions.calibration import Calibration, Scaling
from vllm.decisions.evaluation import Evaluation
from vllm.decisions.fitting import HeldOut
from vllm.scoring.decide.gold import Gold
from vllm.scoring.decide.records import ANSWERS, QuestionSet
from vllm.scoring.files import Item, write_atomically
from vllm.scoring.report import MAX_ROWS, RowReport, Timing, cut, draw_picture, short_names

_MAX_COLUMNS, _MAX_CONFUSED = 4, 12
_MIN_TEXT, _CELL = 20, 24
_BAR, _LINE, _GAP = "#2a78b5", "#666666", "#d9762b"


@dataclass(frozen=True)
class Measures:
    """Files about known answers; None: not asked for."""

    evaluation: Path
    picture: Path | None
    calibration: Path | None

    def paths(self) -> list[tuple[str, Path | None]]:
        """With their flags."""
        return [
            ("--picture", self.picture),
            ("--output's evaluation", self.evaluation),
            ("--fit-calibration", self.calibration),
        ]

    def write(self, golds: Sequence[Gold], title: str, quiet: bool) -> None:
        """Print and write the measures, draw the diagrams, and fit a calibration."""
        evaluations = {gold.name: gold.evaluate() for gold in golds if gold.num_rows}
        if not quiet:
            print()
            for name, found in evaluations.items():
                print_evaluation(name, found)
        for gold in golds:
            if gold.num_refused:
                print(f"vllm decide: {gold.num_refused} refusals of {gold.name!r} are not measured", file=sys.stderr)
        fitted = {} if self.calibration is None else _fit(self.calibration, golds, quiet)
        _write_json(self.evaluation, {"questions": {n: own.to_dict() for n, own in evaluations.items()}, **fitted})
        picture = self.picture if evaluations else None
        drawn = picture and draw_picture(picture, lambda form: draw_reliability(evaluations, title, form))
        if not quiet:
            print(f"evaluation: {self.evaluation}")
            if drawn:
                print(f"picture:    {self.picture}")


class DecisionReport(RowReport):
    """The first rows, and the known answers of `golds`, of which `measures` (None: there are none) are taken."""

    def __init__(self, asked: QuestionSet, golds: Sequence[Gold], input_name: str, measures: Measures | None) -> None:
        super().__init__("decide", input_name)
        self._asked, self._golds, self._measures = asked, golds, measures
        self._shown: list[dict[str, Any]] = []

    def add(self, record: dict[str, Any], item: Item, is_new: bool) -> None:
        super().add(record, item, is_new)
        for gold in self._golds:
            gold.add(self._input_name, item, record)
        if len(self._shown) < MAX_ROWS:
            self._shown.append(record)

    def print_rows(self) -> None:
        """The first rows, with the answers to the first questions."""
        width = shutil.get_terminal_size((120, 24)).columns
        print(format_answers(self._shown, self._asked, width, self.num_rows), end="\n\n")

    def conclude(self, output: Path, model_name: str, timing: Timing, quiet: bool) -> None:
        super().conclude(output, model_name, timing, quiet)
        if self._measures is not None:
            self._measures.write(self._golds, f"{self._input_name}, decided by {model_name}", quiet)


def format_answers(records: Sequence[dict[str, Any]], asked: QuestionSet, width: int, num_rows: int) -> str:
    """Rows as a table for a terminal of `width` columns: each answer with its probability."""
    names = asked.names[:_MAX_COLUMNS]
    table = [["text", *short_names(names)]]
    for record in records:
        answers = record.get(ANSWERS)
        table.append([cut(record["text"], width), *(_cell(answers and answers[name]) for name in names)])
    widths = [max(cell_len(row[place]) for row in table) for place in range(len(table[0]))]
    widths[0] = max(_MIN_TEXT, min(widths[0], width - sum(widths[1:]) - 2 * len(names)))
    lines = []
    for text, *cells in table:
        padded = [set_cell_size(cell, size) for cell, size in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([set_cell_size(cut(text, widths[0]), widths[0]), *padded]).rstrip())
    if num_rows > len(records):
        lines.append(f"... and {num_rows - len(records)} more")
    if len(asked.names) > len(names):
        lines.append(f"... and {len(asked.names) - len(names)} more questions")
    return "\n".join(lines)


def _cell(answer: dict[str, Any] | None) -> str:
    if answer is None:
        return "failed"
    if answer["probabilities"] is None:
        return "refused"
    return f"{cut(answer['prediction'], _CELL)} {max(answer['probabilities'].values()):.3f}"


def print_evaluation(name: str, found: Evaluation) -> None:
    """The measures of one question, and the confusion matrix if it has few labels."""
    right = int(found.confusion.trace())
    print(f"{name}: accuracy {right} of {found.num_rows} ({found.accuracy:.1%}), macro F1 {found.macro_f1:.3f}")
    print(f"  Brier score {found.brier:.4f}, log loss {found.log_loss:.4f}, calibration error {found.ece:.4f}")
    if len(found.labels) > _MAX_CONFUSED:
        return
    names = short_names(found.labels)
    rows = [["known \\ predicted", *names]]
    rows += [[name, *map(str, counts)] for name, counts in zip(names, found.confusion.tolist(), strict=True)]
    widths = [max(cell_len(row[place]) for row in rows) for place in range(len(rows[0]))]
    for row in rows:
        cells = (" " * (size - cell_len(cell)) + cell for cell, size in zip(row, widths, strict=True))
        print("  " + "  ".join(cells))


def print_fit(name: str, halves: HeldOut, num_rows: int, scaling: Scaling) -> None:
    """The effect of a fit on half of the rows on the others, and the fit on all."""
    before, after = halves.before, halves.after
    num_fitted = num_rows - before.num_rows
    print(f"{name}: fitted on {num_fitted} rows, measured on the {before.num_rows} others")
    print(f"  calibration error {before.ece:.4f} before, {after.ece:.4f} after")
    print(f"  log loss {before.log_loss:.4f} before, {after.log_loss:.4f} after")
    print(f"  fitted on all {num_rows} rows: temperature {scaling.temperature:.3f}")


def _fit(path: Path, golds: Sequence[Gold], quiet: bool) -> dict[str, Any]:
    """Write the calibration fitted on all rows; its measures on held-out ones, for the evaluation's file."""
    names, held_out = {}, {}
    for gold in golds:
        if gold.num_rows < 2:
            print(f"vllm decide: too few answers to {gold.name!r} to fit on", file=sys.stderr)
            continue
        halves = gold.held_out()
        names[gold.name] = scaling = gold.fit()
        held_out[gold.name] = {"before": halves.before.to_dict(), "after": halves.after.to_dict()}
        if not quiet:
            print_fit(gold.name, halves, gold.num_rows, scaling)
    _write_json(path, Calibration(names=names).to_dict())
    if not quiet:
        print(f"calibration: {path}")
    return {"held_out": held_out}


def _write_json(path: Path, content: dict[str, Any]) -> None:
    write_atomically(path, f"{json.dumps(content, ensure_ascii=False, indent=1)}\n".encode())


def draw_reliability(evaluations: dict[str, Evaluation], title: str, image_format: str) -> bytes:
    """Reliability diagrams, one a question, in one of PICTURE_FORMATS: the accuracy of each bin over the probability of
    the prediction, with the number of its rows. An ImportError without matplotlib."""
    # Without pyplot, which would need a display.
    from matplotlib.figure import Figure

    num_columns = min(3, len(evaluations))
    num_rows = -(-len(evaluations) // num_columns)
    figure = Figure(figsize=(4.4 * num_columns, 4.6 * num_rows + 0.4), layout="constrained")
    figure.suptitle(title, fontsize=11, parse_math=False)
    for place, (name, found) in enumerate(evaluations.items(), start=1):
        _add_diagram(figure.add_subplot(num_rows, num_columns, place), name, found)
    image = io.BytesIO()
    figure.savefig(image, format=image_format, dpi=130)
    return image.getvalue()


def _add_diagram(axes: Any, name: str, found: Evaluation) -> None:
    bins = found.reliability
    width = bins.edges[1] - bins.edges[0]
    used = bins.counts.nonzero()[0]
    places, heights, means = bins.edges[used], bins.accuracies[used], bins.confidences[used]
    axes.bar(places, heights, width, align="edge", color=_BAR, edgecolor="white", linewidth=0.5, label="accuracy")
    axes.vlines(means, heights, means, color=_GAP, linewidth=2, label="gap to the mean probability")
    axes.plot([0, 1], [0, 1], color=_LINE, linewidth=0.8, linestyle=":")
    for place, height, mean, count in zip(places, heights, means, bins.counts[used], strict=True):
        axes.text(place + width / 2, max(height, mean) + 0.01, str(count), ha="center", fontsize=6, color="#444444")
    axes.set_title(f"{cut(name, 40)}: calibration error {found.ece:.3f}", fontsize=9, parse_math=False)
    axes.set_xlabel("probability of the prediction", fontsize=8)
    axes.set_ylabel("share of right predictions", fontsize=8)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.06)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=7, frameon=False, loc="upper left")
