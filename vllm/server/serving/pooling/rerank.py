"""POST /rerank, /v1/rerank and /v2/rerank, and the bodies of /score that name pairs of texts: how well documents answer
queries, by the two answers that the server's score template asks a generating model for (score_templates.py), or by a
pooling model (pairs.py)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.answers.prompts.marked_media import MARK, MarkedMedia
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.pooling.pairs import PairLimits, PooledPairs, longest_text, order_of
from vllm.pooling.score_templates import PairPrompts, cut_text, pairs_of, score_of
from vllm.pooling_params import PoolingParams
from vllm.server.errors import ApiError, json_response
from vllm.server.http.routes import OtherBody, post
from vllm.server.protocol.rerank import (
    PAIRED_FIELDS,
    PairFields,
    RerankRequest,
    RerankResponse,
    RouterRerankRequest,
    RouterRerankResult,
    ScorePairsRequest,
)
from vllm.server.serving.engine_requests import Submission, request_id_of, while_connected
from vllm.server.serving.generation.sampling import with_picture_options
from vllm.server.serving.labels.item_scores import MAX_TOKENS, ScoredPrompts, in_thread_if
from vllm.server.serving.pooling.pooling import pool_prompts, usage_of
from vllm.server.serving.usage import list_frame
from vllm.server.state import ServerState
from vllm.utils.checks import check_integer, wrong_type
from vllm.v1.engine.plans.label_scoring import LabelScorer, encode_labels

router = APIRouter()

# With more characters, tokenising is done in a thread, to keep the event loop responsive.
_LARGE = 4096
# With more results, their scores are computed so, too.
_MANY = 256


async def rerank(request: Request, state: ServerState, body: RerankRequest) -> Response:
    """Order documents by how well they answer the query."""
    answer_id = request_id_of(request, "rerank", body.request_id)
    documents, best, scored = await _rank(request, state, body, answer_id)
    results = []
    for index in best:
        result: dict[str, Any] = {"index": index, "relevance_score": scored.values[index]}
        if body.return_documents is not False:
            own = documents[index]
            result["document"] = {"text": own} if isinstance(own, str) else {"text": None, "multi_modal": own}
        results.append({**result, **scored.readings(index)})
    return json_response({"id": answer_id, "model": state.answer_name, "usage": scored.usage, "results": results})


async def rerank_for_router(request: Request, state: ServerState, body: RouterRerankRequest) -> Response:
    """The same, as vllm-router reads it."""
    answer_id = request_id_of(request, "rerank", body.request_id or body.rid)
    documents, best, scored = await _rank(request, state, body, answer_id)
    return json_response(
        [
            {"score": scored.values[index], "index": index}
            | ({} if body.return_documents is False else {"document": _plain_text(documents[index])})
            for index in best
        ]
    )


async def _rank(
    request: Request, state: ServerState, body: RerankRequest, answer_id: str
) -> tuple[list[Any], Sequence[int], ScoredPairs | PooledScores]:
    """The documents (texts, or objects with a content), the indices of the best in order, and the scores."""
    count = body.num_results()
    if not isinstance(body.documents, list):
        raise wrong_type("documents", body.documents, "a list of texts")
    if not isinstance(body.query, (str, dict)):
        raise wrong_type("query", body.query, "a text, or an object with a content")
    given: list[Any] = body.documents
    documents = [each["text"] if isinstance(each, dict) and set(each) == {"text"} else each for each in given]
    state.check_count(len(documents), "documents")
    pictures = _pictures(state, body)
    pairs = pairs_of(body.query, documents, ("query", "documents"), pictures)
    scored = await while_connected(request, score_pairs(state, body, pairs, "documents", answer_id, pictures))
    request.state.usage = scored.usage
    return documents, order_of(scored.values)[:count], scored


def _pictures(state: ServerState, body: PairFields) -> MarkedMedia:
    """ApiError: options of the processor that the server does not take."""
    options = body.mm_processor_kwargs
    with_picture_options(state, [{}], options)
    return MarkedMedia(state.engine.input_processor, body.cache_salt, options)


def _plain_text(document: Any) -> str:
    """The texts of a document."""
    if isinstance(document, str):
        return document
    return "".join(part.get("text") or "" for part in document["content"])


_FOR_ROUTER = OtherBody(("rid",), RouterRerankRequest, list[RouterRerankResult], rerank_for_router)
for _path in ("/rerank", "/v1/rerank", "/v2/rerank"):
    post(router, _path, RerankRequest, RerankResponse, other=_FOR_ROUTER)(rerank)


async def score_pairs_of_texts(request: Request, state: ServerState, body: ScorePairsRequest) -> Response:
    """Score pairs of texts."""
    first = body.given_field()
    second = {"text_1": "text_2", "data_1": "data_2", "queries": "documents"}[first]
    others = {"text_2", "data_2", "documents", "items"} - {second}
    if first == "queries" and body.items is not None and body.documents is None:
        second, others = "items", others - {"items"}
    for other in sorted(others):
        if getattr(body, other) is not None:
            message = f"{other} does not go with {first}: {PAIRED_FIELDS}"
            raise ApiError(400, message, other, "invalid_value")
    if getattr(body, second) is None:
        raise ApiError(400, f"{second} is required beside {first}: {PAIRED_FIELDS}", second, "missing_field")
    pictures = _pictures(state, body)
    pairs = pairs_of(getattr(body, first), getattr(body, second), (first, second), pictures)
    state.check_count(len(pairs), second)
    answer_id = request_id_of(request, "score", body.request_id)
    scored = await while_connected(request, score_pairs(state, body, pairs, second, answer_id, pictures))
    request.state.usage = scored.usage
    data = [
        {"index": index, "object": "score", "score": value, **scored.readings(index)}
        for index, value in enumerate(scored.values)
    ]
    return json_response({**list_frame(state, answer_id), "data": data, "usage": scored.usage})


async def score_pairs(
    state: ServerState,
    body: PairFields,
    pairs: Sequence[tuple[str, str]],
    field: str,
    request_id: str,
    pictures: MarkedMedia,
) -> ScoredPairs | PooledScores:
    """Check everything, queue it and wait for the results. ApiError or VLLMValidationError: a field that cannot be
    honoured, before anything is queued. `field` holds the documents."""
    is_large = pictures.count > 0 or sum(len(query) + len(document) for query, document in pairs) > _LARGE
    if body.max_tokens_per_query:
        if any(MARK.search(query) for query, _ in pairs):
            message = "max_tokens_per_query: a query with pictures is not cut: leave it out"
            raise VLLMValidationError(message, "max_tokens_per_query")
        pairs = await in_thread_if(is_large, lambda: _cut_queries(state, pairs, body.max_tokens_per_query or 0))
    await pictures.load()
    if state.engine.model_config.runner_type == "pooling":
        # In a thread: transformers' tokenizer is loaded by the first pair.
        pooled = await asyncio.to_thread(lambda: PooledScores(state, body, pairs, field, pictures))
        await pooled.run(state, request_id, body.priority or 0)
        return pooled
    scored = await in_thread_if(is_large, lambda: ScoredPairs(state, body, pairs, field, pictures))
    prompts, params = zip(*scored.requests(), strict=True)
    submission = await Submission.queue(state, request_id, prompts, params, body.priority or 0)
    outputs = await submission.results()
    scored.finish(outputs)
    return scored


def _cut_queries(state: ServerState, pairs: Sequence[tuple[str, str]], num_tokens: int) -> list[tuple[str, str]]:
    short = {query: cut_text(state.tokenizer, query, num_tokens) for query, _ in pairs}
    return [(short[query], document) for query, document in pairs]


def _of_field(error: VLLMValidationError, names: Sequence[str], field: str) -> Exception:
    """The error, as one of the documents' field where it is of them; `names` are those of too long ones."""
    if error.parameter in names:
        return ApiError(400, str(error.args[0]), field, "context_length_exceeded")
    if error.parameter == "documents":
        return ApiError(400, str(error.args[0]), field, "invalid_value")
    return error


class ScoredPairs(ScoredPrompts):
    """The scores of pairs; `values` are the scores as the answer shows them."""

    def __init__(
        self,
        state: ServerState,
        body: PairFields,
        pairs: Sequence[tuple[str, str]],
        field: str,
        pictures: MarkedMedia,
    ) -> None:
        config, tokenizer, template = state.engine.model_config, state.tokenizer, state.score_template
        assert template is not None
        self._labels = template.labels
        self._gives_logits = template.gives_logits if body.use_activation is None else not body.use_activation
        self._gives_readings = body.return_readings is True
        labels = encode_labels(list(template.labels), tokenizer, config.vocab_size, "score_template")
        scorer = LabelScorer(labels, config.max_model_len)
        truncate_to = body.truncate_prompt_tokens
        if truncate_to == -1:
            truncate_to = config.max_model_len
        elif truncate_to is not None:
            check_integer("truncate_prompt_tokens", truncate_to, 1, config.max_model_len)
        max_document_tokens = body.max_tokens_per_doc or None
        names = [f"{field}[{index}]" for index in range(len(pairs))]
        encoder = PairPrompts(
            *(template, tokenizer, scorer.max_prompt_len, truncate_to, max_document_tokens),
            *(body.asked_instruction(), pictures),
        )
        try:
            encoded = encoder.encode(pairs, names)
        except VLLMValidationError as error:
            raise _of_field(error, names, field) from None
        num_tokens = scorer.num_requests * sum(len(prompt.token_ids) for prompt in encoded)
        if num_tokens > MAX_TOKENS:
            message = f"{len(pairs)} {field} make {num_tokens} tokens, more than the limit of {MAX_TOKENS}; send fewer"
            raise ApiError(400, message, field, "too_many_tokens")
        super().__init__(scorer, [replace(prompt, cache_salt=body.cache_salt) for prompt in encoded])
        self.values: list[float] = []

    def finish(self, outputs: list[RequestOutput]) -> None:
        super().finish(outputs)
        self.values = [score_of(scores, self._gives_logits) for scores in self.scores]

    def readings(self, index: int) -> dict[str, Any]:
        """The field `readings` of a result, if it was asked for."""
        if not self._gives_readings:
            return {}
        scores = self.scores[index]
        answers = [
            {
                "label": label if isinstance(label, str) else f"token_id:{label}",
                "token_ids": own.token_ids,
                "logprob": own.logprob,
                "logit": own.token_logits[0],
                "rank": own.token_ranks[0],
            }
            for label, own in zip(self._labels, scores.labels, strict=True)
        ]
        return {"readings": {"label_mass": scores.mass, "answers": answers}}


class PooledScores:
    """Scores of documents by a pooling model."""

    def __init__(
        self,
        state: ServerState,
        body: PairFields,
        pairs: Sequence[tuple[str, str]],
        field: str,
        pictures: MarkedMedia,
    ) -> None:
        config = state.engine.model_config
        if body.return_readings:
            message = "return_readings: a pooling model has no answers to read; its score is all there is"
            raise ApiError(400, message, "return_readings", "unsupported_field")
        self._cache_salt = body.cache_salt
        self.values: list[float] = []
        self.usage: dict[str, Any] = {}
        limits = PairLimits(longest_text(config), body.truncate_prompt_tokens, body.max_tokens_per_doc or None)
        names = [f"{field}[{index}]" for index in range(len(pairs))]
        try:
            self._pairs = PooledPairs(
                config,
                state.tokenizer,
                pairs,
                PoolingParams(use_activation=body.use_activation),
                limits,
                state.score_template,
                body.asked_instruction(),
                names,
                pictures,
            )
        except VLLMValidationError as error:
            raise _of_field(error, names, field) from None

    async def run(self, state: ServerState, request_id: str, priority: int) -> None:
        """Queue the requests, wait, and set scores and usage."""
        requests = self._pairs.requests
        prompts = [replace(prompt, cache_salt=self._cache_salt) for prompt, _ in requests]
        params = [own for _, own in requests]
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        if num_tokens > MAX_TOKENS:
            message = f"the texts make {num_tokens} tokens, more than the limit of {MAX_TOKENS}; send fewer"
            raise ApiError(400, message, None, "too_many_tokens")
        outputs = await pool_prompts(state, prompts, params, request_id, priority)
        self.values = await in_thread_if(len(outputs) > _MANY, lambda: self._pairs.scores(outputs))
        self.usage = usage_of(outputs)

    def readings(self, index: int) -> dict[str, Any]:
        return {}
