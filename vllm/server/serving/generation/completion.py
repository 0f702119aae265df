"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.outputs import CompletionOutput, RequestOutput
from vllm.server.errors import ApiError
from vllm.server.http.routes import post
from vllm.server.protocol.generation import CompletionRequest, CompletionResponse
from vllm.server.serving.engine_requests import Submission, Submitted, request_id_of, respond
from vllm.server.serving.generation.beam_search import BeamSubmission
from vllm.server.serving.generation.completion_choices import ChoiceWriter, CompletionPrompt, CompletionSequence
from vllm.server.serving.generation.sampling import PreparedPrompts, named_as, prepare_prompts, sampling_params
from vllm.server.serving.usage import UsageCount, answer_frame
from vllm.server.state import ServerState

router = APIRouter()

# OpenAI's default.
_DEFAULT_MAX_TOKENS = 16

_OWN_NAMES = {"extra_args": "vllm_xargs", "prompt_token_ids": "prompt"}


@post(router, "/v1/completions", CompletionRequest, CompletionResponse, CompletionResponse)
async def create_completion(request: Request, state: ServerState, body: CompletionRequest) -> Response:
    """Continue one prompt or many, and read the logprobs of chosen tokens."""
    answer = CompletionAnswer(body, state, request_id_of(request, "cmpl", body.request_id))
    return await respond(request, answer, bool(body.stream))


def _prompt_list(prompt: Any) -> list[Any]:
    """One prompt or many, as a list; the input processor checks them."""
    if isinstance(prompt, list):
        if not prompt:
            raise ApiError(400, "prompt must not be empty", "prompt", "invalid_value")
        if isinstance(prompt[0], (str, list)):
            return prompt
    return [prompt]


class CompletionAnswer:
    """See `Answer`."""

    def __init__(self, body: CompletionRequest, state: ServerState, answer_id: str) -> None:
        """Raises ApiError or VLLMValidationError for a field that cannot be honoured."""
        self._body = body
        self._state = state
        self._id = answer_id
        self._frame = {**answer_frame(state, answer_id), "object": "text_completion"}
        self._prompts = _prompt_list(body.prompt)
        state.check_count(len(self._prompts), "prompt")
        max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        self._writer = ChoiceWriter.of(body, state, shows_topk=max_tokens == 0 and body.logprobs is not None)
        self._plan = self._writer.plan
        self._tokenizer = state.tokenizer if body.echo else state.engine.tokenizer
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

    async def prepare(self) -> PreparedPrompts:
        """See `prepare_prompts`."""
        special = self._body.add_special_tokens is not False
        with named_as(_OWN_NAMES):
            return await prepare_prompts(
                self._state, self._body, self._id, self._prompts, self._params, add_special_tokens=special
            )

    async def submit(self) -> Submitted:
        prepared = await self.prepare()
        kind = BeamSubmission if self._params.use_beam_search else Submission
        with named_as(_OWN_NAMES):
            return await kind.queue(self._state, self._id, *prepared, self._body.priority or 0)

    async def whole(self, outputs: list[RequestOutput], request: Request) -> dict[str, Any]:
        choices = []
        usage = UsageCount(request)
        for index, output in enumerate(outputs):
            usage.add(index, output)
            prompt = CompletionPrompt(self._body, self._writer, self._tokenizer, output)
            for completion in output.outputs:
                sequence = CompletionSequence(prompt, self._number(index, completion))
                # Clients look for the field whether they asked for it or not.
                choices.append({"prompt_logprobs": None, **await sequence.fields(completion)})
        labels = self._plan.label_entries
        return {**self._frame, "choices": choices, "labels": labels, **usage.last_fields()}

    async def chunks(self, submission: Submitted, request: Request) -> AsyncGenerator[dict[str, Any], None]:
        usage = UsageCount(request, self._body.stream_options, self._state.args.enable_force_include_usage)
        prompts: dict[int, CompletionPrompt] = {}
        sequences: dict[int, CompletionSequence] = {}
        labels = {"labels": self._plan.label_entries} if self._plan.labels else {}
        async with aclosing(submission.events()) as events:
            async for index, output in events:
                usage.add(index, output)
                if index not in prompts:
                    prompts[index] = CompletionPrompt(self._body, self._writer, self._tokenizer, output)
                for completion in output.outputs:
                    number = self._number(index, completion)
                    if number not in sequences:
                        sequences[number] = CompletionSequence(prompts[index], number)
                    choice = await sequences[number].fields(completion)
                    yield {**self._frame, "choices": [choice], **labels, **usage.so_far()}
                    labels = {}
        if usage.is_wanted_last:
            yield {**self._frame, **usage.last_chunk_fields()}

    def _number(self, prompt_index: int, completion: CompletionOutput) -> int:
        return prompt_index * self._params.n + completion.index
