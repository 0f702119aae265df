"""POST /v1/decisions and /v1/systemone: typed questions about an input, answered by their options' probabilities."""

from __future__ import annotations

import asyncio
import time
import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.answers.prompts.marked_media import MarkedMedia
from vllm.decisions.content import any_json_text
from vllm.decisions.conversation import with_marks
from vllm.decisions.params import DecisionParams
from vllm.decisions.plan import DecisionPlan
from vllm.decisions.rendering import decision_fields, systemone_fields
from vllm.decisions.systemone import parse_systemone
from vllm.decisions.types import Decision
from vllm.server.errors import ApiError, json_response
from vllm.server.http.routes import post
from vllm.server.protocol.decisions import (
    DecisionRequest,
    DecisionResponse,
    SystemOneRequest,
    SystemOneResponse,
)
from vllm.server.serving.engine_requests import Submission, request_id_of, while_connected
from vllm.server.serving.usage import CACHED_STEP
from vllm.server.state import ServerState
from vllm.utils.checks import wrong_type

router = APIRouter()


@post(router, "/v1/decisions", DecisionRequest, DecisionResponse)
async def create_decision(request: Request, state: ServerState, body: DecisionRequest) -> Response:
    """Answer typed questions about an input by the probabilities of their options."""

    async def whole() -> dict[str, Any]:
        if not isinstance(body.questions, list):
            raise wrong_type("questions", body.questions, "a list of questions")
        params = decision_params(state, body)
        decision = await decide(
            state,
            request_id_of(request, "decision", body.request_id),
            body.input,
            body.questions,
            params,
            body.priority,
        )
        fields = await asyncio.to_thread(
            decision_fields, decision, body.diagnostics is True, body.return_token_ids is True
        )
        request.state.usage = fields["usage"]
        return {"model": state.answer_name, **fields}

    return json_response(await while_connected(request, whole()))


@post(router, "/v1/systemone", SystemOneRequest, SystemOneResponse)
async def system_one(request: Request, state: ServerState, body: SystemOneRequest) -> Response:
    """Answer questions by id about a state, in the older shape of the same decisions."""
    answer_id = request_id_of(request, "decision", body.request_id)
    frame = {
        "id": answer_id,
        "object": "structured_decision",
        "created": int(time.time()),
        "model": state.answer_name,
    }

    async def whole() -> dict[str, Any]:
        given = body.chat_template_kwargs or {}
        if given.get("enable_thinking") or given.get("thinking"):
            message = "chat_template_kwargs: thinking must be off, as the answer is read where the reply begins"
            raise ApiError(400, message, "chat_template_kwargs", "unsupported_field")
        text = body.state if isinstance(body.state, str) else any_json_text("state", body.state)
        params = DecisionParams(
            calibration=state.calibration,
            chat_template=state.chat_template,
            chat_template_kwargs=_template_kwargs(state, given),
            cache_salt=body.cache_salt,
        )
        context = "\n\n".join(each for each in (text, body.instructions) if each)
        questions = parse_systemone(body.questions)
        fields = systemone_fields(await decide(state, answer_id, context, questions, params, body.priority))
        request.state.usage = fields["usage"]
        return {**frame, **fields}

    return json_response(await while_connected(request, whole()))


async def decide(
    state: ServerState, request_id: str, input: Any, questions: Any, params: DecisionParams, priority: int | None
) -> Decision:
    """Check everything, queue it and wait for the answers. Raises ApiError or VLLMValidationError."""
    engine = state.engine
    processor = engine.input_processor
    media = MarkedMedia(processor, params.cache_salt)
    input = with_marks(input, media)
    await media.load()
    # In a thread: templates and long inputs may be slow.
    plan = await asyncio.to_thread(
        DecisionPlan, engine.model_config, processor.tokenizer, input, questions, params, media
    )
    # An error of its own: a full queue's error would say that trying again may help.
    if plan.num_requests > state.max_sequences:
        message = (
            f"the questions take {plan.num_requests} sequences, more than the limit of {state.max_sequences} "
            "(--max-num-seqs and --max-num-queued-reqs together)"
        )
        raise ApiError(400, message, "questions", "too_many_sequences")
    prompts, own = zip(*await asyncio.to_thread(plan.requests), strict=True)
    submission = await Submission.queue(state, request_id, prompts, own, priority or 0)
    outputs = await submission.results()
    return await asyncio.to_thread(plan.decision, outputs, CACHED_STEP)


def decision_params(state: ServerState, body: DecisionRequest) -> DecisionParams:
    """The options of a request."""
    return DecisionParams(
        read=body.read,
        permutations=body.permutations or 1,
        min_label_mass=body.min_label_mass or 0.0,
        calibration=state.calibration if body.calibration is None else body.calibration,
        chat_template=state.chat_template,
        chat_template_kwargs=_template_kwargs(state, body.chat_template_kwargs or {}),
        cache_salt=_salt(body),
        truncate_prompt_tokens=body.truncate_prompt_tokens,
    )


def _template_kwargs(state: ServerState, given: dict[str, Any]) -> dict[str, Any]:
    """The template's variables. The server's do not switch thinking on: answers are read where replies begin."""
    return {**(state.args.default_chat_template_kwargs or {}), "enable_thinking": False, **given}


def _salt(body: DecisionRequest) -> str | None:
    """The salt that keeps the request's cached prefixes apart: its salt and key; or a salt of its own, if it wants no
    cache."""
    options = body.prompt_cache_options
    if options is not None and options.mode == "explicit" and not _has_breakpoint(body.input):
        return f"decision-{uuid.uuid4().hex}"
    if body.prompt_cache_key is None:
        return body.cache_salt
    return f"{body.cache_salt or ''}\0{body.prompt_cache_key}"


def _has_breakpoint(value: Any) -> bool:
    """Whether a part of a message or output marks one."""
    for item in value if isinstance(value, list) else ():
        parts = (item.get("content") or item.get("output")) if isinstance(item, dict) else None
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and part.get("prompt_cache_breakpoint") is not None:
                return True
    return False
