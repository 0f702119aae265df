"""GET /v1/models, /version, /ping, /health, /load, /metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any, Literal

from fastapi import APIRouter, Request
from prometheus_client import generate_latest
from pydantic import Field
from starlette.responses import Response

from vllm.config import ModelConfig
from vllm.exceptions import shown
from vllm.server.errors import ApiError, json_response
from vllm.server.http.routes import error_answers
from vllm.server.prometheus import make_registry
from vllm.server.protocol.base import ResponseModel
from vllm.server.state import ServerState, server_state
from vllm.version import __version__

router = APIRouter()

_MOST_MODELS = 1000

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
    type: Literal["model"] = Field(description="This and the next five: as Anthropic's clients read them.")
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int
    meta: dict[str, int] = Field(description="As llama.cpp's clients read it: n_ctx, n_ctx_train, n_vocab, n_embd.")
    tasks: list[str] = Field(
        description='"generate", or a pooling model\'s ("embed", "classify" ...) and "pool"; "score" is of pairs'
    )


class NamedModel(ResponseModel):
    name: str
    model: str
    type: Literal["model"]
    capabilities: list[str]


class ModelList(ResponseModel):
    object: Literal["list"]
    data: list[ModelCard]
    models: list[NamedModel] = Field(description="The same, as llama.cpp's clients read them.")
    has_more: bool = Field(description="Only where the query has a `limit`; `after_id` and `before_id` turn pages.")
    first_id: str | None
    last_id: str | None


class VersionResponse(ResponseModel):
    version: str


class LoadResponse(ResponseModel):
    server_load: int


@router.get("/v1/models", responses={200: {"model": ModelList}, **error_answers(400, 401)}, response_model=None)
async def list_models(request: Request) -> Response:
    """The served model, once by each of its names, and its LoRA adapters."""
    state = server_state(request)
    names, has_more = _page([*state.model_names, *state.adapters.by_name], request.query_params)
    first, last = (names[0], names[-1]) if names else (None, None)
    cards = [_card(state, name) for name in names]
    can = ["completion"] if "generate" in state.tasks else ["embedding"]
    if state.engine.model_config.reads_images:
        can.append("multimodal")
    named = [{"name": name, "model": name, "type": "model", "capabilities": can} for name in names]
    page = {"has_more": has_more, "first_id": first, "last_id": last}
    return json_response({"object": "list", "data": cards, "models": named, **page})


def _meta(config: ModelConfig) -> dict[str, int]:
    own = config.hf_config
    trained = getattr(own, "max_position_embeddings", None) or config.max_model_len
    return {
        "n_ctx": config.max_model_len,
        "n_ctx_train": trained,
        "n_vocab": config.vocab_size,
        "n_embd": own.hidden_size,
    }


def _page(names: list[str], query: Mapping[str, str]) -> tuple[list[str], bool]:
    """The names that a query asks for, and whether there are more in its direction. ApiError: a bad query."""
    limit = query.get("limit", str(_MOST_MODELS))
    if not re.fullmatch("[0-9]{1,4}", limit) or not 1 <= int(limit) <= _MOST_MODELS:
        raise ApiError(400, f"limit must be in 1..{_MOST_MODELS}, got {shown(limit)}", "limit", "invalid_value")
    for field in ("after_id", "before_id"):
        if (mark := query.get(field)) is None:
            continue
        if mark not in names:
            raise ApiError(400, f"{field}: there is no model {shown(mark)} here", field, "invalid_value")
        place = names.index(mark)
        names = names[place + 1 :] if field == "after_id" else names[:place]
    most = int(limit)
    return (names[-most:] if "before_id" in query else names[:most]), len(names) > most


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
    if state.audit is not None:
        registry.register(state.audit)
    return Response(generate_latest(registry), headers={"Content-Type": METRICS_CONTENT_TYPE})


def _card(state: ServerState, name: str) -> dict[str, Any]:
    """An adapter's `parent` is its model. `root` is the name: answers say nothing of paths."""
    longest = state.engine.model_config.max_model_len
    adapter = None if name in state.model_names else state.adapters.by_name.get(name)
    return {
        "id": name,
        "object": "model",
        "created": state.created,
        "owned_by": "vllm",
        "root": name,
        "parent": None if adapter is None else adapter.base_model_name or state.model_names[0],
        "max_model_len": longest,
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(state.created, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": longest,
        "max_tokens": longest,
        "meta": _meta(state.engine.model_config),
        "tasks": state.tasks,
    }
