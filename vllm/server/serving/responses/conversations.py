"""Conversations that the server keeps: /v1/conversations."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.exceptions import shown
from vllm.server.errors import ApiError, json_response
from vllm.server.http.routes import post, read_body
from vllm.server.protocol.responses import (
    ConversationItemsRequest,
    ConversationObject,
    ConversationRequest,
)
from vllm.server.rendering.written_json import PartsResponse
from vllm.server.response_store import Conversation, Item
from vllm.server.serving.responses.input_items import check_returned, new_id, normal_items
from vllm.server.serving.responses.stored import item_list, listed
from vllm.server.state import ServerState, server_state

router = APIRouter()

_PATH = "/v1/conversations/{conversation_id}"
_UNDESCRIBED: Any = {"include_in_schema": False, "response_model": None}


@post(router, "/v1/conversations", ConversationRequest, ConversationObject)
async def create_conversation(request: Request, state: ServerState, body: ConversationRequest) -> Response:
    """Begin a conversation, which responses can follow and continue."""
    check_returned("metadata", body.metadata)
    items = [] if body.items is None else normal_items(body.items, state.responses.item, "items")
    name = new_id("conv")
    head = {
        "id": name, "object": "conversation", "created_at": int(time.time()), "metadata": body.metadata or {},
    }  # fmt: skip
    state.responses.put(name, Conversation(head, items))
    # One that is too large, or that nothing is kept for, is an error now.
    return json_response(state.responses.conversation(name).head)


@router.get(_PATH, **_UNDESCRIBED)
async def get_conversation(request: Request, conversation_id: str) -> Response:
    """A conversation, without its items."""
    return json_response(server_state(request).responses.conversation(conversation_id).head)


@router.post(_PATH, **_UNDESCRIBED)
async def update_conversation(request: Request, conversation_id: str) -> Response:
    """Replace a conversation's metadata."""
    body = await read_body(request, ConversationRequest)
    check_returned("metadata", body.metadata)
    if body.items is not None:
        raise ApiError(400, f"items are added by POST {request.url.path}/items", "items", "unsupported_field")
    store = server_state(request).responses
    conversation = store.conversation(conversation_id)
    conversation.head["metadata"] = body.metadata or {}
    store.put(conversation_id, conversation)
    return json_response(conversation.head)


@router.delete(_PATH, **_UNDESCRIBED)
async def delete_conversation(request: Request, conversation_id: str) -> Response:
    """Forget a conversation."""
    store = server_state(request).responses
    store.conversation(conversation_id)
    store.remove(conversation_id)
    return json_response({"id": conversation_id, "object": "conversation.deleted", "deleted": True})


@router.get(f"{_PATH}/items", **_UNDESCRIBED)
async def list_items(request: Request, conversation_id: str) -> Response:
    """A conversation's items."""
    return listed(request, server_state(request).responses.conversation(conversation_id).items)


@router.post(f"{_PATH}/items", **_UNDESCRIBED)
async def add_items(request: Request, conversation_id: str) -> Response:
    """Add items to a conversation."""
    body = await read_body(request, ConversationItemsRequest)
    store = server_state(request).responses
    conversation = store.conversation(conversation_id)
    added = normal_items(body.items, store.item, "items")
    conversation.items += added
    store.put(conversation_id, conversation)
    return PartsResponse(item_list(added))


@router.get(f"{_PATH}/items/{{item_id}}", **_UNDESCRIBED)
async def get_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """One item."""
    return PartsResponse(_item(server_state(request).responses.conversation(conversation_id), item_id))


@router.delete(f"{_PATH}/items/{{item_id}}", **_UNDESCRIBED)
async def delete_item(request: Request, conversation_id: str, item_id: str) -> Response:
    """Remove one item; returns the conversation."""
    store = server_state(request).responses
    conversation = store.conversation(conversation_id)
    gone = _item(conversation, item_id)
    store.remove(conversation_id)
    conversation.items = [item for item in conversation.items if item is not gone]
    store.put(conversation_id, conversation)
    return json_response(conversation.head)


def _item(conversation: Conversation, name: str) -> Item:
    found = next((item for item in conversation.items if item["id"] == name), None)
    if found is None:
        raise ApiError(404, f"the conversation has no item {shown(name)}", "item_id", "item_not_found")
    return found
