"""The openai SDK against a live server: every refusal is the exception that the SDK has for it."""

from __future__ import annotations

import asyncio
import signal
import threading
from pathlib import Path
from typing import Any

import openai
import pytest
from live_server import LiveServer
from served import API_KEY, MODEL
from tiny_llm import make_tiny_model

MESSAGES: list[Any] = [{"role": "user", "content": "Hi"}]
LONG = {"stream": True, "max_tokens": 8000, "extra_body": {"ignore_eos": True}}


def client_of(server: LiveServer, key: str = API_KEY, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, **{"max_retries": 0, **options})


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"max_tokens": 1000}, "max_tokens", "context_length_exceeded"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"n": "2"}, "n", "invalid_type"),
        ({"suffix": "!"}, "suffix", "unsupported_field"),
        ({"extra_body": {"logprob_token_id": [1]}}, "logprob_token_id", "unknown_field"),
        ({"extra_body": {"logprob_token_ids": [10**6]}}, "logprob_token_ids", "invalid_value"),
        ({"extra_body": {"labels": ["no single token"]}}, "labels", "invalid_value"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs", "invalid_value"),
    ],
)
def test_bad_completions(live_server: LiveServer, fields: dict[str, Any], param: str, code: str) -> None:
    with client_of(live_server) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(**{"model": MODEL, "prompt": "Hi", **fields})
        assert (caught.value.param, caught.value.code, caught.value.type) == (param, code, "invalid_request_error")
        assert param in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "unsupported_field"),
        ({"response_format": {"type": "xml"}}, "response_format", "invalid_value"),
        ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        ({"logprobs": True, "top_logprobs": -2}, "top_logprobs", "invalid_value"),
        ({"max_completion_tokens": 1000}, "max_completion_tokens", "context_length_exceeded"),
        ({"messages": []}, "messages", None),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_chats(live_server: LiveServer, fields: dict[str, Any], param: str, code: str | None, stream: bool) -> None:
    with client_of(live_server) as client:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "stream": stream, **fields})
        assert caught.value.param == param
        assert code in (None, caught.value.code)


def test_no_such_model(live_server: LiveServer) -> None:
    with client_of(live_server) as client:
        for call in (
            lambda: client.completions.create(model="other", prompt="Hi"),
            lambda: client.chat.completions.create(model="other", messages=MESSAGES),
        ):
            with pytest.raises(openai.NotFoundError) as caught:
                call()
            assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def test_what_is_not_served(live_server: LiveServer) -> None:
    with client_of(live_server) as client, pytest.raises(openai.NotFoundError) as caught:
        client.files.list()
    assert caught.value.code == "not_found"
    with client_of(live_server) as client, pytest.raises(openai.BadRequestError) as refused:
        client.embeddings.create(model=MODEL, input="Hi")
    assert refused.value.code == "unsupported_task"


def test_keys(guarded_server: LiveServer) -> None:
    for key in ("another", API_KEY.upper(), API_KEY + " x"):
        with client_of(guarded_server, key) as client, pytest.raises(openai.AuthenticationError) as caught:
            client.models.list()
        assert API_KEY not in caught.value.message
    with client_of(guarded_server) as client:
        assert client.models.list().data[0].id == "tiny"


def test_a_long_body(guarded_server: LiveServer) -> None:
    with client_of(guarded_server) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            client.completions.create(model="tiny", prompt="a" * 20_000)
        assert caught.value.status_code == 413
        assert client.completions.create(model="tiny", prompt="a", max_tokens=1).usage.completion_tokens == 1


def test_a_full_queue_and_the_sdks_own_patience(guarded_server: LiveServer) -> None:
    with client_of(guarded_server) as client, client_of(guarded_server, max_retries=5) as patient:
        with client.completions.create(model="tiny", prompt="a", **LONG) as stream:
            next(iter(stream))
            with pytest.raises(openai.RateLimitError) as caught:
                client.completions.create(model="tiny", prompt="a", max_tokens=1)
            assert caught.value.code == "overloaded"
            assert int(caught.value.response.headers["retry-after"]) >= 1
            # It waits as long as it is told, and tries again; meanwhile the stream is left.
            threading.Timer(0.3, stream.response.close).start()
            answer = patient.completions.create(model="tiny", prompt="a", max_tokens=1)
        assert answer.usage.completion_tokens == 1


def test_whoever_gives_up_frees_the_server(guarded_server: LiveServer) -> None:
    # Only one sequence may be there at a time, so that each call gets in only if the one before is gone.
    body: dict[str, Any] = {"model": "tiny", "prompt": "a", "max_tokens": 8000, "extra_body": {"ignore_eos": True}}

    async def run() -> int:
        url = f"{guarded_server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=API_KEY, max_retries=5) as client:
            with pytest.raises(openai.APITimeoutError):
                await client.with_options(max_retries=0).completions.create(**body, timeout=0.3)
            task = asyncio.create_task(client.completions.create(**body))
            await asyncio.sleep(0.3)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with await client.completions.create(**body, stream=True) as stream:
                async for _ in stream:
                    break
            answer = await client.completions.create(**{**body, "max_tokens": 2})
            return answer.usage.completion_tokens

    assert asyncio.run(run()) == 2


def test_headers(live_server: LiveServer) -> None:
    with client_of(live_server) as client:
        raw = client.completions.with_raw_response.create(
            model=MODEL, prompt="Hi", max_tokens=1, extra_headers={"X-Request-Id": "my-own-7"}
        )
        assert raw.headers["x-request-id"] == "my-own-7"
        assert raw.parse().id == "cmpl-my-own-7"
        one = client.completions.create(model=MODEL, prompt="Hi", max_tokens=1)
        other = client.completions.create(model=MODEL, prompt="Hi", max_tokens=1)
        assert one._request_id and other._request_id
        assert one._request_id != other._request_id
        with pytest.raises(openai.BadRequestError) as caught:
            client.completions.create(model=MODEL, prompt="Hi", top_p=2)
        assert caught.value.request_id
        with client.completions.with_streaming_response.create(
            model=MODEL, prompt="Hi", max_tokens=2, stream=True
        ) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            assert response.headers["x-request-id"]
            assert list(response.iter_lines())[-2:] == ["data: [DONE]", ""]


def test_a_server_that_goes_away(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, max_position_embeddings=8192)
    with LiveServer(folder, env={"OMP_NUM_THREADS": "1"}) as server, client_of(server) as client:
        stream = iter(client.completions.create(model="tiny", prompt="a", **LONG))
        next(stream)
        server.process.send_signal(signal.SIGINT)  # lets requests finish; a second signal cuts them
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(openai.APIError) as caught:
            list(stream)
        assert caught.value.code == "shutting_down"
        server.process.wait(30)
        with pytest.raises(openai.APIConnectionError):
            client.models.list()
