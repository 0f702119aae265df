"""kani and vllm-judge against our server, and vllm-metrics-monitor, which watches it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from live_server import LiveServer
from tiny_llm import make_tiny_model

_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, server_environment: dict[str, str]) -> Iterator[LiveServer]:
    """A model for the judge's long prompts, of which each byte is a token."""
    folder = make_tiny_model(tmp_path_factory.mktemp("long"), max_position_embeddings=8192)
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    with LiveServer(folder, env=server_environment) as server:
        yield server


def test_kani(server: LiveServer) -> None:
    """A round of chat, and one that is streamed."""
    kani = pytest.importorskip("kani")
    from kani.engines.openai import OpenAIEngine

    options: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
    # Its own would be downloaded.
    options["tokenizer"] = SimpleNamespace(encode=str.split)
    engine = OpenAIEngine("none", "tiny", 1024, api_base=f"{server.url}/v1", api_type="chat_completions", **options)

    async def talk() -> list[str]:
        whole = (await kani.Kani(engine).chat_round("hi")).text
        stream = kani.Kani(engine).chat_round_stream("hi")
        pieces = [piece async for piece in stream]
        await engine.close()
        return [whole, "".join(pieces)]

    whole, streamed = asyncio.run(talk())
    assert whole and whole == streamed


def test_vllm_judge(server: LiveServer) -> None:
    """Its verdict is the object that the form binds the answer to; several of them vote."""
    judges = pytest.importorskip("vllm_judge")
    properties = {"decision": {"enum": ["good", "bad"]}, "reasoning": {"enum": ["short"]}, "score": {"enum": [1, 2]}}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    form = {"structured_outputs": {"json": schema}, "temperature": 0, "max_tokens": 200}

    async def judge() -> object:
        async with judges.Judge.from_url(server.url) as judge:
            return await judge.evaluate(content="hi", criteria="brevity", scale=(1, 2), sampling_params=form)

    verdict = asyncio.run(judge())
    assert verdict.decision in ("good", "bad") and verdict.reasoning == "short" and verdict.score in (1, 2)


def test_vllm_metrics_monitor(server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It collects the figures that the server counts; its page itself would listen to everybody."""
    collector = pytest.importorskip("vllm_metrics_monitor.collector")
    monkeypatch.setattr(collector, "metrics_urls", [f"{server.url}/metrics"])
    monkeypatch.setattr(collector, "db_path", str(tmp_path / "db"))
    collector.init_db()
    (source,) = collector.sources
    before = collector.collect_metrics(source["id"])
    body = {"model": "tiny", "prompt": [70] * 20, "max_tokens": 4, "ignore_eos": True}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
    after = collector.collect_metrics(source["id"])
    names = ("request_success_total", "prompt_tokens_total", "generation_tokens_total", "ttft_count", "itl_count")
    assert [after[name] - before[name] for name in names] == [1, 20, 4, 1, 3]
    collector.store_metrics(source["id"], after)
    assert collector.query_current(source["id"])["generation_tokens_total"] == after["generation_tokens_total"]
    collector.cleanup_db()
