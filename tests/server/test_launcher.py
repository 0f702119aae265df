"""`vllm serve` as a process: how it starts, drains, stops and dies."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from live_server import LiveServer
from processes import descendants, is_running

from vllm.server import launcher
from vllm.server.app import build_app
from vllm.server.server_args import ServerArgs
from vllm.server.state import ServerState
from vllm.utils.device import usable_cores

SLOW = ("--logits-processors", "slow_processor:SlowProcessor")
SLOW_ENV = {"PYTHONPATH": str(Path(__file__).parent)}
PROMPT = {"model": "tiny", "prompt": "a", "ignore_eos": True, "temperature": 0}
NUM_TOKENS = 250


@contextmanager
def servers(
    folder: Path, *flags: list[str], env: dict[str, str] | None = None, **options: Any
) -> Iterator[list[LiveServer]]:
    """One slow server for each list of flags, started side by side; `options` of LiveServer."""
    env = {**SLOW_ENV, **(env or {})}
    with ExitStack() as stack:
        started = [
            stack.enter_context(LiveServer(folder, *SLOW, *each, env=env, wait=False, **options)) for each in flags
        ]
        for server in started:
            server.wait_until_ready()
        yield started


class InFlight:
    """A stream and a plain request that a server has begun to answer, in threads of their own."""

    def __init__(self, server: LiveServer, max_tokens: int = NUM_TOKENS) -> None:
        self.events: list[dict[str, Any] | str] = []
        self.answer: httpx.Response | None = None
        self._url, self._max_tokens = f"{server.url}/v1/completions", max_tokens
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._stream, self._ask)]
        for thread in self._threads:
            thread.start()
        wait_for(lambda: self.events and httpx.get(f"{server.url}/load").json()["server_load"] == 2)

    def join(self) -> None:
        """Wait for the ends of both."""
        for thread in self._threads:
            thread.join(30)
            assert not thread.is_alive()

    @property
    def num_tokens(self) -> int:
        """The stream's tokens, without its usage, error or end."""
        return sum(isinstance(event, dict) and bool(event.get("choices")) for event in self.events)

    def _ask(self) -> None:
        self.answer = httpx.post(self._url, json={**PROMPT, "max_tokens": self._max_tokens}, timeout=60)

    def _stream(self) -> None:
        body = {**PROMPT, "max_tokens": self._max_tokens, "stream": True}
        with httpx.stream("POST", self._url, json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if data := line.removeprefix("data: "):
                    self.events.append(data if data == "[DONE]" else json.loads(data))


def wait_for(condition: Any, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def assert_cut_short(in_flight: InFlight, code: str) -> None:
    """Each request was told once, in the shape of all errors."""
    in_flight.join()
    assert in_flight.answer is not None
    assert in_flight.answer.status_code == 503
    error = in_flight.answer.json()["error"]
    assert error["code"] == code and int(in_flight.answer.headers["retry-after"]) > 0
    *chunks, last, done = in_flight.events
    assert chunks and all("error" not in chunk for chunk in chunks)
    assert isinstance(last, dict) and last["error"] == error
    assert done == "[DONE]"


def assert_gone(server: LiveServer, cores: list[int]) -> None:
    wait_for(lambda: not any(is_running(pid) for pid in cores))
    wait_for(lambda: refuses(server))


def refuses(server: LiveServer) -> bool:
    """Whether nothing listens any more. A connection made just before that is reset, or closed without an answer."""
    try:
        httpx.get(f"{server.url}/health")
    except (httpx.NetworkError, httpx.RemoteProtocolError) as error:
        return isinstance(error, httpx.ConnectError)
    return False


def test_sigterm_lets_requests_finish(folder):
    """Requests in flight go on to their end; new ones are sent away; health says so."""
    two = ["--data-parallel-size", "2"] if usable_cores() > 1 else []
    with servers(folder, ["--access-log-format", "json", *two], ["--shutdown-timeout", "0.3"]) as (patient, hasty):
        assert_drains(patient, 2 if two else 1)
        # As long as there is time.
        cores = hasty.core_pids
        in_flight = InFlight(hasty)
        assert hasty.stop(signal.SIGTERM, timeout=10) == 0
        assert_cut_short(in_flight, "shutting_down")
        assert_gone(hasty, cores)
        assert "Traceback" not in hasty.log()


def assert_drains(server: LiveServer, num_replicas: int) -> None:
    cores = server.core_pids
    assert len(cores) == num_replicas
    in_flight = InFlight(server, max_tokens=100)
    with httpx.Client(base_url=server.url) as client:
        assert client.get("/health").status_code == 200
        server.process.terminate()
        wait_for(lambda: client.get("/health").status_code == 503)
        late = client.post("/v1/completions", json=PROMPT)
        assert late.status_code == 503 and int(late.headers["retry-after"]) > 0
        assert late.json()["error"]["code"] == "shutting_down"
        assert client.get("/v1/models").status_code == 200
        assert server.process.poll() is None
    in_flight.join()
    assert in_flight.num_tokens == 100
    assert in_flight.answer.json()["usage"]["completion_tokens"] == 100
    assert server.process.wait(20) == 0
    assert_gone(server, cores)
    lines = [json.loads(line) for line in server.access_log().splitlines()]
    work = [(line["status"], line["completion_tokens"]) for line in lines if line["path"] == "/v1/completions"]
    assert sorted(work, key=str) == [(200, 100), (200, 100), (503, None)]
    assert "/health" not in server.access_log()
    (ready,) = [line for line in server.log().splitlines() if "ready" in line]
    assert server.url in ready and "serves tiny;" in ready and f"page to try it is at {server.url}/" in ready


def test_signals_to_the_group_are_the_servers(folder):
    """A terminal's Ctrl-C and a service manager's SIGTERM go to the engine's and the workers' processes, too."""
    two = ["--tensor-parallel-size", "2"] if usable_cores() > 1 else []
    with servers(folder, [], two, group=True) as started:
        for server, signum in zip(started, (signal.SIGINT, signal.SIGTERM), strict=True):
            processes = descendants(server.process.pid)
            in_flight = InFlight(server, max_tokens=60)
            os.killpg(server.process.pid, signum)
            in_flight.join()
            assert in_flight.num_tokens == 60 and in_flight.events[-1] == "[DONE]"
            assert in_flight.answer.json()["usage"]["completion_tokens"] == 60
            assert server.process.wait(20) == 0
            assert_gone(server, processes)
            assert len(processes) == (2 if signum == signal.SIGTERM and two else 1)


def test_a_signal_that_is_sent_twice_is_one(folder):
    """`timeout` sends it to its child, and then to the group."""
    with servers(folder, [], [], group=True) as (busy, idle):
        for server in (busy, idle):
            cores = server.core_pids
            in_flight = InFlight(server, max_tokens=60) if server is busy else None
            server.process.terminate()
            os.killpg(server.process.pid, signal.SIGTERM)
            if in_flight is not None:
                in_flight.join()
                assert in_flight.num_tokens == 60 and in_flight.events[-1] == "[DONE]"
            assert server.process.wait(20) == 0
            assert_gone(server, cores)


def test_a_second_signal_stops_at_once(folder, tmp_path):
    with servers(folder, [], [], [], env={"TMPDIR": str(tmp_path)}, group=True) as (interrupted, hurried, hung):
        both = ((signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGTERM))
        for server, signals in zip((interrupted, hurried), both, strict=True):
            cores = server.core_pids
            in_flight = InFlight(server)
            os.killpg(server.process.pid, signals[0])
            for each in signals[1:]:
                wait_for(lambda server=server: "no new requests" in server.log())
                os.killpg(server.process.pid, each)
            assert server.process.wait(20) == 128 + signals[-1]
            assert_cut_short(in_flight, "shutting_down")
            assert_gone(server, cores)
            assert "Traceback" not in server.log()
        assert len(list(tmp_path.glob("vllm-*"))) == 1
        assert_does_not_wait_for_its_engine(hung)
        assert not list(tmp_path.glob("vllm-*"))


def assert_does_not_wait_for_its_engine(server: LiveServer) -> None:
    (core,) = server.core_pids
    in_flight = InFlight(server)
    os.kill(core, signal.SIGSTOP)
    server.process.send_signal(signal.SIGTERM)
    server.process.send_signal(signal.SIGINT)
    assert_cut_short(in_flight, "shutting_down")
    assert_gone(server, [])
    assert server.stop(signal.SIGINT, timeout=3) == 130
    wait_for(lambda: not is_running(core))


def test_when_the_engine_dies_so_does_the_server(folder):
    with servers(folder, [], []) as (busy, idle):
        (core,) = busy.core_pids
        in_flight = InFlight(busy)
        os.kill(core, signal.SIGKILL)
        assert busy.process.wait(10) == 1
        assert_cut_short(in_flight, "engine_dead")
        os.kill(idle.core_pids[0], signal.SIGKILL)
        assert idle.process.wait(10) == 1
        for server in (busy, idle):
            assert_gone(server, [])
            (cause,) = [line for line in server.log().splitlines() if line.startswith("ERROR")]
            assert "the engine died" in cause and "signal 9" in cause
            assert "Traceback" not in server.log()


def test_a_web_server_that_ends_by_itself_is_a_fault(monkeypatch, vllm_log):
    """No signal has come, and the engine lives. What runs it again must learn that this was no orderly end."""

    async def wait_dead() -> None:
        await asyncio.Event().wait()

    engine = SimpleNamespace(core_pids=[], wait_dead=wait_dead, errored=False)
    app = build_app(ServerState(engine, ServerArgs(served_model_name=["tiny"])))
    ready: list[str] = []

    class EndsByItself(launcher._Server):
        async def startup(self, sockets=None):
            await super().startup(sockets)
            ready.append("ready")
            self.should_exit = True

    monkeypatch.setattr(launcher, "_Server", EndsByItself)
    try:
        with launcher.bind("127.0.0.1", 0) as listener:
            code = asyncio.run(launcher.serve_app(app, listener))
    finally:
        gc.unfreeze()
    assert ready and code == 1
    (line,) = [record.getMessage() for record in vllm_log.records if record.levelname == "ERROR"]
    assert "the web server ended by itself" in line
    assert "SIGTERM" not in vllm_log.text


def test_what_ended_the_engines_answers_is_raised():
    """The engine lives, but nothing takes its answers any more: the error says why, and no signal is looked for."""

    async def wait_dead() -> None:
        raise KeyError("weight_version")

    engine = SimpleNamespace(core_pids=[], wait_dead=wait_dead, errored=False, num_unfinished_requests=0)
    app = build_app(ServerState(engine, ServerArgs(served_model_name=["tiny"])))
    try:
        with launcher.bind("127.0.0.1", 0) as listener, pytest.raises(KeyError, match="weight_version"):
            asyncio.run(launcher.serve_app(app, listener))
    finally:
        gc.unfreeze()


def test_no_engine_outlives_its_server(folder):
    """Whether that is killed without a word, or told to go before it was ready."""
    with servers(folder, []) as (killed,):
        cores = killed.core_pids
        assert killed.stop(signal.SIGKILL) == -signal.SIGKILL
        assert_gone(killed, cores)
    for signum in (signal.SIGTERM, signal.SIGINT):
        with LiveServer(folder, wait=False) as server:
            wait_for(lambda server=server: server.core_pids)
            cores = server.core_pids
            assert server.stop(signum) == 128 + signum
            wait_for(lambda cores=cores: not any(is_running(pid) for pid in cores))
            assert "ready" not in server.log()
