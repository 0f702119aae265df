"""A client that leaves frees its request at once, wherever the request is.

Steps are counted, not timed: the engine gets permits for a few, by far not for all that the request would need, and
would wait for ever before the next one.
"""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from byte_tokenizer import byte_ids
from forced_tokens import ForcedTokens
from gated_steps import Gate
from real_sockets import RawClient, SocketServer, listening

from vllm.server.app import build_app

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
FEW = 100
"""More steps than may begin before the engine hears that nobody waits, and fewer than a request would take."""

LONG = {"model": "tiny", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
PROMPT = {**LONG, "prompt": [5, 6, 7]}
STREAM = {**PROMPT, "stream": True}
TALK = {
    **LONG,
    "messages": [{"role": "user", "content": "a"}],
    "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
}
RESPONSE = {name: value for name, value in TALK.items() if name not in ("messages", "max_tokens")}
RESPONSE |= {"input": "a", "max_output_tokens": 200}


@pytest.fixture(scope="module")
def shared(serve, tmp_path_factory):
    """(engine with two slots, gate)"""
    gate = Gate(tmp_path_factory.mktemp("gate") / "permits")
    gate.permit(1000)
    yield serve({"max_model_len": 256, "max_num_seqs": 2, "logits_processors": [Gate.NAME, ForcedTokens]}), gate
    gate.permit(1000)


@pytest.fixture
def gate(shared):
    shared[1].withdraw()
    return shared[1]


@pytest.fixture
def run(shared):
    """Run `work(server)` against a server over the engine."""
    app = shared[0]

    async def serve(work, args):
        async with listening(app.engine, **args) as server:
            await work(server)

    return lambda work, **args: app.run(serve(work, args))


async def noticed(server: SocketServer, num_left: int = 0) -> None:
    """Wait until the server has no more than these requests, and has told the core so."""
    while len(server.state.in_flight) > num_left or server.state.engine.num_unfinished_requests > num_left:
        await asyncio.sleep(0.002)


async def reset(client: RawClient) -> None:
    client.leave_abruptly()


STREAMS = [
    (COMPLETIONS, STREAM),
    (CHAT, {**TALK, "stream": True}),
    ("/v1/responses", {**RESPONSE, "stream": True}),
    ("/v1/messages", {**TALK, "stream": True}),
]
WAYS = pytest.mark.parametrize("way", [RawClient.leave, reset, RawClient.fall_silent])


@WAYS
@pytest.mark.parametrize(("path", "body"), STREAMS)
def test_leaving_a_stream_after_its_first_chunks(run, gate, path, body, way):
    async def work(server):
        client = await RawClient.send(server.port, path, body)
        gate.permit(2)
        await client.read_events(2)
        await way(client)
        await noticed(server)
        gate.permit(FEW)
        await server.empty()

    run(work)


CALL = '<tool_call>{"name": "look", "arguments": {"at": "' + "a" * 150
TOOL = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}}
FORCED = {"vllm_xargs": {"forced": byte_ids(CALL)}, "stream": True}


@WAYS
@pytest.mark.parametrize(
    ("path", "body", "begins"),
    [
        (CHAT, {**TALK, **FORCED, "tools": [{"type": "function", "function": TOOL}]}, b'"arguments"'),
        ("/v1/responses", {**RESPONSE, **FORCED, "tools": [{"type": "function", **TOOL}]}, b"arguments.delta"),
        (
            "/v1/messages",
            {**TALK, **FORCED, "tools": [{"name": "look", "input_schema": TOOL["parameters"]}]},
            b"input_json_delta",
        ),
    ],
)
def test_leaving_in_the_middle_of_a_call(run, gate, path, body, begins, way):
    async def work(server):
        client = await RawClient.send(server.port, path, body)
        gate.permit(len(byte_ids(CALL)) - 50)
        assert await client.reads(begins), "the call has begun"
        await way(client)
        await noticed(server)
        gate.permit(FEW)
        await server.empty()

    run(work, tool_call_parser="hermes")


@WAYS
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, PROMPT),
        (COMPLETIONS, {**PROMPT, "n": 5, "seed": 1, "temperature": 1}),
        (COMPLETIONS, {**PROMPT, "best_of": 5, "n": 2, "seed": 1, "temperature": 1}),
        (COMPLETIONS, {**PROMPT, "prompt": [[5 + i] * 20 for i in range(30)], "n": 2, "seed": 1, "temperature": 1}),
        (COMPLETIONS, {**PROMPT, "prompt": [[5 + i] * 20 for i in range(30)], "stream": True}),
        (CHAT, TALK),
        ("/v1/responses", RESPONSE),
        ("/v1/messages", TALK),
        ("/generative_scoring", {"query": "a", "items": [f"item {i}" for i in range(30)], "labels": ["yes", "no"]}),
    ],
    ids=["plain", "n", "best_of", "prompts", "streamed-prompts", "chat", "responses", "messages", "scoring"],
)
def test_leaving_before_the_answer(run, gate, path, body, way):
    """With two slots, most of the larger requests' sequences wait in the queue."""

    async def work(server):
        gate.permit(2)
        client = await RawClient.send(server.port, path, body)
        await gate.used()
        await way(client)
        await noticed(server)
        gate.permit(FEW)
        await server.empty()

    run(work)


def test_leaving_while_queued_behind_others(run, gate):
    async def work(server):
        ahead = [await RawClient.send(server.port, COMPLETIONS, {**STREAM, "max_tokens": 4}) for _ in range(2)]
        gate.permit(1)
        await ahead[0].read_events(1)
        behind = [await RawClient.send(server.port, COMPLETIONS, body) for body in (PROMPT, STREAM) for _ in range(3)]
        while server.state.engine.num_unfinished_requests < 8:
            await asyncio.sleep(0.002)
        for client in behind:
            client.leave_abruptly()
        await noticed(server, num_left=2)
        gate.permit(7)  # no more than those ahead can need, should one begin when the other has ended
        for client in ahead:
            await client.read_to_end()
        await server.empty()

    run(work)


@WAYS
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_leaving_while_uploading(run, gate, caplog, share, way):
    async def work(server):
        client = await RawClient.send(server.port, COMPLETIONS, STREAM, share)
        while not server.state.in_flight:
            await asyncio.sleep(0.002)
        await way(client)
        await noticed(server)
        await server.empty()

    with caplog.at_level(logging.WARNING):
        run(work)
    assert not caplog.records, "a client that goes is nothing to warn of"


def test_leaving_while_the_prompt_is_tokenised(run, gate, monkeypatch):
    async def work(server):
        engine = server.state.engine
        tokenise, reached, go_on = engine.process_prompts, asyncio.Event(), asyncio.Event()

        async def wait(*args, **kwargs):
            reached.set()
            await go_on.wait()
            return await tokenise(*args, **kwargs)

        monkeypatch.setattr(engine, "process_prompts", wait)
        client = await RawClient.send(server.port, COMPLETIONS, STREAM)
        await reached.wait()
        await client.leave()
        await noticed(server)
        go_on.set()
        await server.empty()

    run(work)


@pytest.mark.parametrize("delay", range(12))
@pytest.mark.parametrize("body", [PROMPT, STREAM], ids=["whole", "stream"])
def test_leaving_at_any_turn_of_the_loop(run, gate, body, delay):
    """From the body's arrival on: queueing, the beginning of the answer, the first output."""

    async def work(server):
        gate.permit(1)
        client = await RawClient.send(server.port, COMPLETIONS, body)
        for _ in range(delay):
            await asyncio.sleep(0)
        client.leave_abruptly()
        await noticed(server)
        gate.permit(FEW)
        await server.empty()

    run(work)


def test_others_go_on(run, gate):
    """Whoever shares steps with a client that leaves gets the same answer as alone."""
    body = {**PROMPT, "max_tokens": 12, "return_token_ids": True}

    async def answer_of(client: RawClient) -> dict:
        return {name: value for name, value in (await client.answer()).items() if name not in ("id", "created")}

    async def work(server):
        gate.permit(12)
        alone = await answer_of(await RawClient.send(server.port, COMPLETIONS, body))
        leaver = await RawClient.send(server.port, COMPLETIONS, {**STREAM, "prompt": [9] * 40})
        gate.permit(3)
        await leaver.read_events(3)
        stayer = await RawClient.send(server.port, COMPLETIONS, body)
        while server.state.engine.num_unfinished_requests < 2:
            await asyncio.sleep(0.002)
        gate.permit(4)
        await gate.used()
        await leaver.leave()
        await noticed(server, num_left=1)
        gate.permit(12 + FEW)
        shared = await answer_of(stayer)
        assert shared["choices"] == alone["choices"] and len(shared["choices"][0]["token_ids"]) == 12
        gate.withdraw()
        await server.empty()

    run(work)


@pytest.mark.parametrize("num_sent", [0, 1, 2])
def test_leaving_while_the_connection_takes_nothing_more(run, gate, num_sent):
    """A client that does not read holds up what is sent to it, the answer's head included."""

    async def work(server):
        left = asyncio.Event()
        messages = [{"type": "http.request", "body": json.dumps(STREAM).encode(), "more_body": False}]
        sent = []

        async def receive():
            if messages:
                return messages.pop()
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message):
            if len(sent) == num_sent:
                left.set()
                await asyncio.Event().wait()
            sent.append(message)

        gate.permit(num_sent)
        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": [], "query_string": b"", "state": {}}
        await build_app(server.state)(scope, receive, send)
        assert len(sent) == num_sent
        await noticed(server)
        gate.permit(FEW)
        await server.empty()

    run(work)


def test_a_response_that_is_cancelled_ends_with_what_it_has(run, gate):
    async def work(server):
        client = await RawClient.send(server.port, "/v1/responses", {**RESPONSE, "stream": True})
        gate.permit(3)
        await client.read_events(5)
        ((name, running),) = server.state.responses.running.items()
        assert running.response["status"] == "in_progress" and running.response["output"]
        canceller = await RawClient.send(server.port, f"/v1/responses/{name}/cancel", {})
        answer = await canceller.answer()
        assert (answer["id"], answer["status"]) == (name, "cancelled")
        gate.permit(FEW)
        assert b"response.incomplete" in await client.read_rest()
        await server.empty()
        kept = server.state.responses.response(name).response
        assert kept["status"] == "cancelled" and 0 < kept["usage"]["output_tokens"] < RESPONSE["max_output_tokens"]
        assert not server.state.responses.running
        await canceller.leave()

    run(work)
