"""GET /v1/models, /version, /ping, /health, /load, /metrics."""

from __future__ import annotations

from typing import Any, Literal

from fastapi import APIRouter, Request
from prometheus_client import generate_latest
from pydantic import Field
from starlette.responses import Response

from vllm.server.errors import json_response
from vllm.server.http.routes import error_answers
from vllm.server.prometheus import make_registry
from vllm.server.protocol.base import ResponseModel
from vllm.server.state import ServerState, server_state
from vllm.version import __version__

router = APIRouter()

METRICS_CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Prometheus's text format, which every version of it reads."""


class ModelCard(ResponseModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None = None
    max_model_len: int
    tasks: list[str] = Field(
        description='"generate", or a pooling model\'s ("embed", "classify" ...) and "pool"; "score" is of pairs'
    )


class ModelList(ResponseModel):
    object: Literal["list"]
    data: list[ModelCard]


class VersionResponse(ResponseModel):
    version: str


class LoadResponse(ResponseModel):
    server_load: int


@router.get("/v1/models", responses={200: {"model": ModelList}, **error_answers(401)}, response_model=None)
async def list_models(request: Request) -> Response:
    """The served model, once by each of its names, and its LoRA adapters."""
    state = server_state(request)
    names = (*state.model_names, *state.adapters.by_name)
    return json_response({"object": "list", "data": [_card(state, name) for name in names]})


@router.get(
    "/v1/models/{model:path}", responses={200: {"model": ModelCard}, **error_answers(401, 404)}, response_model=None
)
async def retrieve_model(model: str, request: Request) -> Response:
    """One served model, or an adapter."""
    state = server_state(request)
    return json_response(_card(state, state.check_model(model)))


@router.get("/version", responses={200: {"model": VersionResponse}}, response_model=None)
async def version() -> Response:
    """The engine's version."""
    return json_response({"version": __version__})


_HEALTH: dict[str, Any] = {
    "responses": {200: {"description": "Alive"}, **error_answers(503)},
    "response_class": Response,
    "response_model": None,
}


@router.get("/health", **_HEALTH)
@router.get("/ping", **_HEALTH)
@router.post("/ping", **_HEALTH)
async def health(request: Request) -> Response:
    """Whether the engine is alive and accepts work."""
    state = server_state(request)
    await state.engine.check_health()
    state.check_accepting()
    return Response()


@router.get("/load", responses={200: {"model": LoadResponse}}, response_model=None)
async def load(request: Request) -> Response:
    """How many requests are being answered."""
    return json_response({"server_load": len(server_state(request).in_flight)})


@router.get(
    "/metrics",
    responses={200: {"description": "Prometheus's text format", "content": {"text/plain": {}}}},
    response_class=Response,
    response_model=None,
)
async def metrics(request: Request) -> Response:
    """The engine's metrics for Prometheus."""
    state = server_state(request)
    registry = make_registry(state.engine, state.model_names[0])
    registry.register(state.http_metrics)
    return Response(generate_latest(registry), headers={"Content-Type": METRICS_CONTENT_TYPE})


def _card(state: ServerState, name: str) -> dict[str, Any]:
    """Of an adapter `parent` is its model. `root` is the name: answers say nothing of paths."""
    adapter = None if name in state.model_names else state.adapters.by_name.get(name)
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "vllm",
        "root": name,
        "parent": None if adapter is None else adapter.base_model_name or state.model_names[0],
        "max_model_len": state.engine.model_config.max_model_len,
        "tasks": state.tasks,
    }
