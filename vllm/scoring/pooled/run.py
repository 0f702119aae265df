"""`vllm embed` and `vllm rerank`: a file's texts, by an engine in this process, by a server or on a Ray cluster."""

from __future__ import annotations

import argparse
import heapq
import time
from collections.abc import Callable
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.exceptions import CliError
from vllm.pooling.score_templates import score_template
from vllm.scoring.batches import LocalScorer, Progress, Scorer, deciding
from vllm.scoring.files import Item
from vllm.scoring.pooled.scorers import (
    EMBEDDING,
    SCORE,
    Embedder,
    EmbedOptions,
    Reranker,
    RerankOptions,
    columns_of,
    server_embedder,
    server_reranker,
)
from vllm.scoring.report import RowReport, Totals, cut
from vllm.scoring.rows import RowFile
from vllm.scoring.run import check_paths, complete, load, read_texts
from vllm.scoring.server import Server
from vllm.scoring.tables import TableOutput

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM

_NUM_SHOWN = 20
_TEXT_WIDTH = 90
# Engine arguments that decide results beside those of all files.
_DECIDING = ("runner", "convert", "pooler_config")


class PooledReport(RowReport):
    """Totals, and of scores the best rows."""

    def __init__(self, command: str, input_name: str) -> None:
        super().__init__(command)
        self._input_name = input_name
        self._best: list[tuple[float, int, str]] = []  # a heap of (score, -index, text)

    def add(self, record: dict[str, Any], item: Item, is_new: bool) -> None:
        """See RowReport."""
        self.count_row(record, item, is_new, self._input_name)
        score = record.get(SCORE)
        if score is not None:
            keep = heapq.heappush if len(self._best) < _NUM_SHOWN else heapq.heappushpop
            keep(self._best, (score, -record["index"], item.text))

    def print_best(self) -> None:
        """Print the rows with the highest scores."""
        for score, negative_index, text in sorted(self._best, reverse=True):
            print(f"{score:12.6f}  {-negative_index:6}  {cut(text, _TEXT_WIDTH)}")


def embed_file(args: argparse.Namespace) -> int:
    """Complete the output to one row a text; 0, or 1 when some of the texts could not be embedded."""
    if args.url is not None and args.prompt_name is not None:
        raise CliError("--prompt-name needs the model's folder; with --url give the text itself by --prompt")
    normalize = False if args.no_normalize else None
    options = EmbedOptions(args.prompt or "", args.prompt_name, args.dimensions, args.truncate_prompt_tokens, normalize)
    asked = {name: getattr(options, name) for name in options.__dataclass_fields__}
    return _complete_file(
        args,
        EMBEDDING,
        asked,
        lambda item: None,
        make=partial(Embedder, options=options),
        over=lambda server: server_embedder(server, options),
    )


def rerank_file(args: argparse.Namespace) -> int:
    """Complete the output to one row a document; 0, or 1 when some could not be scored."""
    if args.url is not None and (args.score_template or args.score_labels):
        raise CliError("--score-template and --score-labels are the server's own, with --url")
    try:
        checked = score_template(args.score_template, args.score_labels)
    except ValueError as error:
        raise CliError(str(error)) from None
    template = None if args.score_template is None else checked
    options = RerankOptions(
        args.query,
        args.query_field,
        template,
        args.instruction,
        args.truncate_prompt_tokens,
        args.max_tokens_per_doc,
        args.score_labels,
    )
    asked = {
        "query": args.query,
        "query_field": args.query_field,
        "score_template": template and template.source,
        "score_labels": (template and list(template.labels)) or args.score_labels,
        "instruction": args.instruction,
        "truncate_to": args.truncate_prompt_tokens,
        "max_document_tokens": args.max_tokens_per_doc,
    }
    return _complete_file(
        args,
        SCORE,
        asked,
        lambda item: options.pair(args.file.name, item),
        make=partial(Reranker, options=options, input_name=args.file.name),
        over=lambda server: server_reranker(server, options, args.file.name),
    )


def _complete_file(
    args: argparse.Namespace,
    kind: str,
    asked: dict[str, Any],
    check: Callable[[Item], Any],
    *,
    make: Callable[[LLM], LocalScorer],
    over: Callable[[Server], Scorer],
) -> int:
    """Rows of `kind` for all texts, by what `make` makes of an engine or `over` of a server; the exit code. `asked`
    decides the rows beside texts and model; `check` raises for a row that cannot be asked."""
    command = "embed" if kind == EMBEDDING else "rerank"
    stem = f"{args.file.stem}.{'embeddings' if kind == EMBEDDING else 'ranked'}"
    if args.backend is not None:
        return _on_ray(args, asked, check, make, Path(stem), command)
    table = TableOutput.of(args.output or Path(f"{stem}.jsonl"))
    check_paths({args.file.resolve(): "FILE"}, table.paths())
    kinds = table.field_kinds()
    texts, made_from = read_texts(args, _both(check, kinds))
    made_from |= asked
    with nullcontext() if args.url is None else Server(args) as server:
        made_from |= _deciding(args) if server is None else server.deciding()
        table.check(made_from, args)
        started = time.perf_counter()
        scorer = make(load(args)) if server is None else over(server)
        load_seconds = time.perf_counter() - started
        report = PooledReport(command, texts.name)
        started = time.perf_counter()
        bar = closing(Progress(made_from["num_texts"], shown=not args.quiet))
        with RowFile(table.rows, made_from, args.resume) as rows, bar as progress:
            complete(texts, rows, scorer, report, progress)
        seconds = time.perf_counter() - started
    if kinds is not None:
        table.finish(columns_of(kind, kinds))
    if not args.quiet:
        report.print_best()
        print(f"results:    {table.output}")
        report.print_throughput(seconds, f"; loading took {load_seconds:.2f} s")
    return 1 if report.print_failures("first") else 0


def _on_ray(
    args: argparse.Namespace,
    asked: dict[str, Any],
    check: Callable[[Item], Any],
    make: Callable[[LLM], LocalScorer],
    output: Path,
    command: str,
) -> int:
    from vllm.scoring.columns import FieldKinds
    from vllm.scoring.ray_backend import check_file, run_on_ray

    check_file(args)
    kinds = FieldKinds()
    texts, made_from = read_texts(args, _both(check, kinds))
    made_from |= {**asked, **_deciding(args)}
    return run_on_ray(args, texts.name, kinds, made_from, args.output or output, make, Totals(command))


def _both(check: Callable[[Item], Any], kinds: Any) -> Callable[[Item], None]:
    def see(item: Item) -> None:
        check(item)
        if kinds is not None:
            kinds.add(item.fields)

    return see


def _deciding(args: argparse.Namespace) -> dict[str, Any]:
    return {**deciding(args), **{name: getattr(args, name) for name in _DECIDING}}
