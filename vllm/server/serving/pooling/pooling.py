"""All endpoints of pooling models share this: inputs to prompts, prompts to pooled tensors and usage; POST /pooling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.config.checkpoint.late_interaction import Side
from vllm.config.checkpoint.sentence_transformers import default_prompt, named_prompts, with_prompt
from vllm.exceptions import VLLMValidationError, shown
from vllm.inputs.images import DATA, OPTIONS
from vllm.inputs.text_options import TextOptions
from vllm.pooling.late_chunking import late_chunks
from vllm.pooling.late_interaction import LateTexts
from vllm.pooling.long_texts import in_parts, joined
from vllm.pooling.tensor_bytes import encode_pooling_bytes, encoded
from vllm.pooling_outputs import LateChunks, PoolingRequestOutput
from vllm.pooling_params import LateChunkingParams, PoolingParams
from vllm.server.errors import ApiError, json_response
from vllm.server.http.routes import post
from vllm.server.protocol.pooling import (
    EmbeddingRequest,
    EncodingFields,
    PoolingFields,
    PoolingRequest,
    PoolingResponse,
)
from vllm.server.serving.engine_requests import Submission, request_id_of, while_connected
from vllm.server.serving.generation.chat import render
from vllm.server.serving.labels.item_scores import in_thread_if
from vllm.server.serving.usage import list_frame
from vllm.server.state import ServerState
from vllm.tokenizers.truncation import TruncationSide, truncate_ids, truncate_text
from vllm.utils.checks import check_encodable, check_integer, check_token_id, wrong_type
from vllm.v1.engine.input_processor import ProcessedPrompt

router = APIRouter()

# More characters, ids or numbers than this are processed in a thread, to keep the event loop responsive.
_LARGE = 4096
_METADATA = "metadata"
# Cohere's purposes, and what models call them.
_PURPOSES: dict[str, tuple[str, ...]] = {
    "search_query": ("search_query", "query"),
    "search_document": ("search_document", "document", "passage"),
    "classification": ("classification",),
    "clustering": ("clustering",),
}


@post(router, "/pooling", PoolingRequest, PoolingResponse)
async def pooling(request: Request, state: ServerState, body: PoolingRequest) -> Response:
    """Pool each text: a vector, or one for each token."""
    tasks = state.engine.model_config.pooling_tasks
    if body.task is not None and body.task not in tasks:
        message = f"Unsupported task: {body.task!r}; the model has {', '.join(tasks)}"
        raise ApiError(400, message, "task", "unsupported_task")
    outputs, frame = await pool(request, state, body, body.task or tasks[0], "pooling")
    return await encoded_answer(outputs, frame, body, "pooling", "data")


async def pool(
    request: Request, state: ServerState, body: PoolingFields, task: str, prefix: str
) -> tuple[list[PoolingRequestOutput[Any]], dict[str, Any]]:
    """Check everything, queue it and wait for the results; with them, an answer's fields beside `data`.

    Raises:
        ApiError, VLLMValidationError: a field that cannot be honoured; nothing was queued then.
    """
    field = body.given_field()
    conversations = body.conversations()
    given: Any = body.input if conversations is None else conversations
    if conversations is None:
        _check_no_chat(body)
    state.check_count(1 if conversations is None and _is_single(given) else len(given), field)
    is_large = conversations is not None or _size(given) > _LARGE
    params = _params(body, task)

    async def run() -> list[PoolingRequestOutput[Any]]:
        rendered = None if conversations is None else await _rendered(state, body, conversations)
        prompts, own_params, chunks = await in_thread_if(is_large, lambda: prepared(rendered))
        outputs = await pool_prompts(state, prompts, own_params, answer_id, body.priority or 0)
        for output, parts in zip(outputs, chunks, strict=True):
            output.late_chunking = parts
        return outputs

    def prepared(
        rendered: list[dict[str, Any]] | None,
    ) -> tuple[list[ProcessedPrompt], list[PoolingParams], list[LateChunks | None]]:
        made = late_requests(state, body, params)
        if made is None:
            made = [(prompt, params) for prompt in _prompts(state, body, params, rendered)]
        prompts = [replace(prompt, cache_salt=body.cache_salt) for prompt, _ in made]
        has_special = body.add_special_tokens is not False
        chunks = [
            late_chunks(state.engine.input_processor.tokenizer, prompt, params, has_special) for prompt in prompts
        ]
        return prompts, [own for _, own in made], chunks

    answer_id = request_id_of(request, prefix, body.request_id)
    outputs = await while_connected(request, run())
    request.state.usage = usage = usage_of(outputs)
    return outputs, {**list_frame(state, answer_id), "usage": usage}


async def pool_prompts(
    state: ServerState,
    prompts: Sequence[ProcessedPrompt],
    params: Sequence[PoolingParams],
    request_id: str,
    priority: int = 0,
) -> list[PoolingRequestOutput[Any]]:
    """The results of checked prompts, in their order; errors as of Submission.queue, and of bad parameters."""
    process = state.engine.input_processor.process_params
    # Most requests have one object for all of their prompts.
    checked = {id(own): process(own, 0) for own in {id(own): own for own in params}.values()}
    own_params = [checked[id(own)] for own in params]
    short, own_params, counts = in_parts(prompts, own_params, state.engine.model_config.max_model_len)
    what = "one of each text, or of each part of a text longer than the model reads"
    submission = await Submission.queue(state, request_id, short, own_params, priority, what)
    outputs: list[Any] = await submission.results()
    return joined(outputs, counts)


def usage_of(outputs: Sequence[PoolingRequestOutput[Any]]) -> dict[str, int]:
    """An answer's `usage`."""
    num_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    return {"prompt_tokens": num_tokens, "completion_tokens": 0, "total_tokens": num_tokens}


async def encoded_answer(
    outputs: Sequence[PoolingRequestOutput[Any]], frame: dict[str, Any], body: EncodingFields, kind: str, key: str
) -> Response:
    """The answer with the tensors as the request wants them written, each an object `kind` with them at `key`."""
    tensors = [output.outputs.data for output in outputs]
    dtype, order, form = body.embed_dtype or "float32", body.endianness or "little", body.encoding_format

    def answer() -> Response:
        if form not in ("bytes", "bytes_only"):
            data = [
                {"index": index, "object": kind, key: encoded(tensor, form, dtype, order), **_chunks_of(output)}
                for index, (tensor, output) in enumerate(zip(tensors, outputs, strict=True))
            ]
            return json_response({**frame, "data": data})
        content, items = encode_pooling_bytes(tensors, dtype, order)
        headers = {}
        if form == "bytes":
            headers[_METADATA] = msgspec.json.encode({**frame, "data": [asdict(item) for item in items]}).decode()
        return Response(content, headers=headers, media_type="application/octet-stream")

    return await in_thread_if(sum(tensor.numel() for tensor in tensors) > _LARGE, answer)


def _chunks_of(output: PoolingRequestOutput[Any]) -> dict[str, Any]:
    return {} if output.late_chunking is None else {"late_chunking": asdict(output.late_chunking)}


def text_prompts(
    state: ServerState,
    texts: Sequence[Any],
    field: str,
    *,
    truncate_to: int | None = None,
    from_end: bool = False,
    add_special_tokens: bool = True,
    task: str = "embed",
) -> list[ProcessedPrompt]:
    """Texts, or lists of token ids, as prompts.

    Args:
        field: its name in errors.
        truncate_to: longest prompt, in tokens; -1: the longest that the model reads; None: longer ones are errors.
        from_end: longer ones keep their end.
        task: what they are for: texts to embed may be longer than the model reads, with `enable_chunked_processing`.

    Raises:
        VLLMValidationError: what is neither, or empty.
        ApiError: too long; there is no tokenizer for texts.
    """
    config = state.engine.model_config
    longest = config.max_embed_len if task == "embed" else config.max_model_len
    if truncate_to is not None and truncate_to != -1:
        check_integer("truncate_prompt_tokens", truncate_to, 1, longest)
    limit = longest if truncate_to in (None, -1) else truncate_to
    if not texts:
        raise VLLMValidationError(f"{field} must not be empty", field, [])
    parsed = [_parsed(field, each, config.vocab_size) for each in texts]
    strings = [text for text, _ in parsed if text is not None]
    encode = state.tokenizer.encode_batch if strings else None
    ids_of_texts = iter(encode(strings, add_special_tokens) if encode else ())
    special = (
        state.engine.input_processor.tokenizer.all_special_ids
        if state.engine.input_processor.tokenizer is not None
        else ()
    )
    side: TruncationSide = "left" if from_end else "right"
    prompts = []
    for index, (text, given) in enumerate(parsed):
        ids = next(ids_of_texts) if text is not None else given
        if not ids:
            raise VLLMValidationError(f"{field}[{index}] has no tokens", field, text)
        if len(ids) > limit:  # type: ignore[operator]
            if truncate_to is None:
                message = (
                    f"{field}[{index}] has {len(ids)} tokens: the model's maximum context length is {longest} tokens; "
                    "truncate_prompt_tokens lets the rest go"
                )
                raise ApiError(400, message, field, "context_length_exceeded")
            if text is None:
                ids = truncate_ids(ids, limit, side, special)  # type: ignore[arg-type]
            else:
                ids = truncate_text(state.tokenizer, text, ids, limit, side, add_special_tokens)  # type: ignore[arg-type]
        prompts.append(ProcessedPrompt(text, ids, None))
    return prompts


def begun(state: ServerState, given: list[Any], purpose: str | None, prompt_name: str | None = None) -> list[Any]:
    """Texts with what the model wants before those of this purpose, with its prompt of this name, or, where neither is
    named, with its default one, which may be there already.

    Raises:
        ApiError: it knows none of this name.
        VLLMValidationError: a prompt is named, and the input is token ids.
    """
    config = state.engine.model_config
    folder = Path(config.path)
    if purpose is None and prompt_name is None:
        prompt = default_prompt(folder) if "embed" in config.pooling_tasks[0] else ""
        return [with_prompt(each, prompt) for each in given] if prompt else given
    prefix = _prefix_of(named_prompts(folder), purpose, prompt_name)
    if prefix and not all(isinstance(each, str) for each in given):
        raise VLLMValidationError("a prompt is put before texts, and the input has token ids", "input")
    return [each and prefix + each for each in given] if prefix else given


def _prefix_of(prompts: dict[str, str], purpose: str | None, prompt_name: str | None) -> str:
    if purpose is not None and prompt_name is not None:
        raise ApiError(400, "input_type and prompt_name exclude each other", "prompt_name", "invalid_value")
    field, name, aliases = ("prompt_name", prompt_name, {}) if purpose is None else ("input_type", purpose, _PURPOSES)
    for each in aliases.get(str(name), (str(name),)):
        if each in prompts:
            return prompts[each]
    if name in aliases and not prompts:
        return ""
    known = ", ".join(sorted(prompts)) or ", ".join(aliases) or "none"
    raise ApiError(400, f"Unsupported {field} {shown(name)}: the model knows {known}", field, "invalid_value")


async def _rendered(state: ServerState, body: PoolingFields, conversations: list[list[Any]]) -> list[dict[str, Any]]:
    """The prompts of `render`."""
    body.add_generation_prompt = bool(body.add_generation_prompt)
    field, prompts = body.given_field(), []
    for index, messages in enumerate(conversations):
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise wrong_type(f"{field}[{index}]", messages, "a list of messages")
        prompts.append(await render(state, body.model_copy(update={"messages": messages})))
    return prompts


def _prompts(
    state: ServerState, body: PoolingFields, params: PoolingParams, rendered: list[dict[str, Any]] | None
) -> list[ProcessedPrompt]:
    options = {
        "truncate_to": body.truncate_prompt_tokens,
        "from_end": body.truncation_side == "left",
        "task": params.task,
    }
    if rendered is None:
        given: Any = [body.input] if _is_single(body.input) else body.input
        if isinstance(body, EncodingFields) and getattr(body, "late_chunking_params", None) is None:
            given = begun(state, given, body.input_type, body.prompt_name)
        return text_prompts(state, given, "input", add_special_tokens=body.add_special_tokens is not False, **options)  # type: ignore[arg-type]
    # Templates write them, where models have templates.
    has_none = state.engine.model_config.hf_config.pools_itself
    has_special = has_none if body.add_special_tokens is None else body.add_special_tokens
    if any(not {DATA, OPTIONS}.isdisjoint(prompt) for prompt in rendered):
        own: Any = params.clone()
        own.truncate_prompt_tokens = body.truncate_prompt_tokens
        process = state.engine.input_processor.process_prompts
        if body.cache_salt is not None:
            rendered = [{**prompt, "cache_salt": body.cache_salt} for prompt in rendered]
        return process(rendered, [own] * len(rendered), options=TextOptions(has_special))
    texts = [prompt["prompt"] for prompt in rendered]
    return text_prompts(state, texts, body.given_field(), add_special_tokens=has_special, **options)  # type: ignore[arg-type]


def _check_no_chat(body: PoolingFields) -> None:
    """ApiError: a text is to be rendered like a conversation."""
    names = ("chat_template", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")
    for name in (*names, "mm_processor_kwargs"):
        if value := getattr(body, name):
            message = f"{name} is for messages, and the input is texts or token ids; got {shown(value)}"
            raise ApiError(400, message, name, "unsupported_field")


def _params(body: PoolingFields, task: str) -> PoolingParams:
    params = PoolingParams(task=task, use_activation=body.use_activation)  # type: ignore[arg-type]
    if isinstance(body, EncodingFields):
        params.dimensions, params.normalize = body.dimensions, body.normalize
        if isinstance(body, EmbeddingRequest) and body.late_chunking_params is not None:
            params.late_chunking_params = LateChunkingParams(body.late_chunking_params.chunk_size)
            # So that it is refused.
            params.truncate_prompt_tokens = body.truncate_prompt_tokens
        if None not in (body.normalize, body.use_activation):
            raise VLLMValidationError("normalize and use_activation are two names of one field", "normalize")
    return params


def _is_single(given: Any) -> bool:
    """Whether the input is one text, or the ids of one."""
    if isinstance(given, list):
        return bool(given) and isinstance(given[0], int)
    if not isinstance(given, str):
        raise wrong_type("input", given, "a text, a list of texts or of token ids")
    return True


def _size(given: Any) -> int:
    return (
        len(given)
        if not isinstance(given, list)
        else sum(_size(each) if isinstance(each, (str, list)) else 1 for each in given)
    )


def _parsed(field: str, given: Any, vocab_size: int) -> tuple[str | None, list[int]]:
    """(text, None) or (None, ids)."""
    if isinstance(given, str):
        if not given:
            raise VLLMValidationError(f"{field} cannot contain an empty string", field, given)
        check_encodable(field, given)
        return given, []
    if not isinstance(given, list):
        raise wrong_type(field, given, "a text or a list of token ids")
    ids = [check_token_id(field, each) for each in given]
    worst = next((each for each in ids if not 0 <= each < vocab_size), None)
    if worst is not None:
        message = f"{field} must be in [0, {vocab_size}): {shown(worst)} is out of vocabulary"
        raise VLLMValidationError(message, field, worst)
    return None, ids


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
