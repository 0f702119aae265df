"""GET /metrics."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client import generate_latest
from starlette.responses import Response

from vllm.entrypoints.openai.state import server_state
from vllm.v1.metrics.prometheus import make_registry

router = APIRouter()

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus's text format, which every version of it reads."""


@router.get(
    "/metrics",
    responses={200: {"description": "Prometheus's text format", "content": {"text/plain": {}}}},
    response_class=Response,
    response_model=None,
)
async def metrics(request: Request) -> Response:
    """What the engine has done and does, for Prometheus."""
    state = server_state(request)
    registry = make_registry(state.engine, state.model_names[0])
    return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE})
