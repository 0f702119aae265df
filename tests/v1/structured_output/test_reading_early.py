"""A process reads the tokenizer for grammars once, and a server's processes before a request needs it."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.structured_output import matcher

pytest.importorskip("llguidance")

FORM = SamplingParams(temperature=0, max_tokens=5, structured_outputs={"choice": ["a", "b"]})


class Extension:
    """An extension of a worker."""

    def num_grammars(self) -> int:
        """Tokenizers that the process has read."""
        return matcher._grammars.cache_info().currsize


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path)


def test_a_tokenizer_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    make = matcher.Grammars

    def slow(*arguments: Any) -> Any:
        made.append(arguments)
        time.sleep(0.05)  # the others come meanwhile
        return make(*arguments)

    llm = make_tiny_llm(folder)
    monkeypatch.setattr(matcher, "Grammars", slow)
    monkeypatch.setattr(matcher, "get_tokenizer", lambda *_, **__: pytest.fail("the engine has it"))
    config = llm.llm_engine.model_config
    matcher.read_early(config)
    readers = [threading.Thread(target=matcher.grammars_of, args=(config,)) for _ in range(3)]
    for each in readers:
        each.start()
    assert llm.generate(["x"], FORM, use_tqdm=False)[0].outputs[0].text in ("a", "b")
    for each in readers:
        each.join()
    assert len(made) == 1


def test_what_cannot_be_read_is_said_to_those_that_ask(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_tiny_llm(folder).llm_engine.model_config

    def refuse(*arguments: Any) -> Any:
        raise matcher._unusable("for a test")

    monkeypatch.setattr(matcher, "Grammars", refuse)
    matcher._read(config)
    with pytest.raises(ValueError, match="for a test"):
        matcher.grammars_of(config)


def test_a_servers_processes_read_early(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))  # of the engine's process
    before = matcher._grammars.cache_info().misses
    arguments = AsyncEngineArgs(model=str(folder), worker_extension_cls="test_reading_early.Extension")

    async def run() -> None:
        engine = AsyncLLM.from_engine_args(arguments)
        try:
            deadline = time.monotonic() + 60
            while await engine.collective_rpc("num_grammars") != [1] or matcher._grammars.cache_info().misses == before:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            outputs = [each async for each in engine.generate("x", FORM, "a")]
            assert outputs[-1].outputs[0].text in ("a", "b")
        finally:
            engine.shutdown()

    asyncio.run(run())
