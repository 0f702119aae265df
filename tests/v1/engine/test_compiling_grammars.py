"""Requests whose grammars are being compiled wait alone."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from tiny_llm import is_empty, make_tiny_llm, make_tiny_model

from vllm import LLM, SamplingParams
from vllm.v1.structured_output.matcher import Grammars

pytest.importorskip("llguidance")


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return make_tiny_llm(make_tiny_model(tmp_path_factory.mktemp("model")))


class SlowGrammars:
    """Compiling in another thread than the caller's waits for `go`, and then fails if `fails`."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.fails = False

    def start(self, grammars: Grammars, grammar: str) -> Any:
        if threading.current_thread() is not threading.main_thread():
            assert self.go.wait(30)
            if self.fails:
                raise ValueError("too hard")
        return START(grammars, grammar)


START = Grammars.start


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowGrammars]:
    own = SlowGrammars()
    monkeypatch.setattr(Grammars, "start", lambda grammars, grammar: own.start(grammars, grammar))
    yield own
    own.go.set()


def run(llm: LLM, until: int) -> dict[str, Any]:
    """The finished outputs by id, when there are `until`."""
    finished: dict[str, Any] = {}
    while len(finished) < until:
        finished |= {each.request_id: each for each in llm.llm_engine.step() if each.finished}
    return finished


BOUND = SamplingParams(temperature=0, max_tokens=5, structured_outputs={"choice": ["a", "b"]})
FREE = SamplingParams(temperature=0, max_tokens=5)


def test_others_go_on_meanwhile(llm: LLM, slow: SlowGrammars) -> None:
    engine = llm.llm_engine
    engine.add_request("bound", "x", BOUND)
    engine.add_request("free", "x", FREE)
    assert set(run(llm, 1)) == {"free"}
    assert engine.has_unfinished_requests() and engine.engine_core.has_request("bound")
    with pytest.raises(ValueError, match="in use"):
        engine.add_request("bound", "x", FREE)
    slow.go.set()
    assert run(llm, 1)["bound"].outputs[0].text in ("a", "b")
    assert is_empty(llm)


def test_a_waiting_request_can_be_dropped(llm: LLM, slow: SlowGrammars) -> None:
    engine = llm.llm_engine
    engine.add_request("bound", "x", BOUND)
    engine.abort_request(["bound"])
    slow.go.set()
    assert not engine.engine_core.has_unfinished_requests()
    assert is_empty(llm)


def test_one_that_cannot_be_compiled_ends_alone(llm: LLM, slow: SlowGrammars) -> None:
    engine = llm.llm_engine
    slow.fails = True
    engine.add_request("bound", "x", BOUND)
    engine.add_request("free", "x", FREE)
    slow.go.set()
    outputs = run(llm, 2)
    assert outputs["bound"].outputs[0].finish_reason == "error" and "too hard" in outputs["bound"].outputs[0].error
    assert outputs["free"].outputs[0].finish_reason == "length"
    assert is_empty(llm)
