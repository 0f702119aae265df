"""guidellm measures the server: what it counts is what was asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from live_server import LiveServer

pytest.importorskip("guidellm")

NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 24, 6


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_load_over_http(server: LiveServer, tiny_model: Path, tmp_path: Path, route: str) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "guidellm", "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={server.url},model=tiny,request_format={route},http2=false"]
    command += ["--profile", "kind=concurrent,streams=2"]
    command += ["--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
    command += ["--tokenizer", f"kind=hf_auto,model={tiny_model}"]
    command += ["--data", f"kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"]
    command += ["--output", f"kind=json,path={report}"]
    done = subprocess.run(
        command,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stdout
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert not requests["errored"], requests["errored"]
    assert len(requests["successful"]) == NUM_REQUESTS
    assert all(each["output_metrics"]["text_tokens"] == OUTPUT_TOKENS for each in requests["successful"])
    if route == "/v1/completions":
        assert all(abs(each["input_metrics"]["text_tokens"] - PROMPT_TOKENS) <= 1 for each in requests["successful"])
