"""POST /classify."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.server.errors import json_response
from vllm.server.http.routes import post
from vllm.server.protocol.pooling import ClassificationRequest, ClassificationResponse
from vllm.server.serving.pooling.pooling import pool
from vllm.server.state import ServerState

router = APIRouter()


@post(router, "/classify", ClassificationRequest, ClassificationResponse)
async def classify(request: Request, state: ServerState, body: ClassificationRequest) -> Response:
    """The probability of each of the model's labels, for each text."""
    outputs, frame = await pool(request, state, body, "classify", "classify")
    names = state.engine.model_config.hf_config.id2label
    data = []
    for index, output in enumerate(outputs):
        probs = output.outputs.data.float()
        label = names.get(int(probs.argmax()), "")
        data.append({"index": index, "label": label, "probs": probs.tolist(), "num_classes": len(probs)})
    return json_response({**frame, "data": data})
