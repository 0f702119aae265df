"""Responses that the server keeps: /v1/responses/ID."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.convertors import StringConvertor, register_url_convertor
from starlette.responses import Response

from vllm.exceptions import shown
from vllm.server.errors import ApiError, json_response
from vllm.server.http.routes import error_answers
from vllm.server.protocol.responses import Deleted, ItemList, ResponseObject
from vllm.server.rendering.written_json import PartsResponse
from vllm.server.response_store import Item
from vllm.server.state import server_state

router = APIRouter()


class _IdConvertor(StringConvertor):
    """A part of a path that is no other route's."""

    regex = "(?!(?:input_tokens|compact)$)[^/]+"


register_url_convertor("response", _IdConvertor())

_PATH = "/v1/responses/{response_id:response}"
_MOST_ITEMS, _ITEMS = 100, 20


@router.post("/v1/responses/compact", include_in_schema=False)
async def compact(request: Request) -> Response:
    """Say what there is instead of summaries of conversations."""
    message = (
        "/v1/responses/compact is not served: no conversation is summarised here; truncation=auto leaves out the "
        "beginning of one that is too long"
    )
    raise ApiError(404, message, code="not_found")


@router.get(_PATH, responses={200: {"model": ResponseObject}, **error_answers(400, 401, 404)}, response_model=None)
async def get_response(request: Request, response_id: str) -> Response:
    """A response as it was answered, or as far as it is."""
    if request.query_params.get("stream", "false").lower() != "false":
        raise ApiError(400, "stream cannot be honoured: events are sent once", "stream", "unsupported_field")
    store = server_state(request).responses
    running = store.running.get(response_id)
    return PartsResponse(store.response(response_id).response if running is None else running.response)


@router.delete(_PATH, responses={200: {"model": Deleted}, **error_answers(401, 404)}, response_model=None)
async def delete_response(request: Request, response_id: str) -> Response:
    """Forget a response. Those that followed it stay."""
    store = server_state(request).responses
    if (running := store.running.get(response_id)) is not None:
        running.keeps = False
    else:
        store.response(response_id)
        store.remove(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.post(
    f"{_PATH}/cancel", responses={200: {"model": ResponseObject}, **error_answers(400, 401, 404, 503)},
    response_model=None,
)  # fmt: skip
async def cancel_response(request: Request, response_id: str) -> Response:
    """End a response that is being answered, with what it has."""
    store = server_state(request).responses
    running = store.running.get(response_id)
    if running is None:
        status = store.response(response_id).response["status"]
        message = f"the response cannot be cancelled: it is {status}"
        raise ApiError(400, message, "response_id", "invalid_value")
    await running.cancel()
    return PartsResponse({**running.response, "status": "cancelled"})


@router.get(
    f"{_PATH}/input_items", responses={200: {"model": ItemList}, **error_answers(400, 401, 404)}, response_model=None
)
async def list_input_items(request: Request, response_id: str) -> Response:
    """The items that a response was made from, with those that it followed."""
    return listed(request, server_state(request).responses.response(response_id).items)


def listed(request: Request, items: list[Item]) -> Response:
    """A page of items, as the query says: `limit`, `order` (desc: the latest first), `after` (an item's id)."""
    query = request.query_params
    limit, order, after = query.get("limit", str(_ITEMS)), query.get("order", "desc"), query.get("after")
    if not limit.isdecimal() or not limit.isascii() or not 1 <= int(limit[:9]) <= _MOST_ITEMS:
        raise ApiError(400, f"limit must be in 1..{_MOST_ITEMS}, got {shown(limit)}", "limit", "invalid_value")
    if order not in ("asc", "desc"):
        raise ApiError(400, f"order must be asc or desc, got {shown(order)}", "order", "invalid_value")
    ordered = items if order == "asc" else items[::-1]
    if after is not None:
        place = next((index for index, item in enumerate(ordered) if item["id"] == after), None)
        if place is None:
            raise ApiError(400, f"after: there is no item {shown(after)} in this list", "after", "invalid_value")
        ordered = ordered[place + 1 :]
    page = ordered[: int(limit)]
    return PartsResponse(item_list(page, has_more=len(ordered) > len(page)))


def item_list(page: list[Item], has_more: bool = False) -> dict[str, Any]:
    """The body of a list of items."""
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": has_more}
