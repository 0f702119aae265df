"""Score the texts of a file: how likely is each label to come next?

FILE is JSONL (a line is an object with a text field, or a string), CSV with a header, or Parquet. Every text is put in
the template, and the probability that the model gives to each label as its continuation is read.

A row of the output has, by label: probs (among the labels), logprobs, logits, ranks (1 is the likeliest token);
and label_mass (the probability of all labels together), prediction, num_prompt_tokens, or an error instead.
A label may have any number of tokens. If one has several, logprobs are those of whole labels, ranks those of their
first tokens, logits are null for the longer ones, and normalized_logprobs (a token's mean), token_logprobs and
token_ranks come along.

Rows are appended as batches of them are known. What they are made from is kept in OUTPUT.meta.json; a run that was
killed is continued by the same command with --resume: rows that are there stay, and the output becomes that of a
run that was never stopped.

With --url no model is loaded here: a running server scores, a request a text, --concurrency of them at once. While it
is overloaded or away requests are made again for about a minute; rows that are there by then are kept for --resume.

With --backend ray, --replicas engines on a Ray cluster score. --output is then a folder of a file a batch of 256 texts,
part-00000000.jsonl and so on: together, in the order of their names, they are the output of a run without Ray.

example: vllm score reviews.jsonl --labels " positive" " negative"
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.server_flags import add_server_arguments, check_server_arguments
from vllm.exceptions import CliError
from vllm.scoring.batches import DECIDING, BatchScorer, Progress, batches
from vllm.scoring.files import TextFile, read_text
from vllm.scoring.plot import FORMATS
from vllm.scoring.report import Report
from vllm.scoring.rows import RowFile, check_output, meta_path
from vllm.scoring.templates import Template
from vllm.utils.flag_types import at_least
from vllm.utils.ray_utils import import_ray_for
from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM
    from vllm.scoring.server import Server, ServerScorer

NAME = "score"
HELP = "read the probability of each label for every text of a file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `vllm score`, the engine's among them."""
    parser.add_argument("file", metavar="FILE", type=Path, help="the texts: .csv, .parquet, or else JSONL")
    labels = parser.add_mutually_exclusive_group(required=True)
    labels.add_argument("--labels", nargs="+", metavar="TEXT", help='labels, such as " positive" " negative"')
    labels.add_argument("--label-ids", nargs="+", metavar="ID", type=int, help="labels as token ids")
    parser.add_argument(
        "--text-field", default="text", metavar="NAME", help="field that holds the text (default: text)"
    )
    template = parser.add_mutually_exclusive_group()
    template.add_argument(
        "--template",
        metavar="TEXT",
        help="the prompt, with {text} and other {fields}; \\n is a line break, {{ a brace.\n"
        "Left out: two examples of sentiment for positive/negative, a plain question otherwise",
    )
    template.add_argument("--template-file", metavar="FILE", type=Path, help="the prompt from a file, as it is")
    parser.add_argument(
        "--output", metavar="FILE", type=Path, help="results, as JSONL (default: <FILE's stem>.scores.jsonl)"
    )
    existing = parser.add_mutually_exclusive_group()
    existing.add_argument(
        "--resume", action="store_true", help="keep the rows that --output has and score the other texts"
    )
    existing.add_argument("--overwrite", action="store_true", help="replace an --output that exists")
    picture = parser.add_mutually_exclusive_group()
    picture.add_argument(
        "--picture",
        metavar="FILE",
        type=Path,
        help="chart, .png, .svg or .pdf (default: .png beside --output)",
    )
    picture.add_argument("--no-picture", action="store_true", help="draw none")
    parser.add_argument("--limit", metavar="N", type=int, help="score the first N texts only")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors and warnings")
    server = add_server_arguments(parser)
    server.add_argument("--concurrency", metavar="N", type=at_least(1), help="texts at once (default: 16)")
    cluster = parser.add_argument_group("ray")
    cluster.add_argument(
        "--backend", choices=("ray",), help="ray: engines on a Ray cluster instead of one in this process"
    )
    cluster.add_argument("--replicas", metavar="R", type=at_least(1), help="engines (default: 1)")
    cluster.add_argument(
        "--replica-cpus",
        metavar="N",
        type=at_least(1),
        help="CPUs of each engine (default: all there is room for)",
    )
    cluster.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="the cluster, as HOST:PORT or auto (default: RAY_ADDRESS if it is set, or else one on this machine alone)",
    )
    cluster.add_argument(
        "--output-format", choices=("jsonl", "csv", "parquet"), help="of the parts in --output (default: jsonl)"
    )
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    """Score a file as the arguments say.

    Returns:
        0, or 1 when some of the texts could not be scored.

    Raises:
        CliError: an argument, the data or the model cannot be used.
    """
    _check_arguments(args)
    if args.backend is not None:
        return _run_on_ray(args)
    output, picture = _output_paths(args)
    texts = TextFile(args.file, args.text_field, args.limit)
    template = _template(args)
    made_from = _made_from(args, template, *_survey(texts, template))
    with _server(args) as server:
        made_from |= _engine_deciding(args) if server is None else server.deciding()
        check_output(output, made_from, args.resume, args.overwrite)
        started = time.perf_counter()
        make_scorer = _local_scorer if server is None else server.scorer
        scorer = make_scorer(args, template, texts.name)
        load_seconds = time.perf_counter() - started
        report = Report(scorer.labels)
        started = time.perf_counter()
        with RowFile(output, made_from, args.resume) as rows:
            _score(texts, rows, scorer, report, Progress(made_from["num_texts"], shown=not args.quiet))
        score_seconds = time.perf_counter() - started

    if not args.quiet:
        report.print_table()
    drawn = picture is not None and report.draw(picture, f"{texts.name}, scored by {scorer.model_name}")
    if not args.quiet:
        print(f"results:    {output}")
        if drawn:
            print(f"picture:    {picture}")
        report.print_summary(load_seconds, score_seconds)
    return 1 if report.print_failures(texts.name) else 0


def _run_on_ray(args: argparse.Namespace) -> int:
    try:
        import_ray_for(args.ray_address)
        from vllm.scoring.columns import FieldKinds
        from vllm.scoring.ray_backend import FileJob, score_file
    except ImportError as error:
        raise CliError(f"--backend ray: {error}") from None
    if not args.file.is_file():
        raise CliError(f"--backend ray: {args.file} is not a file; it is read by another process than this one")
    texts = TextFile(args.file, args.text_field, args.limit)
    template, kinds = _template(args), FieldKinds()
    made_from = _made_from(args, template, *_survey(texts, template, kinds.add))
    return score_file(FileJob(args, texts, template, made_from | _engine_deciding(args), kinds))


def _server(args: argparse.Namespace) -> AbstractContextManager[Server | None]:
    """The server at --url; None without one."""
    if args.url is None:
        return nullcontext()
    from vllm.scoring.server import Server

    return Server(args)


def _local_scorer(args: argparse.Namespace, template: Template | None, input_name: str) -> BatchScorer:
    return BatchScorer.of(_load(args), template, args.labels or args.label_ids, input_name)


def _check_arguments(args: argparse.Namespace) -> None:
    check_server_arguments(args, "concurrency")
    _check_ray_arguments(args)
    if args.limit is not None and args.limit < 1:
        raise CliError(f"--limit must be at least 1, got {args.limit}")
    flag, values = ("--labels", args.labels) if args.labels is not None else ("--label-ids", args.label_ids)
    for i, value in enumerate(values):
        if value in values[:i]:
            raise CliError(f"{flag}: {value!r} is there twice")


def _check_ray_arguments(args: argparse.Namespace) -> None:
    if args.backend is None:
        for name in ("replicas", "replica_cpus", "ray_address", "output_format"):
            if getattr(args, name) is not None:
                raise CliError(f"--{name.replace('_', '-')} needs --backend ray")
        return
    for name, reason in (("url", "a server scores by itself"), ("picture", "there is no picture of parts")):
        if getattr(args, name) is not None:
            raise CliError(f"--{name} and --backend ray exclude each other: {reason}")


def _output_paths(args: argparse.Namespace) -> tuple[Path, Path | None]:
    """Where the results and the picture (None: no picture) go."""
    output: Path = args.output or Path(f"{args.file.stem}.scores.jsonl")
    picture: Path | None = None
    if not args.no_picture:
        picture = args.picture or output.with_suffix(".png")
        if picture.suffix.lower().lstrip(".") not in FORMATS:
            raise CliError(f"--picture must end in .{', .'.join(FORMATS)}, got {picture.name}")
    taken = {args.file.resolve(): "FILE"}
    for flag, path in (("--output", output), ("--output's description", meta_path(output)), ("--picture", picture)):
        if path is None:
            continue
        if path.resolve() in taken:
            raise CliError(f"{flag} {path} would overwrite {taken[path.resolve()]}")
        if not path.parent.is_dir():
            raise CliError(f"{flag}: there is no folder {path.parent}")
        if path.is_dir():
            raise CliError(f"{flag} {path} is a folder")
        taken[path.resolve()] = flag
    return output, picture


def _template(args: argparse.Namespace) -> Template | None:
    """The user's template; None = the default one, which depends on the labels' texts."""
    if args.template is not None:
        return Template.unescaped(args.template)
    if args.template_file is not None:
        # Editors end a file with a line break that nobody meant to be in the prompt.
        return Template(read_text(args.template_file).removesuffix("\n").removesuffix("\r"))
    return None


def _survey(
    texts: TextFile, template: Template | None, see: Callable[[dict[str, Any]], None] | None = None
) -> tuple[int, str]:
    """Number and hash of the texts with their fields, which `see` is shown row by row; a bad line or a field that one
    lacks is an error before the model loads."""
    digest, count = hashlib.sha256(), 0
    for item in texts:
        count += 1
        if template is not None:
            template.render(texts.name, item)
        if see is not None:
            see(item.fields)
        digest.update(json.dumps([item.text, item.fields]).encode())
    return count, digest.hexdigest()


def _made_from(args: argparse.Namespace, template: Template | None, num_texts: int, digest: str) -> dict[str, Any]:
    """What decides the rows, beside the model, for OUTPUT.meta.json."""
    return {
        "vllm": __version__,
        "num_texts": num_texts,
        "texts_sha256": digest,
        "labels": args.labels,
        "label_ids": args.label_ids,
        "template": template and template.source,
    }


def _engine_deciding(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in DECIDING}


def _load(args: argparse.Namespace) -> LLM:
    from vllm.entrypoints.llm import LLM

    options = vars(EngineArgs.from_cli_args(args))
    try:
        return LLM(**options, use_tqdm_on_load=not args.quiet)
    except (ValueError, OSError) as error:
        raise CliError(str(error)) from error


def _score(
    texts: TextFile, rows: RowFile, scorer: BatchScorer | ServerScorer, report: Report, progress: Progress
) -> None:
    """Bring `rows` to one a text, and `report` with it."""
    try:
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
    finally:
        progress.close()
