"""Inputs that are read as queries or documents of late interaction: `input_type` and `prompt_name` of a model that
embeds tokens."""

from __future__ import annotations

from typing import Any

from vllm.config.checkpoint.late_interaction import Side
from vllm.exceptions import VLLMValidationError
from vllm.pooling.late_interaction import LateTexts
from vllm.pooling_params import PoolingParams
from vllm.server.errors import ApiError
from vllm.server.protocol.pooling import EncodingFields, PoolingFields
from vllm.server.state import ServerState
from vllm.utils.checks import check_encodable
from vllm.v1.engine.input_processor import ProcessedPrompt

_SIDES: dict[str, Side] = {
    "query": "query",
    "search_query": "query",
    "document": "document",
    "passage": "document",
    "search_document": "document",
}


def late_requests(
    state: ServerState, body: PoolingFields, params: PoolingParams
) -> list[tuple[ProcessedPrompt, PoolingParams]] | None:
    """A request for each text; None: the texts are read as they are.

    Raises:
        ApiError: a field that does not go with such texts.
        VLLMValidationError: what is no text, empty or too long.
    """
    config = state.engine.model_config
    if not isinstance(body, EncodingFields) or config.late_interaction is None or params.task != "token_embed":
        return None
    field = "prompt_name" if body.input_type is None else "input_type"
    side = _SIDES.get(str(getattr(body, field)))
    if side is None:
        return None
    if None not in (body.prompt_name, body.input_type):
        raise ApiError(400, "input_type and prompt_name exclude each other", "prompt_name", "invalid_value")
    if body.add_special_tokens is False or body.truncation_side == "left":
        name = "add_special_tokens" if body.add_special_tokens is False else "truncation_side"
        message = f"{name} does not go with {field}: such texts have special tokens, and lose their end"
        raise ApiError(400, message, name, "invalid_value")
    texts: Any = [body.input] if isinstance(body.input, str) else body.input
    if body.conversations() is not None or not texts or not all(isinstance(text, str) and text for text in texts):
        raise VLLMValidationError(f"{field} is for texts that are not empty", "input")
    for text in texts:
        check_encodable("input", text)
    return LateTexts(config, config.late_interaction, state.tokenizer).requests(
        texts, side, params, body.truncate_prompt_tokens
    )
