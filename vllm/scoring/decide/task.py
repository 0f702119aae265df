"""`vllm decide`: questions about a file's texts, answered by an engine in this process or by a server."""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.decisions.calibration import Calibration
from vllm.decisions.evaluation import Evaluation
from vllm.decisions.params import DecisionParams
from vllm.exceptions import CliError, VLLMValidationError
from vllm.scoring.batches import Progress, deciding
from vllm.scoring.decide.gold import Gold, gold_columns
from vllm.scoring.decide.records import QuestionSet
from vllm.scoring.decide.report import DecisionReport, draw_reliability, print_evaluation, print_fit, write_evaluations
from vllm.scoring.decide.scorers import BatchDecider, ServerDecider, columns_of
from vllm.scoring.files import Item, TextFile, write_atomically
from vllm.scoring.rows import RowFile
from vllm.scoring.run import check_paths, complete, load, picture_path, read_texts
from vllm.scoring.server import Server
from vllm.scoring.tables import TableOutput

if TYPE_CHECKING:
    from vllm.scoring.columns import FieldKinds

# Options of a request, as arguments have them too.
_OPTIONS = ("read", "permutations", "min_label_mass", "truncate_prompt_tokens")


@dataclass(frozen=True)
class _Outputs:
    """Files to write; None: not asked for."""

    table: TableOutput
    evaluation: Path | None
    picture: Path | None
    calibration: Path | None


def decide_file(args: argparse.Namespace) -> int:
    """Complete the output file to one row a text, and report; 0, or 1 when some of the texts could not be decided."""
    outputs = _outputs(args)
    asked, params = questions_and_params(args)
    golds = _golds(args, asked)
    kinds = outputs.table.field_kinds()
    texts, made_from = _read(args, golds, kinds)
    made_from |= made_from_questions(args, asked, params)
    with nullcontext() if args.url is None else Server(args) as server:
        made_from |= deciding(args) if server is None else server.deciding()
        outputs.table.check(made_from, args)
        started = time.perf_counter()
        scorer: BatchDecider | ServerDecider
        if server is None:
            scorer = BatchDecider(load(args), asked=asked, params=params)
        else:
            scorer = ServerDecider(server, asked=asked, fields=_request_fields(args, params))
        load_seconds = time.perf_counter() - started
        report = DecisionReport(asked, golds, texts.name)
        started = time.perf_counter()
        bar = closing(Progress(made_from["num_texts"], shown=not args.quiet))
        with RowFile(outputs.table.rows, made_from, args.resume) as rows, bar as progress:
            complete(texts, rows, scorer, report, progress)
        seconds = time.perf_counter() - started
    if kinds is not None:
        outputs.table.finish(columns_of(asked, kinds))
    if not args.quiet:
        report.print_table()
        print(f"results:    {outputs.table.output}")
        report.print_throughput(seconds, f"; loading took {load_seconds:.2f} s")
    if golds:
        _measure(outputs, golds, report, f"{texts.name}, decided by {scorer.model_name}", args.quiet)
    return 1 if report.print_failures("first") else 0


def questions_and_params(args: argparse.Namespace) -> tuple[QuestionSet, DecisionParams]:
    """What is asked, and how; a CliError for what cannot be, also for a calibration of other labels."""
    asked = QuestionSet.load(args.questions, args.permutations > 1)
    try:
        params = DecisionParams(**{name: getattr(args, name) for name in _OPTIONS}, calibration=args.calibration)
        params.scalings.check(asked.questions)
    except VLLMValidationError as error:
        raise CliError(error.args[0]) from None
    return asked, params


def made_from_questions(args: argparse.Namespace, asked: QuestionSet, params: DecisionParams) -> dict[str, Any]:
    """What decides the rows beside texts and model."""
    calibration = None if params.calibration is None else params.scalings.to_dict()
    options = {name: getattr(args, name) for name in _OPTIONS}
    return {"questions": asked.given, **options, "calibration": calibration}


def _request_fields(args: argparse.Namespace, params: DecisionParams) -> dict[str, Any]:
    fields = {name: getattr(args, name) for name in _OPTIONS if getattr(args, name) is not None}
    if params.calibration is not None:
        fields["calibration"] = params.scalings.to_dict()
    return fields


def _golds(args: argparse.Namespace, asked: QuestionSet) -> list[Gold]:
    columns = gold_columns(args.gold or (), asked)
    for index in columns:
        if args.fit_calibration is not None and asked.questions[index].name is None:
            raise CliError(f"--fit-calibration: questions[{index}] has no name, by which a calibration is found")
    return [Gold(asked, index, column) for index, column in columns.items()]


def _read(args: argparse.Namespace, golds: list[Gold], kinds: FieldKinds | None) -> tuple[TextFile, dict[str, Any]]:
    counts = dict.fromkeys((gold.name for gold in golds), 0)

    def check(item: Item) -> None:
        for gold in golds:
            counts[gold.name] += gold.known(args.file.name, item) is not None
        if kinds is not None:
            kinds.add(item.fields)

    found = read_texts(args, check)
    least = 1 if args.fit_calibration is None else 2
    for name, count in counts.items():
        if count < least:
            raise CliError(f"--gold: {count} rows have a known answer to {name!r}; at least {least} must have one")
    return found


def _outputs(args: argparse.Namespace) -> _Outputs:
    output: Path = args.output or Path(f"{args.file.stem}.decisions.jsonl")
    has_gold = args.gold is not None
    outputs = _Outputs(
        TableOutput.of(output),
        output.with_suffix(".evaluation.json") if has_gold else None,
        picture_path(args, output) if has_gold else None,
        args.fit_calibration,
    )
    paths = [*outputs.table.paths(), ("--picture", outputs.picture)]
    paths += [("--output's evaluation", outputs.evaluation), ("--fit-calibration", outputs.calibration)]
    inputs = (("FILE", args.file), ("--questions", args.questions), ("--calibration", args.calibration))
    check_paths({path.resolve(): flag for flag, path in inputs if path is not None}, paths)
    return outputs


def _measure(outputs: _Outputs, golds: list[Gold], report: DecisionReport, title: str, quiet: bool) -> None:
    """Print and write the measures, draw the diagrams, and fit a calibration."""
    evaluations = report.evaluations()
    if not quiet:
        print()
        for name, found in evaluations.items():
            print_evaluation(name, found)
    for gold in golds:
        if gold.num_refused:
            print(f"vllm decide: {gold.num_refused} refusals of {gold.name!r} are not measured", file=sys.stderr)
    fitted: dict[str, Any] = {}
    if outputs.calibration is not None:
        fitted = _fit(outputs.calibration, golds, quiet)
    assert outputs.evaluation is not None
    write_evaluations(outputs.evaluation, evaluations, fitted)
    drawn = outputs.picture is not None and bool(evaluations) and _draw(outputs.picture, evaluations, title)
    if not quiet:
        print(f"evaluation: {outputs.evaluation}")
        if drawn:
            print(f"picture:    {outputs.picture}")


def _draw(picture: Path, evaluations: dict[str, Evaluation], title: str) -> bool:
    try:
        image = draw_reliability(evaluations, title, picture.suffix.lower().lstrip("."))
    except ImportError:
        print("no picture: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return False
    write_atomically(picture, image)
    return True


def _fit(path: Path, golds: list[Gold], quiet: bool) -> dict[str, Any]:
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
    content = json.dumps(Calibration(names=names).to_dict(), ensure_ascii=False, indent=1)
    write_atomically(path, f"{content}\n".encode())
    if not quiet:
        print(f"calibration: {path}")
    return {"held_out": held_out}
