"""`vllm chat --url` and `vllm complete --url`: a server's answers, streamed."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer
from scripted_server import Request, ScriptedServer, answer, events, refusal
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import LLM
from vllm.cli import generation
from vllm.cli.main import main

TEMPLATE = "{% for message in messages %}{{ message.role[0] }}:{{ message.content }};{% endfor %}a:"
FLAGS = ["--temperature", "0", "--max-tokens", "6"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny_model(tmp_path_factory.mktemp("chat"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def tiny(model: Path) -> LLM:
    return make_tiny_llm(model)


@pytest.fixture(scope="module")
def live(model: Path) -> Iterator[LiveServer]:
    with LiveServer(model, "--max-model-len", "128") as server:
        yield server


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make stdin a terminal where these lines are typed, then Ctrl-D."""

    def typed(*lines: str) -> None:
        remaining = iter(lines)

        def read(prompt: str) -> str:
            if (line := next(remaining, None)) is None:
                raise EOFError
            return line

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True)

    return typed


class Talker:
    """Answers with `pieces`; or with `trouble`, once."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.pieces = ["Hel", "lo", "\x1b[2J"]
        self.trouble: bytes | None = None

    async def __call__(self, request: Request) -> bytes:
        if request.path == "/v1/models":
            return answer({"data": [{"id": "first"}, {"id": "second"}]})
        self.bodies.append(request.body)
        if (trouble := self.trouble) is not None:
            self.trouble = None
            return trouble
        if request.path == "/v1/completions":
            return events(*({"choices": [{"text": piece}]} for piece in self.pieces))
        deltas = [{"role": "assistant", "content": ""}, *({"content": piece} for piece in self.pieces), {}]
        return events(*({"choices": [{"delta": delta}]} for delta in deltas), {"choices": []})


@pytest.fixture
def talker() -> Talker:
    return Talker()


@pytest.fixture
def server(talker: Talker) -> Iterator[ScriptedServer]:
    with ScriptedServer(talker) as running:
        yield running


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_the_answer_is_that_of_a_model_in_this_process(
    command: str, live: LiveServer, tiny: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generation, "load_engine", lambda args: tiny.llm_engine)
    assert main([command, "-q", "the cat", *FLAGS]) == 0
    wanted = capsys.readouterr().out
    assert main([command, "-q", "the cat", *FLAGS, "--url", live.url]) == 0
    assert capsys.readouterr().out == wanted and wanted.strip()


def test_a_conversation(
    live: LiveServer, tiny: LLM, typed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generation, "load_engine", lambda args: tiny.llm_engine)
    shown = []
    for flags in ([], ["--url", live.url]):
        typed("one", "two", "/reset", "one")
        assert main(["chat", *FLAGS, "--system-prompt", "be", *flags]) == 0
        title, *rest = capsys.readouterr().out.splitlines()
        shown.append(rest)
    assert title == "chat with tiny" and shown[0] == shown[1]


def test_what_is_asked_for(
    server: ScriptedServer, talker: Talker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    flags = ["second", "--system-prompt", "be", "--chat-template", str(template), "--seed", "5", "--top-p", "0.5"]
    assert main(["chat", "-q", "hi", "--url", f"{server.url}/v1", *flags]) == 0
    assert main(["complete", "-q", "hi", "--url", server.url]) == 0
    assert capsys.readouterr().out == "Hello\x1b[2J\n" * 2  # as it is where it is no terminal
    assert talker.bodies == [
        {
            "model": "second",
            "top_p": 0.5,
            "stream": True,
            "seed": 5,
            "messages": [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}],
            "chat_template": "{{ messages }}",
        },
        {"model": "first", "max_tokens": 128, "stream": True, "prompt": "hi"},
    ]


def test_a_conversation_goes_on_after_an_error(
    server: ScriptedServer, talker: Talker, typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    talker.trouble = refusal(400, "the prompt is too long", "messages")
    typed("one", "two", "three")
    assert main(["chat", "--url", server.url]) == 0
    assert "answered 400: the prompt is too long" in capsys.readouterr().out.replace("\n", "")
    conversation = [message["content"] for message in talker.bodies[-1]["messages"]]
    assert conversation == ["two", "Hello\x1b[2J", "three"]


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_an_error_is_one_line(
    command: str, server: ScriptedServer, talker: Talker, capsys: pytest.CaptureFixture[str]
) -> None:
    for data, message in (
        (refusal(400, "too long"), "/completions answered 400: too long"),
        (events({"error": {"message": "it burst"}}), "/completions answered 500: it burst"),
    ):
        talker.trouble = data
        assert main([command, "-q", "hi", "--url", server.url]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"vllm {command}: error: http://127.0.0.1:") and error.endswith(f"{message}\n")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--url", "http://127.0.0.1:1", "--dtype", "float32"], "--dtype is for a model in this process"),
        (["--api-key", "x"], "--api-key says how to talk to a server, and needs --url"),
        (["--url", "nowhere"], "--url must be http://HOST:PORT"),
        (["--url", "http://127.0.0.1:1", "--temperature", "-1"], "temperature must be"),
    ],
)
@pytest.mark.parametrize("command", ["chat", "complete"])
def test_flags_that_do_not_go_together(
    command: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, "-q", "hi", *flags]) == 2
    assert message in capsys.readouterr().err


def test_ctrl_c_ends_the_answer_at_the_server() -> None:
    has_begun, has_left = threading.Event(), threading.Event()

    async def handle(request: Request) -> bytes:
        if request.path == "/v1/models":
            return answer({"data": [{"id": "first"}]})
        data = b'data: {"choices": [{"text": "x"}]}\n\n'
        request.writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(3000):
            if request.writer.transport.is_closing():
                has_left.set()
                break
            request.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            has_begun.set()
            await asyncio.sleep(0.01)
        return b""

    with ScriptedServer(handle) as server:
        command = [sys.executable, "-m", "vllm.cli.main", "complete", "-q", "hi", "--url", server.url]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
        assert has_begun.wait(60)
        assert process.stdout is not None and process.stdout.read(1) == b"x"
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=60)
        assert (process.returncode, error) == (130, b"vllm complete: interrupted\n")
        assert has_left.wait(30)


def test_ctrl_c_in_a_conversation_keeps_what_was_said(
    typed: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bodies: list[dict[str, Any]] = []

    async def handle(request: Request) -> bytes:
        if request.path == "/v1/models":
            return answer({"data": [{"id": "first"}]})
        bodies.append(request.body)
        if len(bodies) > 1:
            return events({"choices": [{"delta": {"content": "fine"}}]})
        data = b'data: {"choices": [{"delta": {"content": "I was say"}}]}\n\n'
        request.writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        request.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await asyncio.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(60)
        return b""

    typed("one", "two")
    with ScriptedServer(handle) as server:
        assert main(["chat", "--url", server.url]) == 0
    shown = capsys.readouterr().out
    assert "I was say [stopped]" in shown and "fine" in shown
    assert [message["content"] for message in bodies[1]["messages"]] == ["one", "I was say", "two"]
