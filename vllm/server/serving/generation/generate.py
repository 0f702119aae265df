"""POST /inference/v1/generate, token ids in and token ids out, and /inference/v1/abort_requests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.server.errors import ApiError, json_response
from vllm.server.http.routes import post
from vllm.server.protocol.generate import AbortRequest, GenerateRequest, GenerateResponse
from vllm.server.rendering.logprobs import prompt_logprobs, token_logprobs
from vllm.server.rendering.token_texts import TokenNames
from vllm.server.serving.engine_requests import Submission, request_id_of
from vllm.server.serving.generation.completion_choices import form_fields
from vllm.server.serving.generation.prompt_tables import BODY_TYPES, TableReply
from vllm.server.serving.generation.replies import Reply, respond
from vllm.server.serving.generation.sampling import PreparedPrompts, named_as, prepare_prompts
from vllm.server.serving.usage import UsageCount
from vllm.server.state import ServerState
from vllm.utils.checks import check_texts
from vllm.utils.npy import npy_base64

router = APIRouter()

_OWN_NAMES = {"prompt_token_ids": "token_ids", "prompt": "token_ids"}


@post(router, "/inference/v1/generate", GenerateRequest, GenerateResponse, GenerateResponse, body_types=BODY_TYPES)
async def generate(request: Request, state: ServerState, body: GenerateRequest) -> Response:
    """Continue a prompt of token ids, and read the logprobs of chosen tokens."""
    tables = await TableReply.of(body, request.headers.get("accept"))
    answer = GenerateReply(body, state, request_id_of(request, "generate-tokens", body.request_id), tables)
    return await respond(request, answer, bool(body.stream))


@post(router, "/inference/v1/abort_requests", AbortRequest, dict[str, None])
async def abort_requests(request: Request, state: ServerState, body: AbortRequest) -> Response:
    """End unfinished requests of any endpoint, by the ids of their answers; each is answered with what it has, and
    "abort" as finish reason. Other ids are ignored."""
    await Submission.cut_short(state, set(check_texts("request_ids", body.request_ids)))
    return json_response({})


class GenerateReply(Reply):
    """See `Reply`."""

    _own_names = _OWN_NAMES

    def __init__(
        self, body: GenerateRequest, state: ServerState, answer_id: str, tables: TableReply | None = None
    ) -> None:
        self._mode = body.output_mode or "tokens"
        super().__init__(body, state, answer_id, {"request_id": answer_id, "output_mode": self._mode}, tables)
        self._has_begun = False
        if self._mode == "derender" and body.stream:
            message = 'output_mode "derender" makes whole messages: not with stream; "text" streams'
            raise ApiError(400, message, "stream", "invalid_value")
        self._params = self._sampling_params()
        if tables is not None:
            self._params = tables.applied(self._params, 1)
        self._names = TokenNames(state.engine.input_processor.tokenizer, state.args.return_tokens_as_token_ids)
        self._has_logprobs = self._params.num_logprobs is not None

    def _sampling_params(self) -> SamplingParams:
        own, state = self._body.sampling_params, self._state
        needs_text = self._mode != "tokens"
        if needs_text and state.engine.input_processor.tokenizer is None:
            message = f'output_mode "{self._mode}" requires a tokenizer, and this server runs without one'
            raise ApiError(400, message, "output_mode", "invalid_value")
        if needs_text and own.detokenize is False:
            message = f'output_mode "{self._mode}" needs detokenize, which sampling_params.detokenize=false leaves out'
            raise ApiError(400, message, "detokenize", "invalid_value")
        defaults = state.engine.model_config.default_sampling_params
        fields = {"max_tokens": None, "detokenize": needs_text or bool(own.stop), **own.sampling_fields(defaults)}
        kind = RequestOutputKind.DELTA if self._body.stream else RequestOutputKind.FINAL_ONLY
        return SamplingParams(**fields, output_kind=kind)

    async def prepare(self) -> PreparedPrompts:
        prompt: dict[str, Any] = {"prompt_token_ids": self._body.token_ids}
        if self._body.prompt is not None:
            prompt["prompt"] = self._body.prompt
        with named_as(_OWN_NAMES):
            return await prepare_prompts(
                self._state,
                self._body,
                self._id,
                [prompt],
                self._params,
                add_special_tokens=False,
                prompt_field="token_ids",
            )

    async def whole(self, outputs: list[RequestOutput], usage: UsageCount) -> dict[str, Any]:
        (output,) = outputs
        choices = [await self._choice(completion) for completion in output.outputs]
        return {**self._frame, "choices": choices, **await self._prompt_fields(output), **usage.last_fields()}

    async def pieces(self, index: int, output: RequestOutput) -> AsyncIterator[dict[str, Any]]:
        if not output.outputs and self.tables is not None:
            yield {"choices": [], **await self.tables.fields(index, output)}
        for completion in output.outputs:
            once = {} if self._has_begun else await self._prompt_fields(output)
            self._has_begun = True
            yield {"choices": [await self._choice(completion)], **once}

    async def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        """The fields for what `completion` adds to a choice."""
        fields: dict[str, Any] = {"index": completion.index, "token_ids": completion.token_ids, "logprobs": None}
        if self._has_logprobs:
            names = None if self._mode == "tokens" else self._names
            readings = completion.logprobs
            fields["logprobs"] = {"content": [] if readings is None else await token_logprobs(readings, names)}
        if self._mode == "text":
            fields["text"] = completion.text
        elif self._mode == "derender":
            role = self._state.args.response_role
            fields["message"] = {"role": role, "content": completion.text, "refusal": None}
        fields |= form_fields(completion)
        return {**fields, "finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}

    async def _prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        """The prompt's ids and readings, as far as requested."""
        fields: dict[str, Any] = {}
        if self._body.return_token_ids:
            fields["prompt_token_ids"] = output.prompt_token_ids
        if self.tables is not None:
            return {**fields, **await self.tables.fields(0, output)}
        if self._params.prompt_logprobs is not None and output.prompt_logprobs is not None:
            fields["prompt_logprobs"] = await prompt_logprobs(output.prompt_logprobs, self._names)
        matrix = output.prompt_token_id_logprobs
        if matrix is not None:
            fields["prompt_token_id_logprobs"] = npy_base64(matrix)
        return fields
