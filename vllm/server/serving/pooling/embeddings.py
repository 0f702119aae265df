"""POST /v1/embeddings, by OpenAI's bodies, and /v2/embed and /v1/embed, by Cohere's."""

from __future__ import annotations

from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.exceptions import VLLMValidationError
from vllm.pooling.tensor_bytes import encoded
from vllm.pooling_outputs import PoolingRequestOutput
from vllm.pooling_params import PoolingParams
from vllm.server.errors import ApiError, json_response
from vllm.server.http.routes import OtherBody, post
from vllm.server.protocol.pooling import (
    CohereEmbedRequest,
    CohereEmbedResponse,
    EmbeddingRequest,
    EmbeddingResponse,
)
from vllm.server.serving.engine_requests import request_id_of, while_connected
from vllm.server.serving.labels.item_scores import in_thread_if
from vllm.server.serving.pooling.pooling import (
    begun,
    encoded_answer,
    pool,
    pool_prompts,
    text_prompts,
    usage_of,
)
from vllm.server.state import ServerState

router = APIRouter()

_LARGE = 4096


async def create_embeddings(request: Request, state: ServerState, body: EmbeddingRequest) -> Response:
    """A vector for each text; of a model that embeds only tokens, or with late chunking, several."""
    tasks, parts = state.engine.model_config.pooling_tasks, body.late_chunking_params
    if parts is not None:
        _check_late_chunking(body, tasks)
    task = "embed" if "embed" in tasks and parts is None else "token_embed"
    outputs, frame = await pool(request, state, body, task, "embd")
    return await encoded_answer(outputs, frame, body, "embedding", "embedding")


async def cohere_embed(request: Request, state: ServerState, body: CohereEmbedRequest) -> Response:
    """A vector for each text, in Cohere's shape."""
    texts = body.texts if body.given_field() == "texts" else _joined(body)
    field = body.given_field()
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise VLLMValidationError(f"{field} must be a list of texts", field)
    state.check_count(len(texts), field)
    answer_id = request_id_of(request, "embd", body.request_id)
    begun_texts = begun(state, texts, body.input_type)
    params = PoolingParams(task="embed", dimensions=body.output_dimension)
    longest = state.engine.model_config.max_embed_len
    # Texts are cut to what the model reads where more is asked for.
    limit = min(body.max_tokens or longest, longest)

    async def run() -> list[PoolingRequestOutput[Any]]:
        prompts = await in_thread_if(
            sum(map(len, texts)) > _LARGE,
            lambda: text_prompts(
                state,
                begun_texts,
                field,
                truncate_to=None if body.truncate == "NONE" else limit,
                from_end=body.truncate == "START",
            ),
        )
        worst = max(len(prompt.token_ids) for prompt in prompts)
        if worst > limit:
            message = f"a text has {worst} tokens, more than max_tokens={limit}; truncate END or START lets the rest go"
            raise ApiError(400, message, "max_tokens", "context_length_exceeded")
        try:
            return await pool_prompts(state, prompts, [params] * len(prompts), answer_id, body.priority or 0)
        except VLLMValidationError as error:
            if error.parameter == "dimensions":
                message = str(error.args[0]).replace("dimensions", "output_dimension", 1)
                raise VLLMValidationError(message, "output_dimension", error.value) from None
            raise

    outputs = await while_connected(request, run())
    request.state.usage = usage = usage_of(outputs)
    is_plain = request.url.path == "/v1/embed" and body.embedding_types is None
    kinds = body.embedding_types or ["float"]
    written = {kind: [_written(output, kind) for output in outputs] for kind in dict.fromkeys(kinds)}
    meta = {
        "api_version": {"version": "1" if request.url.path == "/v1/embed" else "2"},
        "billed_units": {"input_tokens": usage["prompt_tokens"], "image_tokens": 0},
    }
    answer = {
        "id": answer_id,
        "response_type": "embeddings_floats" if is_plain else "embeddings_by_type",
        "embeddings": written["float"] if is_plain else written,
        "texts": texts,
        "meta": meta,
    }
    return json_response(answer)


def _check_late_chunking(body: EmbeddingRequest, tasks: tuple[str, ...]) -> None:
    """ApiError: late chunking of what has no ranges of characters, or by a model that embeds no tokens."""
    name, problem = "late_chunking_params", None
    if "token_embed" not in tasks:
        problem = f"late chunking requires token_embed: the model has the tasks {', '.join(tasks)}"
    elif body.messages is not None:
        name, problem = "messages", "late chunking needs plain-text input"
    elif body.encoding_format in ("bytes", "bytes_only"):
        name, problem = "encoding_format", "late chunking says its ranges in JSON: encoding_format float or base64"
    elif body.prompt_name is not None or body.input_type is not None:
        problem = "late chunking has ranges of the text as it is sent: begin it with the prompt yourself"
    if problem is not None:
        raise ApiError(400, problem, name, "invalid_value")


for _path in ("/v1/embeddings", "/embeddings"):
    post(router, _path, EmbeddingRequest, EmbeddingResponse)(create_embeddings)
for _path in ("/v2/embed", "/v1/embed"):
    post(router, _path, CohereEmbedRequest, CohereEmbedResponse)(cohere_embed)
_COHERE = OtherBody(("texts", "inputs"), CohereEmbedRequest, CohereEmbedResponse, cohere_embed)
post(router, "/embed", EmbeddingRequest, EmbeddingResponse, other=_COHERE)(create_embeddings)


def _joined(body: CohereEmbedRequest) -> list[str]:
    """The text of each input. VLLMValidationError: it is none of parts of text."""
    texts = []
    for index, each in enumerate(body.inputs or ()):
        parts: Any = each.get("content") if isinstance(each, dict) and each.keys() == {"content"} else None
        kinds = [isinstance(part, dict) and part.keys() == {"type", "text"} for part in parts or ()]
        if not (isinstance(parts, list) and parts and all(kinds)) or any(part["type"] != "text" for part in parts):
            raise VLLMValidationError(f"inputs[{index}] must be an object with content, a list of text parts", "inputs")
        if not all(isinstance(part["text"], str) for part in parts):
            raise VLLMValidationError(f"inputs[{index}]: a part's text must be a text", "inputs")
        texts.append("".join(part["text"] for part in parts))
    return texts


def _written(output: PoolingRequestOutput[Any], kind: str) -> Any:
    tensor = output.outputs.data
    if kind in ("float", "base64"):
        return encoded(tensor, kind, "float32", "little")
    if len(tensor) % 8:
        message = f"{kind} embeddings need a number of dimensions that is a multiple of 8, got {len(tensor)}"
        raise ApiError(400, message, "embedding_types", "invalid_value")
    bits = np.packbits(tensor.numpy() >= 0).astype(np.int64)
    return (bits if kind == "ubinary" else bits - 128).tolist()
