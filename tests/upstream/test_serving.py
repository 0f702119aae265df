"""The endpoints as objects, as Ray Serve and others call them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

import httpx
import pytest
from starlette.datastructures import State
from starlette.requests import Request
from tiny_adapters import make_adapter
from transformers import AutoModelForCausalLM

from vllm import AsyncEngineArgs, AsyncLLM
from vllm.entrypoints.launchers.cli_args import FrontendArgs
from vllm.entrypoints.openai.api_server import build_app, init_app_state
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionResponse
from vllm.entrypoints.openai.completion.protocol import CompletionRequest, CompletionResponse
from vllm.entrypoints.pooling.embed.protocol import EmbeddingChatRequest, EmbeddingCompletionRequest, EmbeddingResponse
from vllm.entrypoints.pooling.scoring.protocol import ScoreResponse, ScoreTextRequest
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.entrypoints.serve.lora.protocol import LoadLoRAAdapterRequest
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest, TranscriptionResponse
from vllm.exceptions import VLLMClientError
from vllm.upstream.serving import _MODULES, _endpoint

CHAT = [{"role": "user", "content": "the stop"}]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def serve(folder, work, frontend=None, **options):
    """The result of `work(state, app)` over an engine, made as Ray Serve makes it."""
    args = AsyncEngineArgs(str(folder), served_model_name=["tiny"], dtype="float32", max_model_len=128, **options)
    fields = vars(FrontendArgs(chat_template=TEMPLATE, **(frontend or {}))) | vars(args)

    async def run():
        config = args.create_engine_config()
        engine = AsyncLLM(config, log_requests=args.enable_log_requests, log_stats=not args.disable_log_stats)
        try:
            state = State()
            await init_app_state(engine, state=state, args=fields, supported_tasks=await engine.get_supported_tasks())
            app = build_app(fields, supported_tasks=None, model_config=engine.model_config)
            app.state._state.update(state._state)
            app.state.server = object()
            return await work(state, app)
        finally:
            engine.shutdown()

    return asyncio.run(run())


async def events_of(stream):
    assert isinstance(stream, AsyncGenerator)
    return [event async for event in stream]


def raw_request(**headers):
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": pairs, "query_string": b""})


def test_each_object_has_its_endpoint():
    assert all(callable(_endpoint(path)) for path in _MODULES)


def test_a_generating_model(folder, tmp_path):
    adapter = make_adapter(tmp_path / "adapter", AutoModelForCausalLM.from_pretrained(folder))

    async def work(state, app):
        chat, completion = state.openai_serving_chat, state.openai_serving_completion
        body = {"model": "tiny", "messages": CHAT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        asked = ChatCompletionRequest(**body, logprobs=True, top_logprobs=1, logprob_token_ids=[5, 6])
        whole = await chat.create_chat_completion(asked, raw_request(x_request_id="mine"))
        assert isinstance(whole, ChatCompletionResponse) and whole.id == "chatcmpl-mine"
        entry = whole.choices[0].logprobs["content"][0]
        assert [each["token_id"] for each in entry["top_logprobs"][1:]] == [5, 6]
        dumped = whole.model_dump()
        assert ChatCompletionResponse(**dumped).model_dump() == dumped and whole.usage.completion_tokens == 4
        events = await events_of(
            await chat.create_chat_completion(ChatCompletionRequest(**body, stream=True), raw_request())
        )
        assert all(event.startswith("data: ") and event.endswith("\n\n") for event in events)
        assert events[-1] == "data: [DONE]\n\n"
        told = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
        text = "".join(each["choices"][0]["delta"].get("content") or "" for each in told if each["choices"])
        assert text == whole.choices[0].message.content

        # A field that asks for something unknown passes the model, and is refused by the endpoint.
        unknown = CompletionRequest.model_validate({"prompt": "the", "no_such_field": 1})
        refused = await completion.create_completion(unknown)
        assert isinstance(refused, ErrorResponse) and refused.error.code == 400
        assert "no_such_field" in refused.error.message and refused.model_dump()["error"]["type"]
        other = await completion.create_completion(CompletionRequest(model="another", prompt="the"))
        assert (other.error.code, other.error.param) == (404, "model")
        form = {"structured_outputs": {"choice": ["stop", "the"]}, "choice_readings": True}
        found = await completion.create_completion({"prompt": "the", "max_tokens": 8, "temperature": 0, **form})
        assert isinstance(found, CompletionResponse) and found.choices[0].text in ("stop", "the")
        assert len(found.model_dump()["choices"][0]["choice_readings"]) == 2

        # A stream that is left early frees its request.
        stream = await completion.create_completion(
            {"prompt": "the", "max_tokens": 100, "stream": True, "ignore_eos": True}
        )
        await anext(stream)
        await stream.aclose()
        assert state.engine_client.num_unfinished_requests == 0

        tokenization = state.openai_serving_tokenization
        tokens = await tokenization.create_tokenize(TokenizeCompletionRequest(prompt="the stop"), raw_request())
        assert tokens.count == len(tokens.tokens) and tokens.max_model_len == 128
        chat_tokens = await tokenization.create_tokenize(TokenizeChatRequest(messages=CHAT))
        assert chat_tokens.tokens == tokens.tokens
        assert (await tokenization.create_detokenize(DetokenizeRequest(tokens=tokens.tokens))).prompt == "the stop"
        models = state.openai_serving_models
        assert models.lora_requests == {}
        asked = LoadLoRAAdapterRequest(lora_name="tiny:mine", lora_path=str(adapter))
        assert isinstance(await models.load_lora_adapter(request=asked), str)
        assert [each.id for each in (await models.show_available_models()).data] == ["tiny", "tiny:mine"]
        again = await models.load_lora_adapter(request=asked)
        assert isinstance(again, ErrorResponse) and "loaded already" in again.error.message
        adapted = await chat.create_chat_completion(ChatCompletionRequest(**{**body, "model": "tiny:mine"}))
        assert adapted.model == "tiny:mine"
        # Its HTTP routes have the same adapters, and their middleware the same state.
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://host") as client:
            answer = await client.post("/v1/chat/completions", json={**body, "model": "tiny:mine"})
            assert answer.json()["choices"][0]["message"] == adapted.model_dump()["choices"][0]["message"]
            counted = (await client.get("/metrics")).text
        assert "http_requests_total{" in counted and "/v1/chat/completions" in counted
        assert state.serving_embedding is state.serving_classification is state.openai_serving_transcription is None

    serve(folder, work, enable_lora=True)


def test_a_pooling_model(folder):
    async def work(state, app):
        embed = state.serving_embedding
        response = await embed(
            EmbeddingCompletionRequest(model="tiny", input=["the", "stop"]), raw_request=raw_request()
        )
        found = EmbeddingResponse(**json.loads(response.body))
        assert [len(each.embedding) for each in found.data] == [len(found.data[0].embedding)] * 2
        chat = await embed(EmbeddingChatRequest(messages=[{"role": "user", "content": "the"}]), None)
        assert EmbeddingResponse(**json.loads(chat.body)).data[0].embedding == pytest.approx(found.data[0].embedding)
        pairs = await state.serving_scores(ScoreTextRequest(text_1="the", text_2=["the", "stop"]), raw_request=None)
        assert ScoreResponse(**json.loads(pairs.body)).data[0].score == pytest.approx(1)
        with pytest.raises(VLLMClientError, match="dimensions") as refused:
            await embed(EmbeddingCompletionRequest(input="the", dimensions=10**6))
        error = embed.create_error_response(refused.value).error
        assert (error.code, error.param) == (400, "dimensions") and ErrorInfo(**error.model_dump()) == error
        assert state.openai_serving_chat is state.openai_serving_completion is None

    serve(folder, work, runner="pooling", convert="embed")


def test_errors_of_callers_own_words(folder):
    async def work(state, app):
        make = state.openai_serving_models.create_error_response
        assert make("no such thing", "NotFoundError", 404).error.model_dump() == {
            "message": "no such thing", "type": "NotFoundError", "param": None, "code": 404,
        }  # fmt: skip
        assert make(ValueError("too long")).error.message == "too long"
        assert make(RuntimeError("secret")).error.message == "internal error: RuntimeError"

    serve(folder, work)


def test_bodies_that_models_here_do_not_answer():
    assert TranscriptionResponse(text="said").model_dump() == {"text": "said"}
    assert {"file", "model", "stream"} <= set(TranscriptionRequest.model_fields)
    with pytest.raises(ValueError, match="messages"):
        TokenizeChatRequest.model_validate({"prompt": "the"})
