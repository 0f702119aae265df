"""POST /v1/chat/completions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm.answers.answer import AnswerParser
from vllm.answers.deltas import delta_fields, whole_call
from vllm.answers.events import Content, Event, collect
from vllm.answers.plan import AnswerPlan
from vllm.answers.prompts import normal_messages, picture_options, written_conversations
from vllm.answers.prompts.writer import Written
from vllm.inputs.images import DATA
from vllm.inputs.media import with_pictures
from vllm.inputs.text_options import TextOptions
from vllm.logger import init_logger, warn_once
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.server.errors import ApiError
from vllm.server.http.routes import post
from vllm.server.protocol.generation import (
    NOT_A_CONVERSATION,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatCompletionResponse,
)
from vllm.server.protocol.pooling import PoolingFields
from vllm.server.protocol.sampling import GUIDED
from vllm.server.protocol.tokenization import TokenizeRequest
from vllm.server.rendering.logprobs import chat_logprobs
from vllm.server.rendering.readings import PositionParts
from vllm.server.rendering.token_texts import TokenPieces
from vllm.server.serving.engine_requests import request_id_of
from vllm.server.serving.generation.completion_choices import ChoiceWriter
from vllm.server.serving.generation.replies import Reply, respond
from vllm.server.serving.generation.sampling import (
    PreparedPrompts,
    named_as,
    prepare_prompts,
    sampling_params,
    with_picture_options,
)
from vllm.server.serving.usage import UsageCount, answer_frame
from vllm.server.state import TOOLS_IGNORED, ServerState
from vllm.utils.checks import wrong_type

logger = init_logger(__name__)

router = APIRouter()

# Clients read them without asking whether they are there.
_EMPTY_FIELDS = dict.fromkeys(("content", "refusal", "annotations", "audio", "function_call", "reasoning"))

_OWN_NAMES = {"logprobs": "top_logprobs", "prompt": "messages", "extra_args": "vllm_xargs"}


@post(router, "/v1/chat/completions", ChatCompletionRequest, ChatCompletionResponse, ChatCompletionChunk)
async def create_chat_completion(request: Request, state: ServerState, body: ChatCompletionRequest) -> Response:
    """Answer a conversation, and read the logprobs of chosen tokens."""
    answer = ChatReply(body, state, request_id_of(request, "chatcmpl", body.request_id))
    return await respond(request, answer, bool(body.stream))


async def render(state: ServerState, body: TokenizeRequest | PoolingFields) -> dict[str, Any]:
    """The prompt of the request's conversation; see `render_conversations`."""
    prompt, written = await asyncio.to_thread(_rendered, state, body)
    prompts = [await _with_pictures(state, prompt, written)]
    return dict(with_picture_options(state, prompts, body.mm_processor_kwargs)[0])


async def prompt_ids(state: ServerState, prompt: dict[str, Any], add_special_tokens: bool = False) -> list[int]:
    """The ids of a prompt of `render`, with all that stands for its pictures. It may be longer than the context."""
    if DATA not in prompt:
        if add_special_tokens or "prompt_token_ids" not in prompt:
            return await asyncio.to_thread(state.tokenizer.encode, prompt["prompt"], add_special_tokens)
        ids: list[int] = prompt["prompt_token_ids"]
        return ids
    params: Any = SamplingParams(max_tokens=0)
    if state.engine.model_config.runner_type == "pooling":
        params = PoolingParams(task=state.engine.model_config.pooling_tasks[0])  # type: ignore[arg-type]
    (made,) = await state.engine.process_prompts([prompt], [params], options=TextOptions(add_special_tokens))
    return made.token_ids


def _rendered(state: ServerState, body: TokenizeRequest | PoolingFields) -> tuple[dict[str, Any], Written]:
    own = _written(state, body)
    return _as_prompt(state, body, own), own


async def _with_pictures(state: ServerState, prompt: dict[str, Any], written: Written) -> dict[str, Any]:
    """The prompt with the conversation's pictures, which are fetched and decoded."""
    if not written.pictures:
        return prompt
    return with_pictures(prompt, await state.engine.input_processor.picture_loader.load(written.pictures))


def _as_prompt(
    state: ServerState, body: ChatCompletionRequest | TokenizeRequest | PoolingFields, written: Written
) -> dict[str, Any]:
    """The text, and its ids, unless pictures are to be put into it."""
    # Where a text is cut, the special tokens stay.
    if written.pictures or (isinstance(body, ChatCompletionRequest) and body.add_special_tokens):
        return {"prompt": written.text}
    (ids,) = state.tokenizer.encode_batch([written.text], add_special_tokens=False)
    return {"prompt_token_ids": ids, "prompt": written.text}


def _written(
    state: ServerState, body: ChatCompletionRequest | TokenizeRequest | PoolingFields, parts: AnswerPlan | None = None
) -> Written:
    """The request's conversation as its template writes it, which gets the tools of `parts`."""
    if body.chat_template is not None and not state.args.trust_request_chat_template:
        message = (
            "chat_template: a template is a program, and this server runs those of requests only with "
            "--trust-request-chat-template"
        )
        raise ApiError(400, message, "chat_template", "unsupported_field")
    args = state.args
    variables = dict(args.default_chat_template_kwargs or {})
    if isinstance(body, ChatCompletionRequest):
        own = {
            "reasoning_effort": body.effort,
            "documents": body.documents,
            "verbosity": body.verbosity,
        }
        variables |= {name: value for name, value in own.items() if value}
        if body.effort == "none":
            # Templates of models that may think call it so.
            variables |= {"enable_thinking": False, "thinking": False}
    (only,) = written_conversations(
        body.messages,
        state.tokenizer,
        chat_template=body.chat_template or state.chat_template,
        add_generation_prompt=_begins_answer(body),
        continue_final_message=bool(body.continue_final_message),
        tools=None if parts is None else parts.template_tools,
        chat_template_kwargs=variables | (body.chat_template_kwargs or {}),
        content_format=args.chat_template_content_format,
        tool_prompt=None if parts is None else parts.tool_prompt,
        **picture_options(state.engine.input_processor),
    )
    return only


def _begins_answer(body: ChatCompletionRequest | TokenizeRequest | PoolingFields) -> bool:
    """Whether the prompt ends with the beginning of an answer; otherwise the last message goes on."""
    if body.add_generation_prompt is None:
        # An answer is asked for unless the body says otherwise, as in LLM.chat; a text that is pooled needs none.
        return not (isinstance(body, PoolingFields) and body.continue_final_message)
    return body.add_generation_prompt


def _planned(body: ChatCompletionRequest, state: ServerState, parts_reasoning: bool) -> AnswerPlan:
    """The plan of the answers; errors as of AnswerPlan."""
    args, template = state.args, body.chat_template
    return AnswerPlan(
        body,
        state.tokenizer,
        state.answer_format(template),
        state.template_text(template),
        tells_tools=args.tool_prompt == "generic",
        hides_tools=args.exclude_tools_when_tool_choice_none,
        parts_reasoning=parts_reasoning,
    )


class ChatReply(Reply):
    """See `Reply`."""

    def __init__(
        self, body: ChatCompletionRequest, state: ServerState, answer_id: str, parts_reasoning: bool = False
    ) -> None:
        """`parts_reasoning`: also without --reasoning-parser, where the template has its marks."""
        super().__init__(body, state, answer_id, {**answer_frame(state, answer_id), "object": "chat.completion.chunk"})
        if not body.messages:
            raise ApiError(400, f"messages {NOT_A_CONVERSATION}", "messages", "invalid_value")
        self._max_tokens_field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        max_tokens = getattr(body, self._max_tokens_field)
        if not all(isinstance(each, dict) for each in body.documents or ()):
            raise wrong_type("documents", body.documents, "a list of objects")
        self._parts = _planned(body, state, parts_reasoning)
        self._parsers: dict[int, AnswerParser] = {}
        self._positions: dict[int, PositionParts] = {}
        self._opening = ""  # what the prompt has of the answer
        if body.top_logprobs and not body.logprobs:
            message = f"top_logprobs={body.top_logprobs} needs logprobs=true"
            raise ApiError(400, message, "top_logprobs", "invalid_value")
        self._num_topk = body.num_topk
        last_role = body.messages[-1].get("role")
        self._role = state.args.response_role if _begins_answer(body) else last_role
        self._is_echoed = bool(body.echo) and last_role == self._role
        self._echo = ""
        self._begun: set[int] = set()  # choices of a stream
        shows_topk = max_tokens == 0 and self._num_topk is not None
        self._writer = ChoiceWriter.of(body, state, shows_topk)
        self._plan = self._writer.plan
        self._own_names = {**_OWN_NAMES, "max_tokens": self._max_tokens_field}
        with named_as(self._own_names):
            self._params = sampling_params(
                body, state, self._plan, max_tokens=max_tokens, logprobs=self._num_topk, **self._bound_fields()
            )

    async def prompt(self) -> dict[str, Any]:
        """The prompt as the engine takes it; errors as of `render_conversations`."""
        prompt, written, _ = await asyncio.to_thread(self._rendered)
        (prompt,) = with_picture_options(
            self._state, [await _with_pictures(self._state, prompt, written)], self._body.mm_processor_kwargs
        )
        return prompt

    def _written(self) -> Written:
        own = _written(self._state, self._body, self._parts)
        if own.writer.hides_tools and self._parts.choice.mode != "none":
            self.log.note = "the chat template ignores tools"
            warn_once(logger, TOOLS_IGNORED)
        return own

    def _bound_fields(self) -> dict[str, Any]:
        """Fields of SamplingParams that tools and reasoning decide."""
        given = self._body.form(self._body.structured_outputs)
        body = self._body
        # OpenAI's forms are of the text.
        may_be_arguments = bool(body.structured_outputs) or any(getattr(body, name) is not None for name in GUIDED)
        fields = {"structured_outputs": self._parts.structured_outputs(given, may_be_arguments)}
        skips = self._parts.skip_special_tokens
        return fields if skips is None else {**fields, "skip_special_tokens": skips}

    async def prepare(self) -> PreparedPrompts:
        # In a thread: templates and their library may be slow.
        with named_as({"messages": "chat_template"} if self._body.chat_template else {}):
            prompt, written, self._opening = await asyncio.to_thread(self._rendered)
            prompt = await _with_pictures(self._state, prompt, written)
        params = self._params
        params.structured_outputs = self._parts.after_reasoning(params.structured_outputs, self._opening)
        if self._is_echoed:
            self._echo = normal_messages(self._body.messages[-1:])[0]["content"]
        with named_as(self._own_names), self._parts.named_schemas():
            prompts, all_params = await prepare_prompts(
                self._state,
                self._body,
                self._id,
                [prompt],
                self._params,
                add_special_tokens=bool(self._body.add_special_tokens),
                prompt_field="messages",
                max_tokens_field=self._max_tokens_field,
            )
        # Stop strings are looked for in what readers see of the answer.
        content_of = self._parts.content_of(self._opening)
        return [replace(each, content_of=content_of) for each in prompts], all_params

    def _rendered(self) -> tuple[dict[str, Any], Written, str]:
        """The prompt, without pictures, and what it has of the answer."""
        own = self._written()
        reasoning = self._parts.format.reasoning
        opening = "" if reasoning is None else own.opening((*reasoning.begins, *reasoning.ends))
        return _as_prompt(self._state, self._body, own), own, opening

    async def whole(self, outputs: list[RequestOutput], usage: UsageCount) -> dict[str, Any]:
        (output,) = outputs
        return {
            **self.head(),
            "choices": await self.choices(output),
            **usage.last_fields(),
            # Clients look for the field whether they asked for it or not.
            "prompt_logprobs": None,
            **await self.prompt_fields(output),
        }

    def head(self) -> dict[str, Any]:
        """Fields of a whole answer beside its choices and usage."""
        return {**self._frame, "object": "chat.completion", "labels": self._plan.label_entries}

    async def choices(self, output: RequestOutput) -> list[dict[str, Any]]:
        """The choices of a whole answer."""
        choices = []
        for completion in output.outputs:
            message = {"role": self._role, **_EMPTY_FIELDS, **self._message(completion)}
            choices.append({"message": message, **await self.choice_fields(completion, is_first=True)})
        return choices

    def _message(self, completion: CompletionOutput) -> dict[str, Any]:
        """The parts of a whole answer's message."""
        answer = collect(self.parsed(completion))
        fields: dict[str, Any] = {"content": self._echo + (answer.content or "")}
        if answer.content is None and (answer.calls or answer.reasoning):
            fields["content"] = self._echo or None
        if (answer.reasoning or self._parts.format.reasoning is not None) and self._body.include_reasoning is not False:
            fields |= {"reasoning": answer.reasoning, "reasoning_content": answer.reasoning}
        calls = [whole_call(each) for each in answer.calls]
        if calls and self._parts.is_older:
            fields["function_call"] = calls[0]["function"]
        elif calls:
            fields["tool_calls"] = calls
        return fields

    def parsed(self, completion: CompletionOutput) -> list[Event]:
        """The events that `completion` adds to its choice."""
        index = completion.index
        if index not in self._parsers:
            parser = self._parts.parser(self._opening)
            if parser is None:
                return [Content(completion.text)] if completion.text else []
            self._parsers[index] = parser
        events = self._parsers[index].feed(completion.text, completion.token_ids)
        if completion.finish_reason is not None:
            events += self._parsers[index].finish()
        return events

    def finish_reason(self, completion: CompletionOutput) -> str | None:
        """Why the choice has ended; None: it has not."""
        parser = self._parsers.get(completion.index)
        if completion.finish_reason != "stop" or parser is None or not parser.num_calls:
            return completion.finish_reason
        return "function_call" if self._parts.is_older else "tool_calls"

    async def logprobs(self, completion: CompletionOutput) -> dict[str, Any] | None:
        """Chat's `logprobs` of what `completion` adds; None: they are not asked for."""
        readings, ids = completion.logprobs, self._plan.engine_ids
        if self._num_topk is None and not ids:
            return None
        content: list[dict[str, Any]] = []
        if readings is not None and readings.has_sampled:
            content = await chat_logprobs(readings, self._writer.names, self._num_topk or 0, ids)
        return {"content": content, "refusal": None}

    async def prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        """The prompt's ids and logprobs, as far as requested."""
        return await self._writer.prompt_fields(output)

    async def pieces(self, index: int, output: RequestOutput) -> AsyncIterator[dict[str, Any]]:
        for completion in output.outputs:
            once: dict[str, Any] = {}
            if not self._begun:
                once = {"labels": self._plan.label_entries} if self._plan.labels else {}
                once.update(await self._writer.prompt_fields(output))
            is_first = completion.index not in self._begun
            self._begun.add(completion.index)
            role = {"role": self._role} if is_first else {}
            if is_first and self._echo:
                # By itself: logprobs are of the text beside them.
                delta = {**role, "content": self._echo}
                choice = {"index": completion.index, "delta": delta, "logprobs": None, "finish_reason": None}
                yield {"choices": [choice], **once}
                role, once = {}, {}
            *before, last = self._deltas(completion)
            for delta in before:
                choice = {
                    "index": completion.index,
                    "delta": {**role, **delta},
                    "logprobs": None,
                    "finish_reason": None,
                }
                yield {"choices": [choice], **once}
                role, once = {}, {}
            choice = {"delta": {**role, **last}, **await self.choice_fields(completion, is_first)}
            yield {"choices": [choice], **once}

    def _deltas(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        """The deltas of a stream for what `completion` adds: one or more, of which the last may be empty."""
        events = self.parsed(completion)
        if completion.index not in self._parsers:
            return [{"content": completion.text}]
        shows = self._body.include_reasoning is not False
        deltas = [delta for each in events if (delta := delta_fields(each, shows)) is not None]
        if self._parts.is_older:
            deltas = [_older_delta(each) for each in deltas]
        return deltas or [{}]

    async def choice_fields(self, completion: CompletionOutput, is_first: bool) -> dict[str, Any]:
        """Fields beside the text, for what `completion` adds to the choice."""
        logprobs = await self.logprobs(completion)
        fields = await self._writer.fields(completion, is_first)
        self._write_parts(completion, logprobs, fields)
        reason = self.finish_reason(completion)
        return {"index": completion.index, "logprobs": logprobs, **fields, "finish_reason": reason}

    def _write_parts(
        self, completion: CompletionOutput, logprobs: dict[str, Any] | None, fields: dict[str, Any]
    ) -> None:
        """Write into the positions that are read which part of the answer they belong to."""
        parser, tokenizer = self._parsers.get(completion.index), self._state.engine.input_processor.tokenizer
        lists = {"logprobs": logprobs["content"]} if logprobs is not None else {}
        lists |= {"readings": fields["readings"]} if "readings" in fields else {}
        if parser is None or tokenizer is None or not lists or self._parts.format.asks_tokenizer:
            return
        if completion.index not in self._positions:
            skips = self._params.skip_special_tokens
            spaces = self._params.spaces_between_special_tokens
            self._positions[completion.index] = PositionParts(parser, TokenPieces(tokenizer, 0, skips, spaces))
        self._positions[completion.index].write(completion, lists)


def _older_delta(delta: dict[str, Any]) -> dict[str, Any]:
    """A call as `functions` have it."""
    if "tool_calls" not in delta:
        return delta
    (call,) = delta["tool_calls"]
    return {"function_call": call["function"]}
