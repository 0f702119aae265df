"""Servers as candidates: readings that are not stale, readers that leave with their audit, and what cannot be had."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from processes import children, is_running
from scripted_server import Request, ScriptedServer, answer, refusal
from tiny_llm import make_tiny_model

import vllm
from vllm.cli.main import main
from vllm.entrypoints.openai.api_server import build_app, init_app_state

LABELS = ["a", "b"]
_PATIENCE_SECONDS = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f"{json.dumps({'text': f'row {i}'})}\n" for i in range(6)))
    return path


class Ours:
    """A server of this package, whose model is a logprob of the first label.

    Attributes:
        scored: prompts of rows that were asked.
        hangs: rows are never answered.
    """

    def __init__(self) -> None:
        self.logprob, self.scored, self.hangs = -1.0, list[str](), False

    async def __call__(self, request: Request) -> bytes:
        if request.path == "/v1/models":
            return answer({"data": [{"id": "m", "max_model_len": 128}]})
        if request.path == "/version":
            return answer({"version": "1"})
        if request.path == "/v1/completions":
            return answer(
                {"id": str(time.time()), "choices": [{"text": "x", "logprobs": {"token_logprobs": [self.logprob]}}]}
            )
        if request.path != "/generative_scoring":
            return refusal(404, "no route")
        (prompt,) = request.body["items"]
        if prompt != "a":
            if self.hangs:
                return await _never()
            self.scored.append(prompt)
        entries = [
            {"label": label, "token_ids": [67 + i], "logprob": own, "probability": 0.5, "logit": own, "rank": i + 1}
            for i, (label, own) in enumerate(zip(LABELS, (self.logprob, -2.0), strict=True))
        ]
        return answer({"data": [{"num_prompt_tokens": 5, "label_mass": 0.5, "labels": entries}]})


async def _never() -> bytes:
    import asyncio

    await asyncio.sleep(3600)
    return b""


def _audit(model: Path, rows: Path, url: str) -> Any:
    (found,) = vllm.audit(
        rows, labels=LABELS, template="{text}:", reference=f"{model}:float32", candidates=url, max_model_len=128,
        readings=rows.parent / "readings",
    ).candidates  # fmt: skip
    return found


def test_a_server_is_read_anew_once_its_model_has_changed(model: Path, rows: Path) -> None:
    with ScriptedServer(served := Ours()) as server:
        first = _audit(model, rows, server.url)
        assert first.label_tables[""].candidate[:, 0].tolist() == [-1.0] * 6 and len(served.scored) == 6
        _audit(model, rows, server.url)
        assert len(served.scored) == 6
        served.logprob = -1.001
        other = _audit(model, rows, server.url)
    assert other.label_tables[""].candidate[:, 0] == pytest.approx([-1.001] * 6) and len(served.scored) == 12


def test_a_servers_memory_is_not_our_clients(model: Path, rows: Path, tmp_path: Path) -> None:
    with ScriptedServer(Ours()) as server:
        arguments = [str(rows), "--labels", *LABELS, "--template", "{text}:", "--reference", f"{model}:float32"]
        arguments += ["--candidate", server.url, "--max-model-len", "128", "--readings", str(tmp_path / "r"), "--quiet"]
        assert main(["audit", *arguments, "--output", str(tmp_path / "a.json")]) == 0
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["reference"]["peak_mib"] > 50
    assert found["candidates"][0]["peak_mib"] is None and found["candidates"][0]["seconds"] > 0


def test_a_killed_audit_takes_its_reader_along(model: Path, rows: Path, tmp_path: Path) -> None:
    """The next audit of the same rows finds no lock."""
    served = Ours()
    served.hangs = True
    with ScriptedServer(served) as server:
        command = [sys.executable, "-m", "vllm.cli.main", "audit", str(rows), "--labels", *LABELS, "--quiet"]
        command += ["--template", "{text}:", "--reference", f"{model}:float32", "--candidate", server.url]
        command += ["--max-model-len", "128", "--readings", str(rows.parent / "readings")]
        process = subprocess.Popen(command, stderr=subprocess.PIPE)
        try:
            deadline = time.monotonic() + _PATIENCE_SECONDS
            while server.num_open < 6:
                assert time.monotonic() < deadline and process.poll() is None
                time.sleep(0.05)
            (reader,) = children(process.pid)
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.communicate()
        while is_running(reader):
            assert time.monotonic() < deadline + 10, "the reader outlives its audit"
            time.sleep(0.05)
        served.hangs = False
        assert _audit(model, rows, server.url).rows == 6


def test_a_server_over_a_cluster_is_refused(model: Path, rows: Path, capsys: Any) -> None:
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'ray[data]')")
    url = "http://127.0.0.1:1"
    arguments = [str(rows), "--labels", "a", "b", "--reference", f"{model}:float32", "--candidate", url]
    assert main(["audit", *arguments, "--backend", "ray"]) == 2
    error = capsys.readouterr().err
    assert "--backend ray" in error and url in error and "is a server" in error


def test_an_application_without_a_servers_life_refuses_a_share() -> None:
    import asyncio

    args = argparse.Namespace(audit_share=0.5, audit_reference="m", audit_log="log")
    with pytest.raises(ValueError, match="audit_share"):
        build_app(args)
    with pytest.raises(ValueError, match="audit_share"):
        asyncio.run(init_app_state(None, argparse.Namespace(), args))  # type: ignore[arg-type]
    assert build_app(argparse.Namespace(audit_share=0.0)).state.serving.args.audit_share == 0
