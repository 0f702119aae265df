"""Embeddings of texts and scores of pairs, batch by batch: by an engine in this process, or by a server."""

from __future__ import annotations

import base64
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm.answers.prompts.marked_media import MarkedMedia
from vllm.config.checkpoint.sentence_transformers import default_prompt, named_prompts, with_prompt
from vllm.exceptions import CliError, VLLMValidationError
from vllm.pooling.pairs import check_score_args, score_type
from vllm.pooling.score_templates import ScoreTemplate, default_template, pairs_of
from vllm.pooling_params import PoolingParams
from vllm.scoring.files import Item
from vllm.scoring.labels.records import finite
from vllm.scoring.media import RowMedia, as_document, as_message
from vllm.scoring.scorers import EngineScorer, Results, ServerScorer, failed
from vllm.scoring.server import Server
from vllm.tokenizers.truncation import truncate_text

if TYPE_CHECKING:
    from vllm.entrypoints.llm import LLM

EMBEDDING, SCORE = "embedding", "score"
_PROBE = "a"


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


class Embedder(EngineScorer):
    taken = (EMBEDDING,)

    def __init__(self, llm: LLM, options: EmbedOptions, media: RowMedia | None = None) -> None:
        super().__init__(llm, media)
        config = self._config
        if "embed" not in config.pooling_tasks:
            raise CliError(f"{self.model_name} does not embed (a model that generates does with --convert embed)")
        if self._tokenizer is None:
            raise CliError("--skip-tokenizer-init: texts cannot be embedded without a tokenizer")
        self._longest = config.max_embed_len
        limit = self._longest if options.truncate_to in (None, -1) else options.truncate_to
        if not 1 <= limit <= self._longest:  # type: ignore[operator]
            raise CliError(f"--truncate-prompt-tokens must be between 1 and {self._longest}, or -1, got {limit}")
        self._limit = None if options.truncate_to is None else limit
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

    def results(self, batch: Sequence[Item], use_tqdm: bool | Callable[..., Any]) -> Iterable[Results]:
        assert self._tokenizer is not None
        texts = [
            with_prompt(item.text, self._default) if self._prompt is None else self._prompt + item.text
            for item in batch
        ]
        if self.media is not None:
            yield from self._with_media(batch, texts, use_tqdm)
            return
        prompts = self._tokenizer.encode_batch(texts)
        if self._limit is not None:
            pairs = zip(texts, prompts, strict=True)
            prompts = [truncate_text(self._tokenizer, text, ids, self._limit, "right") for text, ids in pairs]
        usable: list[Any] = [{"prompt_token_ids": ids} for ids in prompts if 0 < len(ids) <= self._longest]
        outputs = iter(self._llm.encode(usable, self._params, use_tqdm=use_tqdm) if usable else ())
        for ids in prompts:
            if 0 < len(ids) <= self._longest:
                yield {EMBEDDING: next(outputs).outputs.data.tolist(), "num_prompt_tokens": len(ids)}
            else:
                yield failed(f"the text has {len(ids)} tokens; it must have from 1 to {self._longest}", len(ids))

    def _with_media(
        self, batch: Sequence[Item], texts: Sequence[str], use_tqdm: bool | Callable[..., Any]
    ) -> Iterator[Results]:
        """Rows are messages of a conversation, as over HTTP."""
        assert self.media is not None
        faults, prompts, limit = [], list[Any](), self._longest if self._limit is None else self._limit
        processor = self._llm.llm_engine.input_processor
        for item, text in zip(batch, texts, strict=True):
            try:
                messages = as_message(self.media, item, text)
                (prompt,) = self._llm.preprocess_chat([messages], add_generation_prompt=False)
                (made,) = processor.process_prompts([prompt], [self._params])  # type: ignore[list-item]
                if len(made.token_ids) > limit:
                    message = f"the text has {len(made.token_ids)} tokens; it must have from 1 to {limit}"
                    raise VLLMValidationError(message, "text")
                prompts.append({**prompt, "prompt_token_ids": made.token_ids})
                faults.append("")
            except VLLMValidationError as error:
                faults.append(str(error.args[0]))
        outputs = iter(self._llm.encode(prompts, self._params, use_tqdm=use_tqdm) if prompts else ())
        for fault in faults:
            if fault:
                yield failed(fault)
                continue
            output = next(outputs)
            yield {EMBEDDING: output.outputs.data.tolist(), "num_prompt_tokens": len(output.prompt_token_ids)}


class Reranker(EngineScorer):
    taken = (SCORE,)

    def __init__(self, llm: LLM, options: RerankOptions, input_name: str, media: RowMedia | None = None) -> None:
        super().__init__(llm, media)
        if self._config.runner_type == "pooling" and score_type(self._config) is None:
            raise CliError(f"{self.model_name} does not score pairs of texts, for which it would need one label")
        try:
            check_score_args(self._config, options.template, options.labels)
        except ValueError as error:
            raise CliError(str(error)) from None
        if self._tokenizer is None:
            raise CliError("--skip-tokenizer-init: texts cannot be scored without a tokenizer")
        self._options, self._name = options, input_name
        self._template = options.template
        if options.template is None and options.labels is not None:
            self._template = default_template(self._config, self._tokenizer, options.labels)

    def results(self, batch: Sequence[Item], use_tqdm: bool | Callable[..., Any]) -> Iterable[Results]:
        pairs = [self._options.pair(self._name, item) for item in batch]
        return self._scored(pairs, batch, use_tqdm)

    def _scored(
        self, pairs: Sequence[tuple[str, str]], items: Sequence[Item], use_tqdm: bool | Callable[..., Any]
    ) -> list[Results]:
        """Where a pair is at fault, halves are scored apart until it is alone."""
        options = self._options
        try:
            documents = [as_document(self.media, item) for item in items]
            if not all(documents):
                raise VLLMValidationError("the document is empty", "data_2", "")
            pictures = MarkedMedia(self._llm.llm_engine.input_processor)
            shown = pairs_of([query for query, _ in pairs], documents, ("data_1", "data_2"), pictures)
            pictures.load_now()
            outputs = self._llm.score_pairs(
                shown,
                pictures=pictures,
                template=self._template,
                instruction=options.instruction,
                truncate_to=options.truncate_to,
                max_document_tokens=options.max_document_tokens,
                use_tqdm=use_tqdm,
            )
        except VLLMValidationError as error:
            if len(pairs) == 1:
                return [failed(str(error.args[0]).replace("data_2[0]", "the document"))]
            half = len(pairs) // 2
            own = self._scored(pairs[:half], items[:half], False)
            return own + self._scored(pairs[half:], items[half:], False)
        return [
            {SCORE: finite(output.outputs.score), "num_prompt_tokens": len(output.prompt_token_ids)}
            for output in outputs
        ]


class _ServerPooler(ServerScorer):
    """An endpoint that pools; `probe` shows whether it can be asked at all."""

    kind: str
    path: str

    def __init__(self, server: Server, given: dict[str, Any], probe: Item, media: RowMedia | None = None) -> None:
        """`given`: fields of each request; None: left out."""
        super().__init__(server, media)
        self.taken = (self.kind,)
        self._given = {name: value for name, value in given.items() if value is not None}
        # Ask of a probe first: a later refusal is then due to its text.
        server.wait(self.result(probe))

    async def result(self, item: Item) -> Results:
        answer = await self._server.post(self.path, {**self._fields(item), **self._given})
        try:
            return {self.kind: self._read(answer["data"][0]), "num_prompt_tokens": answer["usage"]["prompt_tokens"]}
        except (TypeError, LookupError, ValueError):
            raise CliError(f"{self.path}: the answer has no {self.kind}") from None

    @abstractmethod
    def _fields(self, item: Item) -> dict[str, Any]:
        """A request's, from its row."""

    @abstractmethod
    def _read(self, entry: dict[str, Any]) -> Any:
        """The row's result, from its entry in the answer."""


class ServerEmbedder(_ServerPooler):
    kind, path = EMBEDDING, "/v1/embeddings"

    def __init__(self, server: Server, options: EmbedOptions, media: RowMedia | None = None) -> None:
        self._prompt = options.prompt
        given = {
            "encoding_format": "base64",
            "dimensions": options.dimensions,
            "truncate_prompt_tokens": options.truncate_to,
            "use_activation": options.normalize,
        }
        super().__init__(server, given, Item(0, _PROBE, {}), media)

    def _fields(self, item: Item) -> dict[str, Any]:
        text = self._prompt + item.text
        return {"input": [text]} if self.media is None else {"messages": as_message(self.media, item, text)}

    def _read(self, entry: dict[str, Any]) -> list[float]:
        numbers: list[float] = np.frombuffer(base64.b64decode(entry[EMBEDDING]), "<f4").tolist()
        return numbers


class ServerReranker(_ServerPooler):
    kind, path = SCORE, "/score"

    def __init__(self, server: Server, options: RerankOptions, input_name: str, media: RowMedia | None = None) -> None:
        self._options, self._name = options, input_name
        given = {
            "instruction": options.instruction,
            "truncate_prompt_tokens": options.truncate_to,
            "max_tokens_per_doc": options.max_document_tokens,
        }
        super().__init__(server, given, Item(0, _PROBE, {options.query_field: _PROBE}), media)

    def _fields(self, item: Item) -> dict[str, Any]:
        query, _ = self._options.pair(self._name, item)
        return {"text_1": query, "text_2": as_document(self.media, item)}

    def _read(self, entry: dict[str, Any]) -> float | None:
        score = entry[SCORE]
        return finite(score) if isinstance(score, float) else score
