"""`vllm embed` and `vllm rerank`: a file's texts, by an engine in this process or by a server."""

from __future__ import annotations

import argparse
import heapq
from typing import TYPE_CHECKING, Any

from vllm.exceptions import CliError
from vllm.pooling.score_templates import score_template
from vllm.scoring.files import Item
from vllm.scoring.pooled.scorers import (
    EMBEDDING,
    SCORE,
    Embedder,
    EmbedOptions,
    Reranker,
    RerankOptions,
    ServerEmbedder,
    ServerReranker,
)
from vllm.scoring.report import RowReport, cut
from vllm.scoring.server import Server
from vllm.scoring.task import Task

if TYPE_CHECKING:
    import pyarrow as pa

    from vllm.entrypoints.llm import LLM

_NUM_SHOWN = 20
_TEXT_WIDTH = 90


class _PooledTask(Task):
    more_deciding = ("runner", "convert", "pooler_config")
    result: str  # EMBEDDING or SCORE

    def schema(self, scorer: Any) -> pa.Schema:
        import pyarrow as pa

        kind = pa.list_(pa.float32()) if self.result == EMBEDDING else pa.float64()
        return pa.schema({self.result: kind, "num_prompt_tokens": pa.int64(), "error": pa.string()})

    def report(self, scorer: Any) -> BestRows:
        return BestRows(self.command, self.input_name)


class EmbedTask(_PooledTask):
    """The embedding of each text."""

    command, suffix, result = "embed", "embeddings", EMBEDDING

    def __init__(self, args: argparse.Namespace) -> None:
        if args.url is not None and args.prompt_name is not None:
            raise CliError("--prompt-name needs the model's folder; with --url give the text itself by --prompt")
        super().__init__(args)
        self._options = EmbedOptions(
            args.prompt or "",
            args.prompt_name,
            args.dimensions,
            args.truncate_prompt_tokens,
            False if args.no_normalize else None,
        )
        self.made_from = vars(self._options)

    def engine_scorer(self, llm: LLM) -> Embedder:
        return Embedder(llm, self._options, self.media)

    def server_scorer(self, server: Server) -> ServerEmbedder:
        return ServerEmbedder(server, self._options, self.media)


class RerankTask(_PooledTask):
    """Scores texts, as documents, for a query."""

    command, suffix, result = "rerank", "ranked", SCORE

    def __init__(self, args: argparse.Namespace) -> None:
        if args.url is not None and (args.score_template or args.score_labels):
            raise CliError("--score-template and --score-labels are the server's own, with --url")
        super().__init__(args)
        try:
            checked = score_template(args.score_template, args.score_labels)
        except ValueError as error:
            raise CliError(str(error)) from None
        template = None if args.score_template is None else checked
        self._options = RerankOptions(
            args.query,
            args.query_field,
            template,
            args.instruction,
            args.truncate_prompt_tokens,
            args.max_tokens_per_doc,
            args.score_labels,
        )
        self.made_from = {
            "query": args.query,
            "query_field": args.query_field,
            "score_template": template and template.source,
            "score_labels": (template and list(template.labels)) or args.score_labels,
            "instruction": args.instruction,
            "truncate_to": args.truncate_prompt_tokens,
            "max_document_tokens": args.max_tokens_per_doc,
        }

    def check(self, item: Item) -> None:
        self._options.pair(self.input_name, item)

    def engine_scorer(self, llm: LLM) -> Reranker:
        return Reranker(llm, self._options, self.input_name, self.media)

    def server_scorer(self, server: Server) -> ServerReranker:
        return ServerReranker(server, self._options, self.input_name, self.media)


class BestRows(RowReport):
    """The rows with the best scores."""

    def __init__(self, command: str, input_name: str) -> None:
        super().__init__(command, input_name)
        self._best: list[tuple[float, int, str]] = []  # a heap of (score, -index, text)

    def add(self, record: dict[str, Any], item: Item, is_new: bool) -> None:
        super().add(record, item, is_new)
        score = record.get(SCORE)
        if score is not None:
            keep = heapq.heappush if len(self._best) < _NUM_SHOWN else heapq.heappushpop
            keep(self._best, (score, -record["index"], item.text))

    def print_rows(self) -> None:
        for score, negative_index, text in sorted(self._best, reverse=True):
            print(f"{score:12.6f}  {-negative_index:6}  {cut(text, _TEXT_WIDTH)}")
