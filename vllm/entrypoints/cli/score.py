"""Score the texts of a file: how likely is each label to come next?

FILE is JSONL (a line is an object with a text field, or a string) or CSV with a header. Every text is put in
the template, and the probability that the model gives to each label as the next token is read. A label is one
token.

example: vllm score reviews.jsonl --labels " positive" " negative"
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.errors import CliError
from vllm.entrypoints.cli.score_io import Item, read_items, read_text, to_jsonl, write_atomically
from vllm.entrypoints.cli.score_labels import Labels, make_record, verdicts
from vllm.entrypoints.cli.score_plot import FORMATS, draw
from vllm.entrypoints.cli.score_table import format_table
from vllm.entrypoints.cli.score_template import Template

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM
    from vllm.outputs import RequestOutput

NAME = "score"
HELP = "read the probability of each label for every text of a file"


@dataclass
class _Times:
    """Seconds."""

    load: float = 0.0
    score: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `vllm score`, the engine's among them."""
    parser.add_argument("file", metavar="FILE", type=Path, help="the texts, in UTF-8: .csv, or else JSONL")
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
    EngineArgs.add_cli_args(parser)


def run(args: argparse.Namespace) -> int:
    """Score a file as the arguments say.

    Returns:
        0, or 1 when the model failed on some of the texts.

    Raises:
        CliError: an argument, the data or the model cannot be used.
    """
    output, picture = _output_paths(args)
    _check_arguments(args)
    items = read_items(args.file, args.text_field, args.limit)
    template = _template(args)
    if template is not None:
        # A field that some line lacks should be known before the model loads.
        _prompts(template, args, items)

    times = _Times()
    started = time.perf_counter()
    llm = _load(args)
    times.load = time.perf_counter() - started
    tokenizer = llm.llm_engine.tokenizer
    if tokenizer is None:
        raise CliError("--skip-tokenizer-init: texts cannot be scored without a tokenizer")
    if args.labels is not None:
        labels = Labels.from_strings(args.labels, tokenizer)
    else:
        labels = Labels.from_ids(args.label_ids, tokenizer)
    prompts = _prompts(template or Template.default(labels.texts), args, items)

    started = time.perf_counter()
    outputs = _score(llm, args, items, prompts, labels)
    times.score = time.perf_counter() - started

    records = [make_record(i, item, out, labels) for i, (item, out) in enumerate(zip(items, outputs, strict=True))]
    write_atomically(output, to_jsonl(records))
    correct = verdicts(records, items, labels)
    if not args.quiet:
        width = shutil.get_terminal_size((120, 24)).columns
        print(format_table(records, labels.names, labels.headings(), correct, width), end="\n\n")
    title = f"{args.file.name}, scored by {Path(llm.llm_engine.model_config.model).name}"
    drawn = picture is not None and _draw(picture, title, records, labels, correct)
    if not args.quiet:
        print(f"results:    {output}")
        if drawn:
            print(f"picture:    {picture}")
        _print_summary(correct, outputs, times)
    return _report_failures(args, items, records)


def _check_arguments(args: argparse.Namespace) -> None:
    if args.limit is not None and args.limit < 1:
        raise CliError(f"--limit must be at least 1, got {args.limit}")
    flag, values = ("--labels", args.labels) if args.labels is not None else ("--label-ids", args.label_ids)
    for i, value in enumerate(values):
        if value in values[:i]:
            raise CliError(f"{flag}: {value!r} is there twice")


def _output_paths(args: argparse.Namespace) -> tuple[Path, Path | None]:
    """Where the results and the picture (None: no picture) go."""
    output: Path = args.output or Path(f"{args.file.stem}.scores.jsonl")
    picture: Path | None = None
    if not args.no_picture:
        picture = args.picture or output.with_suffix(".png")
        if picture.suffix.lower().lstrip(".") not in FORMATS:
            raise CliError(f"--picture must end in .{', .'.join(FORMATS)}, got {picture.name}")
    taken = {args.file.resolve(): "FILE"}
    for flag, path in (("--output", output), ("--picture", picture)):
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


def _prompts(template: Template, args: argparse.Namespace, items: Sequence[Item]) -> list[str]:
    return [template.render(args.file.name, item) for item in items]


def _load(args: argparse.Namespace) -> LLM:
    from vllm.entrypoints.llm import LLM

    options = vars(EngineArgs.from_cli_args(args))
    try:
        return LLM(**options, use_tqdm_on_load=not args.quiet)
    except (ValueError, OSError) as error:
        raise CliError(str(error)) from error


def _score(
    llm: LLM, args: argparse.Namespace, items: Sequence[Item], prompts: Sequence[str], labels: Labels
) -> list[RequestOutput]:
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import SamplingParams

    engine = llm.llm_engine
    assert engine.tokenizer is not None
    limit = engine.model_config.max_model_len
    encoded = engine.tokenizer.encode_batch(prompts)
    for item, ids in zip(items, encoded, strict=True):
        if not 0 < len(ids) < limit:
            raise CliError(
                f"{args.file.name}:{item.line}: the prompt has {len(ids)} tokens; it must have from 1 to "
                f"{limit - 1} (max_model_len={limit})"
            )
    try:
        params = SamplingParams(max_tokens=1, temperature=0.0, logprob_token_ids=labels.ids, detokenize=False)
        return llm.generate(encoded, params, use_tqdm=not args.quiet)
    except VLLMValidationError as error:
        raise CliError(str(error)) from error


def _draw(
    picture: Path,
    title: str,
    records: Sequence[dict[str, Any]],
    labels: Labels,
    correct: Sequence[bool | None],
) -> bool:
    """Draw the picture; whether it could be drawn."""
    scored = [pair for pair in zip(records, correct, strict=True) if "error" not in pair[0]]
    if not scored:
        return False
    headings = dict(zip(labels.names, labels.headings(), strict=True))
    try:
        image = draw(scored, headings, title, picture.suffix.lower().lstrip("."))
    except ImportError:
        print("no picture: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return False
    write_atomically(picture, image)
    return True


def _print_summary(correct: Sequence[bool | None], outputs: Sequence[RequestOutput], times: _Times) -> None:
    judged = [verdict for verdict in correct if verdict is not None]
    if judged:
        print(f"accuracy:   {sum(judged)} of {len(judged)} ({sum(judged) / len(judged):.1%})")
    tokens = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens or 0 for output in outputs)
    print(
        f"throughput: {len(outputs) / times.score:.1f} prompts/s, {tokens / times.score:.0f} prompt tokens/s "
        f"({len(outputs)} prompts, {tokens} tokens, {cached} of them cached, in {times.score:.2f} s; "
        f"loading took {times.load:.2f} s)"
    )


def _report_failures(args: argparse.Namespace, items: Sequence[Item], records: Sequence[dict[str, Any]]) -> int:
    failed = [record for record in records if "error" in record]
    if not failed:
        return 0
    first = failed[0]
    where = f"{args.file.name}:{items[first['index']].line}"
    print(
        f"vllm score: {len(failed)} of {len(records)} texts failed, first {where}: {first['error']}",
        file=sys.stderr,
    )
    return 1
