"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
import time
import uuid
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.entrypoints.openai.errors import json_response
from vllm.entrypoints.openai.http.routes import post
from vllm.entrypoints.openai.protocol.embeddings import EmbeddingRequest, EmbeddingResponse
from vllm.entrypoints.openai.serving.engine_requests import request_id_of, while_connected
from vllm.entrypoints.openai.state import ServerState
from vllm.exceptions import VLLMValidationError
from vllm.pooling_outputs import PoolingRequestOutput
from vllm.pooling_params import PoolingParams
from vllm.utils.checks import check_encodable, check_id_sequence, check_vocabulary, wrong_type

router = APIRouter()


async def create_embeddings(request: Request, state: ServerState, body: EmbeddingRequest) -> Response:
    """A vector for each text."""
    prompts = _prompts(body.input, state.engine.model_config.vocab_size)
    state.check_count(len(prompts), "input")
    state.check_capacity(len(prompts))
    params = PoolingParams(
        task="embed",
        dimensions=body.dimensions,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        normalize=body.normalize,
    )
    answer_id = request_id_of(request, "embd", body.request_id)
    outputs = await while_connected(request, _embed(state, prompts, params, answer_id))
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    request.state.usage = {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}
    data = [
        {"index": index, "object": "embedding", "embedding": _written(output, body.encoding_format)}
        for index, output in enumerate(outputs)
    ]
    frame = {"id": answer_id, "object": "list", "created": int(time.time()), "model": state.model_names[0]}
    return json_response({**frame, "data": data, "usage": request.state.usage})


for _path in ("/v1/embeddings", "/embeddings"):
    post(router, _path, EmbeddingRequest, EmbeddingResponse)(create_embeddings)


async def _embed(
    state: ServerState, prompts: list[Any], params: PoolingParams, request_id: str
) -> list[PoolingRequestOutput[Any]]:
    # Clients may give several requests one id.
    own_id = f"{request_id}-{uuid.uuid4().hex[:8]}"

    async def one(index: int, prompt: Any) -> PoolingRequestOutput[Any]:
        results = [each async for each in state.engine.encode(prompt, params, f"{own_id}-{index}")]
        return results[-1]

    tasks = [asyncio.ensure_future(one(index, prompt)) for index, prompt in enumerate(prompts)]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


def _prompts(given: Any, vocab_size: int) -> list[Any]:
    """Texts, and lists of ids as prompts. VLLMValidationError names what is neither."""
    if isinstance(given, str) or (isinstance(given, list) and given and isinstance(given[0], int)):
        given = [given]
    if not isinstance(given, list):
        raise wrong_type("input", given, "a text, a list of texts or of token ids")
    if not given:
        raise VLLMValidationError("input must not be empty", "input", given)
    prompts: list[Any] = []
    for each in given:
        if isinstance(each, str):
            if not each:
                raise VLLMValidationError("input cannot contain an empty string", "input", each)
            check_encodable("input", each)
            prompts.append(each)
            continue
        if not isinstance(each, list):
            raise wrong_type("input", each, "a text or a list of token ids")
        ids = check_id_sequence("input", each)
        check_vocabulary("input", ids, vocab_size)
        prompts.append({"prompt_token_ids": ids})
    return prompts


def _written(output: PoolingRequestOutput[Any], form: str | None) -> list[float] | str:
    values = output.outputs.data.float().numpy()
    if form != "base64":
        return values.tolist()
    return base64.b64encode(np.ascontiguousarray(values, dtype="<f4").tobytes()).decode("ascii")
