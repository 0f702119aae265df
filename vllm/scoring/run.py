"""`vllm score`: a file's texts, scored by an engine in this process or by a server."""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import CliError
from vllm.scoring.batches import BatchScorer, Progress, Scorer, batches, deciding
from vllm.scoring.files import Item, TextFile, read_text
from vllm.scoring.labels.report import PICTURE_FORMATS, Report, RowReport
from vllm.scoring.rows import RowFile, check_output, meta_path
from vllm.scoring.server import Server, ServerScorer
from vllm.scoring.labels.templates import Template
from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM


def score_file(args: argparse.Namespace) -> int:
    """Complete the output file to one row a text, and report; 0, or 1 when some of the texts could not be scored."""
    output, picture = _output_paths(args)
    texts, template, made_from = read_input(args)
    with nullcontext() if args.url is None else Server(args) as server:
        made_from |= deciding(args) if server is None else server.deciding()
        check_output(output, made_from, args.resume, args.overwrite)
        started = time.perf_counter()
        how: Any = {"template": template, "given": args.labels or args.label_ids, "input_name": texts.name}
        scorer = BatchScorer(load(args), **how) if server is None else ServerScorer(server, **how)
        load_seconds = time.perf_counter() - started
        report = Report(scorer.labels, texts.name)
        started = time.perf_counter()
        bar = closing(Progress(made_from["num_texts"], shown=not args.quiet))
        with RowFile(output, made_from, args.resume) as rows, bar as progress:
            complete(texts, rows, scorer, report, progress)
        score_seconds = time.perf_counter() - started

    if not args.quiet:
        report.print_table()
    drawn = picture is not None and report.draw(picture, f"{texts.name}, scored by {scorer.model_name}")
    if not args.quiet:
        print(f"results:    {output}")
        if drawn:
            print(f"picture:    {picture}")
        report.print_summary(load_seconds, score_seconds)
    return 1 if report.print_failures("first") else 0


def read_input(
    args: argparse.Namespace, see: Callable[[dict[str, Any]], None] | None = None
) -> tuple[TextFile, Template | None, dict[str, Any]]:
    """The file of texts, the template (None: the default one), and what decides the rows beside the model; see
    `read_texts`. `see` gets each row's fields."""
    template = None
    if args.template is not None:
        template = Template.unescaped(args.template)
    elif args.template_file is not None:
        # A line break at the end of the file is not part of the prompt.
        template = Template(read_text(args.template_file).removesuffix("\n").removesuffix("\r"))

    def check(item: Item) -> None:
        if template is not None:
            template.render(args.file.name, item)
        if see is not None:
            see(item.fields)

    texts, made_from = read_texts(args, check)
    made_from |= {"labels": args.labels, "label_ids": args.label_ids, "template": template and template.source}
    return texts, template, made_from


def read_texts(args: argparse.Namespace, check: Callable[[Item], None]) -> tuple[TextFile, dict[str, Any]]:
    """The file of texts, and what decides the rows beside the model and what is asked of it. Reads the file once, so
    that a bad line, or one that `check` raises for, is an error before a model loads."""
    texts = TextFile(args.file, args.text_field, args.limit)
    digest, count = hashlib.sha256(), 0
    for item in texts:
        count += 1
        check(item)
        digest.update(json.dumps([item.text, item.fields]).encode())
    return texts, {"vllm": __version__, "num_texts": count, "texts_sha256": digest.hexdigest()}


def load(args: argparse.Namespace) -> LLM:
    """The engine that the arguments describe; a CliError if there is none."""
    from vllm.entrypoints.llm import LLM

    try:
        engine_args = EngineArgs.from_cli_args(args)
        engine_args.use_tqdm_on_load &= not args.quiet
        return LLM(**vars(engine_args))
    except (ValueError, OSError) as error:
        raise CliError(str(error)) from error


def _output_paths(args: argparse.Namespace) -> tuple[Path, Path | None]:
    """Paths of the results and the picture (None: no picture)."""
    output: Path = args.output or Path(f"{args.file.stem}.scores.jsonl")
    picture = picture_path(args, output)
    paths = (("--output", output), ("--output's description", meta_path(output)), ("--picture", picture))
    check_paths({args.file.resolve(): "FILE"}, paths)
    return output, picture


def picture_path(args: argparse.Namespace, output: Path) -> Path | None:
    """Where the picture goes; None: there is to be none."""
    if args.no_picture:
        return None
    picture: Path = args.picture or output.with_suffix(".png")
    if picture.suffix.lower().lstrip(".") not in PICTURE_FORMATS:
        raise CliError(f"--picture must end in .{', .'.join(PICTURE_FORMATS)}, got {picture.name}")
    return picture


def check_paths(taken: dict[Path, str], paths: Iterable[tuple[str, Path | None]]) -> None:
    """A CliError, which names the flag, if a path to write (None: none) is `taken` by the inputs, by another one, or is
    a folder."""
    for flag, path in paths:
        if path is None:
            continue
        if path.resolve() in taken:
            raise CliError(f"{flag} {path} would overwrite {taken[path.resolve()]}")
        if not path.parent.is_dir():
            raise CliError(f"{flag}: there is no folder {path.parent}")
        if path.is_dir():
            raise CliError(f"{flag} {path} is a folder")
        taken[path.resolve()] = flag


def complete(texts: TextFile, rows: RowFile, scorer: Scorer, report: RowReport, progress: Progress) -> None:
    """Complete the rows to one a text, batch by batch; the report gets all of them."""
    for batch in batches(texts):
        first = report.num_rows
        there = rows.read(len(batch))
        for record, item in zip(there, batch, strict=False):
            report.add(record, item, is_new=False)
        progress.move_to(report.num_rows)
        if len(there) == len(batch):
            continue
        records = scorer.score(batch, first, len(there), progress)
        for record, item in zip(records, batch[len(there) :], strict=True):
            rows.append(record)
            report.add(record, item, is_new=True)
            progress.move_to(report.num_rows)
