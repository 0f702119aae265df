"""An audit from its options to what it found."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.auditing.budgets import Budget, decide
from vllm.auditing.label_tables import (
    GroupStatistics,
    LabelTable,
    TableBuilder,
    by_field,
    by_length,
    joined,
    label_statistics,
)
from vllm.auditing.models import ModelSpec
from vllm.auditing.pooled_rows import embedding_statistics, ranking_statistics
from vllm.auditing.readings import Reader, Readings
from vllm.auditing.results import Audit, Candidate, Cost, MissingLabels
from vllm.auditing.tasks import KINDS
from vllm.auditing.text_rows import text_statistics, text_table
from vllm.auditing.vocabularies import check_vocabularies
from vllm.exceptions import CliError
from vllm.scoring.decide.gold import gold_columns, option_index
from vllm.scoring.decide.records import ANSWERS, QuestionSet
from vllm.scoring.files import TextFile, io_errors, read_text
from vllm.scoring.labels.records import GOLD_FIELD

_FOLDER_ROWS = "rows.jsonl"
_TEXT_SUFFIXES = (".txt", ".md", "")


@dataclass(frozen=True)
class Options:
    """The options of an audit; see `vllm.audit`. `rows`: a file, or a folder of texts. `args`: further ones of the
    readers."""

    rows: Path
    kind: str
    reference: str
    candidates: Sequence[str]
    text_field: str = "text"
    gold: Sequence[str] | None = None
    by: Sequence[str] = ()
    budget: str | None = None
    readings: Path | None = None
    overwrite: bool = False
    quiet: bool = False
    args: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)


def run(options: Options) -> Audit:
    """Read all models, one after the other, and compare them. CliError: something cannot be read, or asked."""
    if not options.candidates:
        raise CliError("--candidate: at least one is needed")
    budget = None if options.budget is None else Budget.parse(options.budget, options.kind)
    reference = ModelSpec.parse(options.reference, None, dict(options.engine))
    candidates = [ModelSpec.parse(each, reference, dict(options.engine)) for each in options.candidates]
    if options.kind == "text" and reference.url is not None:
        raise CliError(
            f"--reference {reference.name}: a server does not give the whole vocabulary of texts; name a model there, "
            "and the server as a candidate"
        )
    if options.args.get("backend") is not None:
        _check_backend(options.args["backend"], [reference, *candidates])
    given = Path(os.path.abspath(options.rows))
    folder = options.readings or Path(f"{given.name.removesuffix(given.suffix)}.audit")
    rows = _rows_file(options.rows, folder, options.text_field)
    _check_fields(options, rows)
    reader = Reader(
        folder, argparse.Namespace(**_task_args(options, rows)), KINDS[options.kind], options.overwrite, options.quiet
    )
    if options.kind not in ("rerank", "embed"):
        check_vocabularies(reference, candidates)
    for each in (reference, *candidates):
        reader.check(each)
    known = reader.read(reference)
    found = [_candidate(options, known, reader.read(each, known)) for each in candidates]
    result = Audit(given.name, options.kind, Cost(**_cost(known, known.num_rows)), found)
    if budget is not None:
        judged = decide(budget, found, known.num_rows - known.num_failed)
        result = dataclasses.replace(result, budget=judged)
    return result


def _check_fields(options: Options, rows: Path) -> None:
    """CliError: a field of --by or --gold that no row has."""
    columns = list(options.gold or ())
    if options.kind == "questions":
        asked = QuestionSet.load(options.args["questions"], has_orders=False)
        columns = list(gold_columns(columns, asked).values())
    missing = {**dict.fromkeys(options.by, "--by"), **dict.fromkeys(columns, "--gold")}
    if not missing:
        return
    items = iter(TextFile(rows, options.text_field, options.args.get("limit")))
    while missing and (item := next(items, None)) is not None:
        missing = {name: flag for name, flag in missing.items() if name not in item.fields}
    for name, flag in missing.items():
        raise CliError(f"{flag}: no row has a field {name!r}")


def _check_backend(backend: str, models: list[ModelSpec]) -> None:
    """CliError: a model that engines on a cluster do not read."""
    for each in models:
        if each.url is not None:
            raise CliError(f"--backend {backend}: {each.name} is a server, which has engines of its own")


def _rows_file(path: Path, folder: Path, text_field: str) -> Path:
    """The file of rows: of a folder, one that is made of its texts, with their names in the field `file`."""
    if not path.is_dir():
        return path
    names = sorted(_text_files(path))
    if not names:
        raise CliError(f"{path}: there are no .txt or .md files in it")
    with io_errors("make", folder):
        folder.mkdir(parents=True, exist_ok=True)
    made = folder / _FOLDER_ROWS
    part = made.with_name(f".{made.name}.{os.getpid()}.tmp")
    try:
        with io_errors("write", made), part.open("w", encoding="utf-8") as rows:
            for name in names:
                row = {text_field: read_text(path / name), "file": name}
                rows.write(f"{json.dumps(row, ensure_ascii=False)}\n")
        os.replace(part, made)
    finally:
        part.unlink(missing_ok=True)
    return made


def _text_files(path: Path) -> Iterator[str]:
    """Names relative to `path`; hidden files and folders have none."""
    for folder, folders, files in os.walk(path):
        folders[:] = [each for each in folders if not each.startswith(".")]
        for name in files:
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in _TEXT_SUFFIXES:
                yield os.path.relpath(os.path.join(folder, name), path)


def _task_args(options: Options, rows: Path) -> dict[str, Any]:
    """The arguments of a task over a file, those that an audit has no use for included."""
    usual = dict.fromkeys((
        "output", "limit", "picture", "backend", "replicas", "replica_cpus", "ray_address", "output_format",
        "api_key", "timeout", "concurrency", "labels", "label_ids", "template", "template_file",
        "questions", "gold", "calibration", "fit_calibration", "read", "truncate_prompt_tokens",
        "query", "score_template", "score_labels", "instruction", "max_tokens_per_doc",
        "prompt", "prompt_name", "dimensions", "chunk_tokens", "reference_rows", "reference_spec", "known_labels",
        "image_field", "video_field", "allowed_local_media_path",
    ))  # fmt: skip
    more = {"no_picture": True, "permutations": 1, "min_label_mass": 0.0, "no_normalize": False, "debug": False}
    return {
        **usual, **more, "query_field": "query", **options.args, "kind": options.kind, "file": rows,
        "text_field": options.text_field, "output_format": "jsonl" if options.args.get("backend") else None,
    }  # fmt: skip


def _cost(readings: Readings, rows: int) -> dict[str, Any]:
    names = ("name", "failure", "seconds", "loading_seconds", "peak_mib")
    own = {name: getattr(readings, name) for name in names}
    return {**own, "rows": rows, "failed": readings.num_failed, "readings": str(readings.path)}


def _candidate(options: Options, reference: Readings, readings: Readings) -> Candidate:
    pairs = _pairs(reference, readings)
    if options.kind == "text":
        texts = text_table(pairs)
        statistics = None if texts is None else text_statistics(texts)
        return Candidate(**_cost(readings, 0 if texts is None else len(texts.index)), text=statistics, text_table=texts)
    if options.kind == "embed":
        vectors = embedding_statistics(pairs)
        return Candidate(**_cost(readings, 0 if vectors is None else vectors.rows), embedding=vectors)
    if options.kind == "rerank":
        by_query = None if options.args.get("query") is not None else options.args.get("query_field") or "query"
        orders = ranking_statistics(pairs, by_query)
        return Candidate(**_cost(readings, 0 if orders is None else orders.rows), ranking=orders)
    if options.kind == "labels":
        tables, missing = _label_tables(options, reference, readings)
    else:
        tables, missing = _question_tables(options, pairs), None
    return _of_tables(options, readings, tables, missing)


def _of_tables(
    options: Options, readings: Readings, tables: dict[str, LabelTable], missing: MissingLabels | None
) -> Candidate:
    if not tables:
        return Candidate(**_cost(readings, 0), missing=missing)
    statistics = {name: label_statistics(table) for name, table in tables.items()}
    if len(tables) == 1:
        (whole,) = statistics.values()
    else:
        by_label: dict[str, Any] = {
            each: {
                f"{name}.{label}": delta
                for name, own in statistics.items()
                for label, delta in getattr(own, each).items()
            }
            for each in ("delta_by_label", "abs_delta_by_label")
        }
        flipped = [flip for own in statistics.values() for flip in own.flipped]
        whole = dataclasses.replace(label_statistics(joined(tables)), **by_label, flipped=flipped)
    lengths: list[GroupStatistics] = []
    fields: dict[str, list[GroupStatistics]] = {name: [] for name in options.by}
    for name, table in tables.items():
        prefix = f"{name}: " if len(tables) > 1 else ""
        lengths += _named(prefix, by_length(table))
        for by, groups in fields.items():
            groups += _named(prefix, by_field(table, by))
    rows = max(len(table.index) for table in tables.values())
    return Candidate(
        **_cost(readings, rows),
        missing=missing,
        labels=whole,
        questions={} if options.kind == "labels" else statistics,
        by_length=lengths,
        by=fields,
        label_tables=tables,
    )


def _named(prefix: str, groups: list[GroupStatistics]) -> list[GroupStatistics]:
    return [dataclasses.replace(each, group=f"{prefix}{each.group}") for each in groups]


def _pairs(reference: Readings, readings: Readings) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    yield from zip(reference.rows(), readings.rows(), strict=True)


def _label_tables(
    options: Options, reference: Readings, readings: Readings
) -> tuple[dict[str, LabelTable], MissingLabels | None]:
    if reference.label_token_ids and readings.label_token_ids and reference.label_token_ids != readings.label_token_ids:
        raise CliError(
            f"--candidate {readings.name}: the labels are tokens {readings.label_token_ids}, of the reference "
            f"{reference.label_token_ids}"
        )
    names = [str(each) for each in options.args.get("labels") or options.args.get("label_ids") or ()]
    texts = reference.label_texts or names
    columns = {text.strip(): place for place, text in enumerate(texts)} | {
        name.strip(): place for place, name in enumerate(names)
    }
    gold = options.gold[0] if options.gold else GOLD_FIELD
    builder, lacking, flips, rows = TableBuilder(names, options.by), dict.fromkeys(names, 0), 0, 0
    for own, other in _pairs(reference, readings):
        if "error" in own or "error" in other:
            continue
        if lacked := [name for name in names if any(name not in row["logprobs"] for row in (own, other))]:
            rows += 1
            flips += _is_flip(own, other)
            for name in lacked:
                lacking[name] += 1
            continue
        known = columns.get(str(own.get(gold, "")).strip())
        builder.add(own["index"], own, other, own["num_prompt_tokens"], known, own)
    table, missing = builder.table(), MissingLabels(rows, lacking, flips) if rows else None
    if options.gold and table is not None and (table.gold < 0).all():
        raise CliError(f"--gold {gold}: no row has one of the labels there, which are {', '.join(map(repr, names))}")
    return {} if table is None else {"": table}, missing


def _is_flip(own: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two rows have a likeliest label, and not the same one. A label that is missing is less likely than all
    that are there."""
    best = []
    for row in (own, other):
        values = {name: value for name, value in row["logprobs"].items() if value is not None}
        if not values:
            return False
        best.append(max(values, key=values.__getitem__))
    return best[0] != best[1]


def _question_tables(options: Options, pairs: Iterator[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, LabelTable]:
    asked = QuestionSet.load(options.args["questions"], has_orders=False)
    golds = gold_columns(options.gold or (), asked)
    builders = [TableBuilder(keys, options.by) for keys in asked.keys]
    for own, other in pairs:
        if "error" in own or "error" in other:
            continue
        for place, (name, question) in enumerate(zip(asked.names, asked.questions, strict=True)):
            value = own.get(golds[place]) if place in golds else None
            known = None if value in (None, "") else option_index(question, value)
            answers = own[ANSWERS][name], other[ANSWERS][name]
            builders[place].add(own["index"], *answers, own["num_prompt_tokens"], known, own)
    tables = {name: builder.table() for name, builder in zip(asked.names, builders, strict=True)}
    return {name: table for name, table in tables.items() if table is not None}
