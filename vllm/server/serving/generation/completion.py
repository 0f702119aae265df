"""POST /v1/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.inputs.embeds import load_embeds
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.server.errors import ApiError
from vllm.server.http.routes import post
from vllm.server.protocol.generation import CompletionRequest, CompletionResponse
from vllm.server.serving.engine_requests import request_id_of
from vllm.server.serving.generation.completion_choices import ChoiceWriter, CompletionPrompt, CompletionSequence
from vllm.server.serving.generation.prompt_tables import BODY_TYPES, TableReply
from vllm.server.serving.generation.replies import Reply, respond
from vllm.server.serving.generation.sampling import PreparedPrompts, named_as, prepare_prompts, sampling_params
from vllm.server.serving.usage import UsageCount, answer_frame
from vllm.server.state import ServerState
from vllm.v1.engine.input_processor import check_embeds_enabled

router = APIRouter()

# OpenAI's default.
_DEFAULT_MAX_TOKENS = 16

_OWN_NAMES = {"extra_args": "vllm_xargs", "prompt_token_ids": "prompt"}


@post(router, "/v1/completions", CompletionRequest, CompletionResponse, CompletionResponse, body_types=BODY_TYPES)
async def create_completion(request: Request, state: ServerState, body: CompletionRequest) -> Response:
    """Continue one prompt or many, and read the logprobs of chosen tokens."""
    tables = await TableReply.of(body, request.headers.get("accept"))
    answer = CompletionReply(body, state, request_id_of(request, "cmpl", body.request_id), tables)
    return await respond(request, answer, bool(body.stream))


def _prompt_list(prompt: Any, has_embeds: bool) -> list[Any]:
    """One prompt or many, as a list; the input processor checks them."""
    if isinstance(prompt, list):
        if not prompt:
            if has_embeds:
                return []
            raise ApiError(400, "prompt must not be empty", "prompt", "invalid_value")
        if isinstance(prompt[0], (str, list)):
            return prompt
    return [prompt]


class CompletionReply(Reply):
    """See `Reply`."""

    _own_names = _OWN_NAMES

    def __init__(
        self, body: CompletionRequest, state: ServerState, answer_id: str, tables: TableReply | None = None
    ) -> None:
        frame = {**answer_frame(state, answer_id), "object": "text_completion"}
        super().__init__(body, state, answer_id, frame, tables)
        self._embeds = body.prompt_embeds or []
        if self._embeds:
            check_embeds_enabled(state.engine.model_config)
            if body.echo:
                raise ApiError(400, "echo shows a prompt's text, which prompt_embeds has not", "echo", "invalid_value")
        self._prompts = _prompt_list(body.prompt, bool(self._embeds))
        num_prompts = len(self._embeds) + len(self._prompts)
        self._begun: dict[int, CompletionPrompt] = {}  # prompts and sequences of a stream
        self._sequences: dict[int, CompletionSequence] = {}
        state.check_count(num_prompts, "prompt")
        max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        shows_topk = max_tokens == 0 and body.logprobs is not None
        self._writer = ChoiceWriter.of(body, state, shows_topk, has_tables=tables is not None)
        self._plan = self._writer.plan
        self._tokenizer = state.tokenizer if body.echo else state.engine.input_processor.tokenizer
        own = body.num_echo_topk
        if own is not None and body.prompt_logprobs not in (None, own):
            message = (
                f"echo shows the prompt with logprobs={own}, which prompt_logprobs={body.prompt_logprobs} contradicts"
            )
            raise ApiError(400, message, "prompt_logprobs", "invalid_value")
        with named_as(_OWN_NAMES):
            self._params = sampling_params(
                body, state, self._plan, max_tokens=max_tokens, logprobs=body.logprobs, prompt_logprobs=own
            )
        if tables is not None:
            self._params = tables.applied(self._params, num_prompts, echo=bool(body.echo))

    async def prepare(self) -> PreparedPrompts:
        special = self._body.add_special_tokens is not False
        # Upstream's clients find the answers to embeddings first.
        prompts = [*(await self._read_embeds()), *self._prompts]
        with named_as(_OWN_NAMES):
            return await prepare_prompts(
                self._state, self._body, self._id, prompts, self._params, add_special_tokens=special
            )

    async def _read_embeds(self) -> list[Any]:
        config = self._state.engine.model_config
        limits = config.input_embedding_size, config.max_model_len
        return [{"prompt_embeds": await asyncio.to_thread(load_embeds, text, *limits)} for text in self._embeds]

    async def whole(self, outputs: list[RequestOutput], usage: UsageCount) -> dict[str, Any]:
        choices = []
        for index, output in enumerate(outputs):
            prompt = CompletionPrompt(self._body, self._writer, self._tokenizer, output)
            for completion in output.outputs:
                sequence = CompletionSequence(prompt, self._number(index, completion))
                # Clients look for the field whether they asked for it or not.
                choices.append({"prompt_logprobs": None, **await sequence.fields(completion)})
                if self.tables is not None:
                    choices[-1] |= await self.tables.fields(index, output) if completion.index == 0 else {}
        labels = self._plan.label_entries
        return {**self._frame, "choices": choices, "labels": labels, **usage.last_fields()}

    async def pieces(self, index: int, output: RequestOutput) -> AsyncIterator[dict[str, Any]]:
        if index not in self._begun:
            self._begun[index] = CompletionPrompt(self._body, self._writer, self._tokenizer, output)
        if self.tables is not None and (found := await self.tables.fields(index, output)):
            yield {"choices": [], "prompt_index": index, **found}
        for completion in output.outputs:
            labels = {"labels": self._plan.label_entries} if self._plan.labels and not self._sequences else {}
            number = self._number(index, completion)
            if number not in self._sequences:
                self._sequences[number] = CompletionSequence(self._begun[index], number)
            yield {"choices": [await self._sequences[number].fields(completion)], **labels}

    def _number(self, prompt_index: int, completion: CompletionOutput) -> int:
        return prompt_index * self._params.n + completion.index
