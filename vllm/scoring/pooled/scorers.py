"""Embeddings of texts and scores of pairs, batch by batch: by an engine in this process, or by a server."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.config.checkpoint.sentence_transformers import default_prompt, named_prompts, with_prompt
from vllm.exceptions import CliError, VLLMValidationError
from vllm.pooling.pairs import check_score_args, score_type
from vllm.pooling.score_templates import ScoreTemplate, default_template
from vllm.pooling_params import PoolingParams
from vllm.scoring.batches import Progress
from vllm.scoring.files import Item
from vllm.scoring.labels import finite
from vllm.scoring.server import Server
from vllm.tokenizers.truncation import truncate_text
from vllm.utils.server_client import ServerError

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM
    from vllm.scoring.columns import Columns, FieldKinds

EMBEDDING, SCORE = "embedding", "score"
_PROBE = "a"
# Statuses of an answer that is about one text.
_OF_A_TEXT = (400, 413, 500)


@dataclass(frozen=True)
class EmbedOptions:
    """
    Attributes:
        prompt: put before each text.
        prompt_name: one of the model's prompts, in its place.
        dimensions: numbers of an embedding; None: the model's.
        truncate_to: longest text, in tokens; -1: the longest that the model reads; None: longer ones are errors.
        normalize: whether embeddings have length 1; None: the model's default.
    """

    prompt: str = ""
    prompt_name: str | None = None
    dimensions: int | None = None
    truncate_to: int | None = None
    normalize: bool | None = None


@dataclass(frozen=True)
class RerankOptions:
    """
    Attributes:
        query: of all documents; None: each row has its own, in `query_field`.
        template: how a model is asked; None: its default.
        instruction: what the query is for, in templates that ask for it.
        truncate_to: longest prompt, in tokens; -1: the longest that the model reads; None: longer ones are errors.
        max_document_tokens: of each document; None: all of it.
        labels: the answers where no template is named; None: the template's.
    """

    query: str | None
    query_field: str = "query"
    template: ScoreTemplate | None = None
    instruction: str | None = None
    truncate_to: int | None = None
    max_document_tokens: int | None = None
    labels: Sequence[str] | None = None

    def pair(self, name: str, item: Item) -> tuple[str, str]:
        """The query and the document of a row of the file `name`. CliError: it has no query."""
        if self.query is not None:
            return self.query, item.text
        query = item.fields.get(self.query_field)
        if not isinstance(query, str) or not query:
            raise CliError(f"{name}:{item.line}: no query in the field {self.query_field!r} (--query, --query-field)")
        return query, item.text


class Embedder:
    """Embeds batches; as with BatchScorer, a row depends on its own batch alone."""

    def __init__(self, llm: LLM, *, options: EmbedOptions) -> None:
        config = llm.model_config
        if "embed" not in config.pooling_tasks:
            raise CliError(f"{Path(config.model).name} does not embed")
        if llm.llm_engine.tokenizer is None:
            raise CliError("--skip-tokenizer-init: texts cannot be embedded without a tokenizer")
        self._llm, self._tokenizer, self._longest = llm, llm.llm_engine.tokenizer, config.max_embed_len
        self._limit = self._longest if options.truncate_to in (None, -1) else options.truncate_to
        self._truncates = options.truncate_to is not None
        if not 1 <= self._limit <= self._longest:  # type: ignore[operator]
            raise CliError(f"--truncate-prompt-tokens must be between 1 and {self._longest}, or -1, got {self._limit}")
        self._prompt, self._default = options.prompt or None, default_prompt(Path(config.path))
        if options.prompt_name is not None:
            prompts = named_prompts(Path(config.path))
            if options.prompt_name not in prompts:
                known = ", ".join(sorted(prompts)) or "none"
                raise CliError(f"--prompt-name: the model has no prompt {options.prompt_name!r}; it has {known}")
            self._prompt = prompts[options.prompt_name]
        self._params = PoolingParams(task="embed", dimensions=options.dimensions, use_activation=options.normalize)
        try:
            llm.llm_engine.input_processor.process_params(self._params, 1)
        except VLLMValidationError as error:
            raise CliError(str(error.args[0])) from None
        self.model_name = Path(config.model).name

    def score(
        self, batch: Sequence[Item], first_index: int, num_known: int, progress: Progress
    ) -> Iterable[dict[str, Any]]:
        """See Scorer."""
        texts = [
            with_prompt(item.text, self._default) if self._prompt is None else self._prompt + item.text
            for item in batch
        ]
        kept = self._tokenizer.encode_batch(texts)
        if self._truncates:
            whole = zip(texts, kept, strict=True)
            kept = [truncate_text(self._tokenizer, text, ids, self._limit, "right") for text, ids in whole]  # type: ignore[arg-type]
        usable = [ids for ids in kept if 0 < len(ids) <= self._longest]
        outputs = iter(
            self._llm.encode(
                [{"prompt_token_ids": ids} for ids in usable],  # type: ignore[arg-type]
                self._params,
                use_tqdm=progress.of_batch(first_index, len(batch)),
            )
            if usable
            else ()
        )
        records = []
        for index, (item, ids) in enumerate(zip(batch, kept, strict=True), first_index):
            fault = f"the text has {len(ids)} tokens; it must have from 1 to {self._longest}"
            result = next(outputs).outputs.data.tolist() if 0 < len(ids) <= self._longest else fault
            records.append(make_row(index, item, EMBEDDING, result, len(ids)))
        return records[num_known:]

    def columns(self, kinds: FieldKinds) -> Columns:
        """See LocalScorer."""
        return columns_of(EMBEDDING, kinds)


class Reranker:
    """Scores batches of pairs; as with BatchScorer, a row depends on its own batch alone."""

    def __init__(self, llm: LLM, *, options: RerankOptions, input_name: str) -> None:
        config = llm.model_config
        if config.runner_type == "pooling" and score_type(config) is None:
            raise CliError(
                f"{Path(config.model).name} does not score pairs of texts, for which it would need one label"
            )
        try:
            check_score_args(config, options.template, options.labels)
        except ValueError as error:
            raise CliError(str(error)) from None
        tokenizer = llm.llm_engine.tokenizer
        if tokenizer is None:
            raise CliError("--skip-tokenizer-init: texts cannot be scored without a tokenizer")
        self._llm, self._options, self._name = llm, options, input_name
        self._template = options.template
        if options.template is None and options.labels is not None:
            self._template = default_template(config, tokenizer, options.labels)
        self.model_name = Path(config.model).name

    def score(
        self, batch: Sequence[Item], first_index: int, num_known: int, progress: Progress
    ) -> Iterable[dict[str, Any]]:
        """See Scorer."""
        self._llm.reset_prefix_cache()
        pairs = [self._options.pair(self._name, item) for item in batch]
        scored = self._scores(pairs, progress.of_batch(first_index, len(batch)))
        records = [
            make_row(index, item, SCORE, *result)
            for index, (item, result) in enumerate(zip(batch, scored, strict=True), first_index)
        ]
        return records[num_known:]

    def columns(self, kinds: FieldKinds) -> Columns:
        """See LocalScorer."""
        return columns_of(SCORE, kinds)

    def _scores(
        self, pairs: Sequence[tuple[str, str]], use_tqdm: bool | Callable[..., Any]
    ) -> list[tuple[float | str, int | None]]:
        """(score or fault, tokens) of each; where a pair is at fault, halves are scored apart until it is alone."""
        options = self._options
        try:
            for pair in pairs:
                if not pair[1]:
                    raise VLLMValidationError("the document is empty", "data_2", "")
            outputs = self._llm.score_pairs(
                pairs,
                template=self._template,
                instruction=options.instruction,
                truncate_to=options.truncate_to,
                max_document_tokens=options.max_document_tokens,
                use_tqdm=use_tqdm,
            )
        except VLLMValidationError as error:
            if len(pairs) == 1:
                return [(str(error.args[0]).replace("data_2[0]", "the document"), None)]
            half = len(pairs) // 2
            return self._scores(pairs[:half], False) + self._scores(pairs[half:], False)
        return [(output.outputs.score, len(output.prompt_token_ids)) for output in outputs]


class ServerPooler:
    """Embeddings or scores by a running server, a request a row.

    Args:
        path: of the endpoint.
        fields: those of each request, from its row.
        read: the row's result, from the answer.
        kind: EMBEDDING or SCORE.
    """

    def __init__(
        self,
        server: Server,
        *,
        path: str,
        fields: Callable[[Item], dict[str, Any]],
        read: Callable[[dict[str, Any]], Any],
        kind: str,
    ) -> None:
        self._server, self._path, self._fields, self._read, self._kind = server, path, fields, read, kind
        self.model_name = server.model_name

    def score(
        self, batch: Sequence[Item], first_index: int, num_known: int, progress: Progress
    ) -> Iterator[dict[str, Any]]:
        """See Scorer. Each row comes as soon as it is complete; an error that is not of a single text is raised."""
        rows = list(enumerate(batch))[num_known:]
        return self._server.in_order([self._row(first_index + offset, item) for offset, item in rows])

    def check(self, probe: Item) -> None:
        """Raise what no row could be asked."""
        self._server.wait(self._answer(probe))

    async def _answer(self, item: Item) -> tuple[Any, int]:
        answer = await self._server.post(self._path, self._fields(item))
        try:
            return self._read(answer), answer["usage"]["prompt_tokens"]
        except (TypeError, LookupError, ValueError):
            raise CliError(f"{self._path}: the answer has no {self._kind}") from None

    async def _row(self, index: int, item: Item) -> dict[str, Any]:
        try:
            result, num_tokens = await self._answer(item)
        except ServerError as error:
            # The probe had the same fields: what is refused is the text.
            if error.status not in _OF_A_TEXT:
                raise
            return make_row(index, item, self._kind, error.message, None)
        return make_row(index, item, self._kind, result, num_tokens)


def server_embedder(server: Server, options: EmbedOptions) -> ServerPooler:
    """Embeddings of /v1/embeddings."""
    fields = {
        "encoding_format": "base64",
        "dimensions": options.dimensions,
        "truncate_prompt_tokens": options.truncate_to,
        "use_activation": options.normalize,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    pooler = ServerPooler(
        server,
        path="/v1/embeddings",
        fields=lambda item: {"input": [options.prompt + item.text], **given},
        read=lambda answer: np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4").tolist(),
        kind=EMBEDDING,
    )
    pooler.check(Item(0, _PROBE, {}))
    return pooler


def server_reranker(server: Server, options: RerankOptions, input_name: str) -> ServerPooler:
    """Scores of /score."""
    fields = {
        "instruction": options.instruction,
        "truncate_prompt_tokens": options.truncate_to,
        "max_tokens_per_doc": options.max_document_tokens,
    }
    given = {name: value for name, value in fields.items() if value is not None}

    def of(item: Item) -> dict[str, Any]:
        query, document = options.pair(input_name, item)
        return {"text_1": query, "text_2": document, **given}

    pooler = ServerPooler(server, path="/score", fields=of, read=lambda answer: answer["data"][0]["score"], kind=SCORE)
    pooler.check(Item(0, _PROBE, {options.query_field: _PROBE}))
    return pooler


def make_row(index: int, item: Item, kind: str, result: Any, num_prompt_tokens: int | None) -> dict[str, Any]:
    """One text's row; a text as `result` is its error. The input's other fields are kept where no result has their
    name."""
    record: dict[str, Any] = {"index": index, "text": item.text}
    what = "error" if isinstance(result, str) else kind
    value = finite(result) if isinstance(result, float) else result
    taken = (*record, kind, "num_prompt_tokens", "error")
    kept = {name: own for name, own in item.fields.items() if name not in taken}
    return {**record, **kept, what: value, "num_prompt_tokens": num_prompt_tokens}


def columns_of(kind: str, kinds: FieldKinds) -> Columns:
    """The columns of `make_row`'s rows."""
    import pyarrow as pa

    from vllm.scoring.columns import Columns

    result = pa.list_(pa.float32()) if kind == EMBEDDING else pa.float64()
    return Columns(kinds, pa.schema({kind: result, "num_prompt_tokens": pa.int64(), "error": pa.string()}))
