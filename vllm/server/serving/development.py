"""Routes for who owns the server, with VLLM_SERVER_DEV_MODE=1 only: what it is made of, its memory, its workers."""

from __future__ import annotations

import dataclasses
import inspect
import os
import tempfile
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.entrypoints.async_llm import AsyncLLM
from vllm.exceptions import EngineDeadError
from vllm.server.errors import ApiError, json_response
from vllm.server.http.routes import read_body
from vllm.server.protocol.base import RequestModel
from vllm.server.state import server_state
from vllm.v1.engine.calls import Route

router = APIRouter(include_in_schema=False)

# Memory that processes of a machine share as files.
_SHARED = "/dev/shm"
_TRUE = {"1": True, "true": True, "0": False, "false": False}


class CollectiveRpcRequest(RequestModel):
    """The body of /collective_rpc."""

    method: str
    args: list[Any] | None = None
    kwargs: dict[str, Any] | None = None
    timeout: float | None = None


class InitTransferRequest(RequestModel):
    """The body of /init_weight_transfer_engine."""

    init_info: dict[str, Any] | None = None


class UpdateWeightsRequest(RequestModel):
    """The body of /update_weights, if it is JSON."""

    update_info: dict[str, Any] | None = None


class FinishUpdateRequest(RequestModel):
    """The body of /finish_weight_update."""

    weight_version: str | None = None


@router.get("/server_info")
async def server_info(request: Request) -> Response:
    """The engine's configuration, as a text or, with ?config_format=json, as an object."""
    config = server_state(request).engine.vllm_config
    form = request.query_params.get("config_format", "text")
    if form not in ("text", "json"):
        raise ApiError(400, f"config_format must be text or json, got {form!r}", param="config_format")
    shown = str(config) if form == "text" else msgspec.to_builtins(dataclasses.asdict(config), enc_hook=str)
    return json_response({"vllm_config": shown})


@router.get("/get_world_size")
async def get_world_size(request: Request) -> Response:
    """How many devices run the model; with ?include_dp=false, one replica of it."""
    config = server_state(request).engine.vllm_config.parallel_config
    num_replicas = config.data_parallel_size if _flag(request, "include_dp", True) else 1
    return json_response({"world_size": config.world_size * num_replicas})


@router.post("/collective_rpc")
async def collective_rpc(request: Request) -> Response:
    """Call a method of every worker; one result a worker."""
    engine, body = server_state(request).engine, await read_body(request, CollectiveRpcRequest)
    try:
        results = await engine.collective_rpc(body.method, body.timeout, tuple(body.args or ()), body.kwargs)
    except EngineDeadError:
        raise
    except RuntimeError as error:
        raise ApiError(400, f"the workers' {body.method} failed: {error}", param="method") from None
    return json_response({"results": msgspec.to_builtins(results, enc_hook=str)})


@router.post("/init_weight_transfer_engine")
async def init_weight_transfer_engine(request: Request) -> Response:
    """Meet the trainer that `init_info` names, which is to send weights; nothing without one: they come as files."""
    engine, body = server_state(request).engine, await _body(request, InitTransferRequest)
    await _changed(engine.init_weight_transfer_engine(body), "init_info", "the trainer was not met")
    return json_response({"status": "initialized"})


@router.post("/update_weights")
async def update_weights(request: Request) -> Response:
    """New weights: a safetensors file, whose path `update_info` has, or as the body itself, an octet stream; or those
    that the trainer sends, announced by `update_info`. All of them are taken, or none."""
    engine = server_state(request).engine
    if request.headers.get("content-type", "").partition(";")[0] != "application/octet-stream":
        body = await _body(request, UpdateWeightsRequest)
        return await _updated(engine.update_weights({"update_info": body.update_info}))
    with tempfile.NamedTemporaryFile(suffix=".safetensors", dir=_SHARED if os.path.isdir(_SHARED) else None) as file:
        async for chunk in request.stream():
            file.write(chunk)
        file.flush()
        return await _updated(engine.update_weights({"update_info": {"path": file.name}}))


@router.post("/finish_weight_update")
async def finish_weight_update(request: Request) -> Response:
    """Take what has come since /start_weight_update, all or none; outputs that follow are of `weight_version`."""
    body = await _body(request, FinishUpdateRequest)
    return await _updated(server_state(request).engine.finish_weight_update(body.weight_version))


async def _updated(update: Awaitable[None]) -> Response:
    await _changed(update, "update_info", "no weight was changed")
    return json_response({"status": "updated"})


async def _changed(call: Awaitable[None], param: str, otherwise: str) -> None:
    try:
        await call
    except EngineDeadError:
        raise
    except RuntimeError as error:
        raise ApiError(400, f"{otherwise}: {error}", param=param) from None


async def _body(request: Request, model: type[RequestModel]) -> Any:
    """The fields of a body; without one, the defaults."""
    if not await request.body():
        return model()
    return await read_body(request, model)


def _add_routes_of_calls() -> None:
    """Make the routes that the table of the engine's calls has: arguments come in the query."""
    for name, call in inspect.getmembers(AsyncLLM, inspect.isfunction):
        if isinstance(route := getattr(call, "route", None), Route):
            router.add_api_route(route.path, _endpoint(name, call, route.reply), methods=[route.method])


def _endpoint(name: str, call: Callable[..., Any], reply: Any) -> Callable[[Request], Awaitable[Response]]:
    parameters = list(inspect.signature(call).parameters.values())[1:]
    readers = {parameter.name: _READERS[parameter.annotation] for parameter in parameters}

    async def answer(request: Request) -> Response:
        given = {each: read(request, each) for each, read in readers.items() if each in request.query_params}
        result = await getattr(server_state(request).engine, name)(**given)
        if reply is None:
            return Response()
        return json_response({reply: result} if isinstance(reply, str) else reply)

    return answer


def _integer(request: Request, name: str) -> int:
    text = request.query_params[name]
    if not text.isascii() or not text.isdecimal():
        raise ApiError(400, f"{name} must be an integer, got {text!r}", param=name)
    return int(text)


def _flag(request: Request, name: str, default: bool = False) -> bool:
    text = request.query_params.get(name)
    if text is None:
        return default
    if text.lower() not in _TRUE:
        raise ApiError(400, f"{name} must be true or false, got {text!r}", param=name)
    return _TRUE[text.lower()]


# How an argument of a call is read from a query, by its type.
_READERS: dict[str, Callable[[Request, str], Any]] = {
    "bool": _flag,
    "int": _integer,
    "str": lambda request, name: request.query_params[name],
    "list[str] | None": lambda request, name: request.query_params.getlist(name),
}
_add_routes_of_calls()
