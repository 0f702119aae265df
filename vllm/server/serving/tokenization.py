"""POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.answers.prompts.conversations import is_picture_kind
from vllm.exceptions import VLLMValidationError
from vllm.server.errors import ApiError, json_response
from vllm.server.http.routes import error_answers, post
from vllm.server.protocol.tokenization import (
    MAX_TEXT_BYTES,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizerInfo,
)
from vllm.server.serving.engine_requests import while_connected
from vllm.server.serving.generation.chat import prompt_ids, render
from vllm.server.state import ServerState, server_state
from vllm.utils.checks import MAX_LIST_LENGTH, check_encodable, check_id_sequence, check_vocabulary, wrong_type

router = APIRouter()

# More characters or ids than this are processed in a thread, to keep the event loop responsive.
_LARGE = 4096


@post(router, "/tokenize", TokenizeRequest, TokenizeResponse)
async def tokenize(request: Request, state: ServerState, body: TokenizeRequest) -> Response:
    """The token ids of a text, or of a conversation as the chat template writes it."""
    if body.given_field() == "messages":
        _check_length("messages", body.messages)
        return await while_connected(request, _tokenize_messages(state, body))
    text = body.prompt or ""
    check_encodable("prompt", text)
    _check_length("prompt", text)
    if len(text) > _LARGE:
        return await while_connected(request, asyncio.to_thread(_tokenize_text, state, body, text))
    return _tokenize_text(state, body, text)


@post(router, "/detokenize", DetokenizeRequest, DetokenizeResponse)
async def detokenize(request: Request, state: ServerState, body: DetokenizeRequest) -> Response:
    """The text of token ids."""
    ids = body.tokens
    if not isinstance(ids, list):
        raise wrong_type("tokens", ids, "a list of token ids")
    if len(ids) > MAX_LIST_LENGTH:
        message = f"tokens has {len(ids)} entries, more than the limit of {MAX_LIST_LENGTH}"
        raise VLLMValidationError(message, "tokens", len(ids))
    if len(ids) > _LARGE:
        return await while_connected(request, asyncio.to_thread(_detokenize, state, ids))
    return _detokenize(state, ids)


@router.get(
    "/tokenizer_info", responses={200: {"model": TokenizerInfo}, **error_answers(400, 401)}, response_model=None
)
async def tokenizer_info(request: Request) -> Response:
    """Settings that clients need to write prompts as the server's tokenizer reads them."""
    return json_response(await asyncio.to_thread(_info, server_state(request)))


def _info(state: ServerState) -> dict[str, Any]:
    tokenizer = state.tokenizer
    special = {"bos_token": tokenizer.bos_token_id, "eos_token": tokenizer.eos_token_id}
    special["pad_token"] = tokenizer.pad_token_id
    return {
        "model": state.answer_name,
        "vocab_size": tokenizer.vocab_size,
        "max_model_len": state.engine.model_config.max_model_len,
        **{name: None if token_id is None else tokenizer.id_to_token(token_id) for name, token_id in special.items()},
        "chat_template": state.chat_template or tokenizer.chat_template,
    }


def _tokenize_text(state: ServerState, body: TokenizeRequest, text: str) -> Response:
    return _answer(state, body, state.tokenizer.encode(text, add_special_tokens=body.add_special_tokens is not False))


async def _tokenize_messages(state: ServerState, body: TokenizeRequest) -> Response:
    # Templates and their library may be slow.
    ids = await prompt_ids(state, await render(state, body), bool(body.add_special_tokens))
    return await asyncio.to_thread(_answer, state, body, ids)


def _answer(state: ServerState, body: TokenizeRequest, ids: list[int]) -> Response:
    strs = texts = None
    if body.return_token_strs:
        strs = [token or "" for token in state.tokenizer.convert_ids_to_tokens(ids)]
        texts = state.tokenizer.decode_tokens(ids)
    max_len = state.engine.model_config.max_model_len
    fields = {"count": len(ids), "max_model_len": max_len, "tokens": ids, "token_strs": strs, "token_texts": texts}
    return json_response(fields)


def _detokenize(state: ServerState, ids: list[Any]) -> Response:
    tokens = check_id_sequence("tokens", ids)
    check_vocabulary("tokens", tokens, state.engine.model_config.vocab_size)
    return json_response({"prompt": state.tokenizer.decode(tokens, skip_special_tokens=False)})


def _check_length(field: str, value: Any) -> None:
    num_bytes = _num_bytes(value)
    if num_bytes > MAX_TEXT_BYTES:
        message = f"{field} has {num_bytes} bytes of text, more than the limit of {MAX_TEXT_BYTES}"
        raise ApiError(400, message, field, "text_too_long")


def _num_bytes(value: Any) -> int:
    """Bytes in UTF-8 of all texts in a JSON value, but those of pictures."""
    total, rest = 0, [value]
    while rest:
        each = rest.pop()
        if isinstance(each, dict) and is_picture_kind(each.get("type")):
            continue
        if isinstance(each, str):
            total += len(each.encode(errors="surrogatepass"))
        elif isinstance(each, dict):
            rest += each.values()
        elif isinstance(each, list):
            rest += each
    return total
