"""POST /generative_scoring, /v1/score and /score: the probabilities of labels after a query joined with items."""

from __future__ import annotations

from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.outputs import LabelScores
from vllm.server.errors import json_response
from vllm.server.http.routes import OtherBody, post
from vllm.server.protocol.rerank import ScorePairsRequest, ScorePairsResponse
from vllm.server.protocol.scoring import (
    GenerativeScoringRequest,
    GenerativeScoringResponse,
    ScoringRequest,
    ScoringResponse,
)
from vllm.server.serving.engine_requests import request_id_of, while_connected
from vllm.server.serving.labels.item_scores import ScoredItems, in_thread_if, score_items
from vllm.server.serving.pooling.rerank import score_pairs_of_texts
from vllm.server.serving.usage import list_frame
from vllm.server.state import ServerState

router = APIRouter()


@post(router, "/generative_scoring", GenerativeScoringRequest, GenerativeScoringResponse)
async def generative_scoring(request: Request, state: ServerState, body: GenerativeScoringRequest) -> Response:
    """Score items by the probabilities of labels after the query joined with each item."""
    answer_id = request_id_of(request, "generative-scoring", body.request_id)
    frame = list_frame(state, answer_id)
    scored = await while_connected(request, score_items(state, body, answer_id))
    request.state.usage = scored.usage

    def answer() -> Response:
        among_labels = body.apply_softmax is not False
        data = [
            _item_fields(scored, index, among_labels, with_ids=body.return_token_ids is True)
            for index in range(len(scored.scores))
        ]
        return json_response({**frame, "data": data, "usage": _usage(scored)})

    return await in_thread_if(scored.is_large, answer)


async def score(request: Request, state: ServerState, body: ScoringRequest) -> Response:
    """The same scores in SGLang's shape: a row of probabilities for each item."""
    model = state.answer_name
    if isinstance(body.items, str):
        body.items = [body.items]
    scored = await while_connected(request, score_items(state, body, request_id_of(request, "score", body.request_id)))
    request.state.usage = scored.usage

    def answer() -> Response:
        ranks = [_first_ranks(each) for each in scored.scores]
        return json_response(
            {
                "scores": [_probabilities(each, body.apply_softmax is True).tolist() for each in scored.scores],
                "logprobs": [each.logprobs.tolist() for each in scored.scores],
                "ranks": ranks,
                "label_mass": [each.mass for each in scored.scores],
                "argmax_is_label": [1 in own for own in ranks],
                "num_truncated_tokens": [prompt.num_cut for prompt in scored.prompts],
                "model": model,
                "usage": scored.usage,
                "object": "scoring",
            }
        )

    return await in_thread_if(scored.is_large, answer)


# Upstream's bodies name pairs of texts.
_PAIRS = OtherBody(("text_1", "data_1", "queries"), ScorePairsRequest, ScorePairsResponse, score_pairs_of_texts)

for _path in ("/v1/score", "/score"):
    post(router, _path, ScoringRequest, ScoringResponse, other=_PAIRS)(score)


def _usage(scored: ScoredItems) -> dict[str, Any]:
    """Upstream's counts: the position that is read after each item is a token of completion."""
    count = len(scored.scores)
    return {**scored.usage, "completion_tokens": count, "total_tokens": scored.usage["total_tokens"] + count}


def _item_fields(scored: ScoredItems, index: int, among_labels: bool, with_ids: bool) -> dict[str, Any]:
    prompt, scores = scored.prompts[index], scored.scores[index]
    probabilities = _probabilities(scores, among_labels).tolist()
    fields = {
        "index": index,
        "object": "score",
        "score": probabilities[0],
        "prediction": scored.label_names[int(np.argmax(scores.logprobs))],
        "label_mass": scores.mass,
        "argmax_is_label": 1 in _first_ranks(scores),
        "num_prompt_tokens": len(prompt.token_ids),
        "num_truncated_tokens": prompt.num_cut,
        "labels": _label_fields(scored.label_names, scores, probabilities),
    }
    return {**fields, "prompt_token_ids": prompt.token_ids} if with_ids else fields


def _label_fields(names: list[str], scores: LabelScores, probabilities: list[float]) -> list[dict[str, Any]]:
    has_long = len(scores.token_ranks) > len(names)
    entries: list[dict[str, Any]] = []
    for name, own, probability in zip(names, scores.labels, probabilities, strict=True):
        entry = {
            "label": name,
            "token_ids": own.token_ids,
            "probability": probability,
            "logprob": own.logprob,
            "logit": own.token_logits[0],
            "rank": own.token_ranks[0],
        }
        if has_long:
            entry |= {
                "normalized_logprob": own.normalized_logprob,
                "token_logprobs": own.token_logprobs,
                "token_ranks": own.token_ranks,
            }
        entries.append(entry)
    return entries


def _probabilities(scores: LabelScores, among_labels: bool) -> np.ndarray:
    """float64 [labels]. A single label has its true probability: among labels it would always be 1."""
    return scores.probabilities if among_labels and len(scores.logprobs) > 1 else np.exp(scores.logprobs)


def _first_ranks(scores: LabelScores) -> list[int]:
    """The rank of each label's first token."""
    return [own.token_ranks[0] for own in scores.labels]
