"""Ranks in Ray actors on two nodes: they compute what one process does, and none outlives another."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import ExitStack
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import Any

import pytest
import rank_faults
from models_util import random_prompts
from tiny_llm import make_tiny_llm

from vllm import LLM, SamplingParams
from vllm.exceptions import EngineDeadError
from vllm.v1.executor.worker_proc import ReadAhead

pytest.importorskip("ray", reason="Ray is not installed (pip install 'ray[data]')")

PROMPTS = [{"prompt_token_ids": prompt} for prompt in random_prompts(100, (5, 40, 2))]
PARAMS = SamplingParams(max_tokens=5, temperature=0, logprobs=2, ignore_eos=True)
_NOTICE_SECONDS = 10.0


@pytest.fixture(scope="module")
def llm(folder: Path, ray_cluster: str) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        llm = make_tiny_llm(folder, tensor_parallel_size=2, distributed_executor_backend="ray")
    yield llm
    llm.llm_engine.engine_core.shutdown()


def readings(llm: LLM) -> list[tuple[list[int], list[float]]]:
    outputs = [output.outputs[0] for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]
    return [
        (
            list(output.token_ids),
            [row[token].logprob for row, token in zip(output.logprobs, output.token_ids, strict=True)],
        )
        for output in outputs
    ]


def node(worker: Any) -> str:
    import ray

    return ray.get_runtime_context().get_node_id()


def test_two_nodes_compute_what_one_process_does(llm: LLM, folder: Path) -> None:
    first, second = llm.collective_rpc(node)
    assert first != second
    for (tokens, logprobs), (own_tokens, own) in zip(readings(make_tiny_llm(folder)), readings(llm), strict=True):
        assert tokens == own_tokens
        # float32 sums, in another order.
        assert logprobs == pytest.approx(own, abs=1e-4)


def test_no_room_is_an_error(llm: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.executor import ray_executor

    monkeypatch.setattr(ray_executor, "_ROOM_SECONDS", 0.5)
    with pytest.raises(ValueError, match=r"the cluster had no room for \{'CPU': 2.0\} and \{'CPU': 2.0\} within"):
        make_tiny_llm(folder, tensor_parallel_size=2, distributed_executor_backend="ray")


def test_a_killed_actor_ends_the_engine_and_leaves_its_room(llm: LLM, folder: Path) -> None:
    own, actor = llm.collective_rpc(rank_faults.fail_in_step, args=(2, ""))
    assert own == os.getpid() != actor
    llm.collective_rpc(rank_faults.fail_in_step, args=(1, "killed"))
    began = time.monotonic()
    with pytest.raises(EngineDeadError, match="rank 1 has gone: its actor died"):
        readings(llm)
    assert time.monotonic() - began < _NOTICE_SECONDS
    llm.llm_engine.engine_core.shutdown()

    # All CPUs of both nodes are needed again.
    again = make_tiny_llm(folder, tensor_parallel_size=2, distributed_executor_backend="ray")
    _, actor = again.collective_rpc(rank_faults.fail_in_step, args=(2, ""))
    os.kill(actor, signal.SIGKILL)
    deadline = time.monotonic() + _NOTICE_SECONDS
    with pytest.raises(EngineDeadError, match="rank 1 has gone"):
        while time.monotonic() < deadline:
            again.llm_engine.engine_core.check_health()
            time.sleep(0.05)
    again.llm_engine.engine_core.shutdown()


@pytest.fixture
def ray_executor() -> Any:
    """The module, imported as the executor would be: Ray reads some of its settings then."""
    from vllm.utils.ray_utils import import_ray_for

    import_ray_for()
    from vllm.v1.executor import ray_executor

    return ray_executor


class Actor:
    """A worker as the executor sees it before it has come."""

    def __init__(self, ending: str | None = None) -> None:
        self.connection: Connection | None = None
        self._ending = ending

    def has_ended(self) -> bool:
        return self._ending is not None

    def ending(self) -> str | None:
        return self._ending


def begin(function: Any, *args: Any, **options: Any) -> Future[Any]:
    """A call in a thread that keeps nobody waiting, should it never end."""
    future: Future[Any] = Future()

    def call() -> None:
        try:
            future.set_result(function(*args, **options))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future


def test_strangers_keep_no_worker_from_coming(ray_executor: Any) -> None:
    """Peers that say nothing, begin to, send what is no handshake, hang up, or have another key."""
    actors = {rank: Actor() for rank in (1, 2)}
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:
        address = server.getsockname()

        def stranger(words: bytes = b"") -> socket.socket:
            peer = stack.enter_context(socket.create_connection(address))
            peer.sendall(words)
            return peer

        for words in (b"", b"\0\0", b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 300):
            stranger(words)
        stranger().close()
        refused = begin(Client, address, authkey=b"another")

        def come(rank: int) -> Connection:
            connection = stack.enter_context(Client(address, authkey=b"key"))
            connection.send_bytes(str(rank).encode())
            return connection

        theirs = {rank: begin(come, rank) for rank in actors}
        assert begin(ray_executor._connect_all, actors, server, b"key").exception(5) is None
        assert isinstance(refused.exception(5), AuthenticationError)
        for rank, actor in actors.items():
            connection = stack.enter_context(actor.connection)
            connection.send_bytes(b"hello")
            assert theirs[rank].result(5).recv_bytes() == b"hello"
            # From here on it may be silent for as long as it likes.
            with socket.socket(fileno=os.dup(connection.fileno())) as end:
                assert not any(end.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16))


def test_a_message_waits_for_no_step(ray_executor: Any) -> None:
    """However long it is, and whatever the worker computes when it comes."""
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:
        executor = stack.enter_context(Client(server.getsockname()))
        worker, _ = server.accept()
        connection = stack.enter_context(Connection(worker.detach()))
        reader = ReadAhead(connection)
        assert begin(executor.send_bytes, bytes(64 << 20)).exception(20) is None
        reader.send_bytes(b"progress")
        assert executor.recv_bytes() == b"progress" and len(reader.recv_bytes()) == 64 << 20
    with pytest.raises(EOFError):
        reader.recv_bytes()


def test_a_worker_that_does_not_come_is_an_error(ray_executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_executor, "START_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        error = begin(ray_executor._connect_all, {1: Actor(), 2: Actor()}, server, b"key").exception(5)
        port = server.getsockname()[1]
    assert isinstance(error, EngineDeadError)
    assert f"rank 1, 2 did not start: no actor has connected to 127.0.0.1:{port} within 0.2 s" in str(error)


def test_no_question_starts_a_cluster(ray_executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the interpreter's exit Ray may have been left before the engine ends."""
    monkeypatch.setattr(ray_executor.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray_executor.ray, "get", None)
    worker = ray_executor.RayWorker.__new__(ray_executor.RayWorker)
    assert worker.ending() == "this process has left the Ray cluster"


def test_a_worker_that_ends_before_it_has_come_is_an_error(ray_executor: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        actors = {1: Actor(), 2: Actor("its actor died: no such module")}
        error = begin(ray_executor._connect_all, actors, server, b"key").exception(5)
    assert isinstance(error, EngineDeadError)
    assert str(error) == "tensor-parallel rank 2 has gone: its actor died: no such module"


def test_no_actor_is_left_of_a_start_that_failed(
    ray_cluster: str, folder: Path, ray_executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    started = []

    class Recorded(ray_executor.RayWorker):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            started.append(self)

    monkeypatch.setattr(ray_executor, "RayWorker", Recorded)
    monkeypatch.setattr(ray_executor, "START_SECONDS", 0.0)
    with pytest.raises(EngineDeadError, match=r"tensor-parallel rank 1 did not start: .* within 0 s"):
        make_tiny_llm(folder, tensor_parallel_size=2, distributed_executor_backend="ray")
    (worker,) = started
    assert ray.wait([worker.done], timeout=_NOTICE_SECONDS)[0]
    assert worker.ending().startswith("its actor died")
    deadline = time.monotonic() + _NOTICE_SECONDS
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
        assert time.monotonic() < deadline, "the cluster's room is not given back"
        time.sleep(0.05)


def test_a_gpu_that_ray_does_not_name_is_an_error(
    ray_cluster: str, ray_executor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster has none, so its task never runs."""
    from ray.util.placement_group import placement_group, remove_placement_group

    monkeypatch.setattr(ray_executor, "START_SECONDS", 0.1)
    bundles = placement_group([{"GPU": 1.0}])
    with pytest.raises(EngineDeadError, match=r"Ray did not say within 0.1 s which GPU it has for rank 0"):
        ray_executor._check_own_gpu(bundles)
    remove_placement_group(bundles)


def test_without_ray(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match="Ray is not installed: pip install"):
        make_tiny_llm(folder, tensor_parallel_size=2, distributed_executor_backend="ray")
