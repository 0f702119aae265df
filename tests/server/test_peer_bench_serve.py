"""vLLM's own load client, `vllm bench serve`, against a live server.

VLLM_PEER_ENV names a virtual environment with vLLM in it, VLLM_PEER_TOKENIZER a folder with the embedded model's
tokenizer in Hugging Face's layout.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from live_server import LiveServer
from served import MODEL

ENV = os.environ.get("VLLM_PEER_ENV")
TOKENIZER = os.environ.get("VLLM_PEER_TOKENIZER")

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(not (ENV and TOKENIZER), reason="VLLM_PEER_ENV and VLLM_PEER_TOKENIZER are not set"),
]

NUM_PROMPTS, INPUT_LEN, OUTPUT_LEN = 16, 24, 8


@pytest.mark.parametrize(
    "flags",
    [
        ("--backend", "vllm", "--endpoint", "/v1/completions"),
        ("--backend", "openai", "--endpoint", "/v1/completions", "--logprobs", "3", "--extra-body",
         '{"logprob_token_ids": [1, 2, 3], "temperature": 0}'),
        ("--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
    ],
    ids=["completions", "readings", "chat"],
)  # fmt: skip
def test_every_request_succeeds(live_server: LiveServer, tmp_path: Path, flags: tuple[str, ...]) -> None:
    assert ENV is not None and TOKENIZER is not None
    command = [
        f"{ENV}/bin/vllm", "bench", "serve", *flags, "--base-url", live_server.url, "--model", MODEL,
        "--tokenizer", TOKENIZER, "--dataset-name", "random", "--random-input-len", str(INPUT_LEN),
        "--random-output-len", str(OUTPUT_LEN), "--ignore-eos", "--num-prompts", str(NUM_PROMPTS),
        "--max-concurrency", "4", "--disable-tqdm", "--save-result", "--save-detailed", "--result-dir", str(tmp_path),
        "--ready-check-timeout-sec", "30",
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(command, env={**env, **offline}, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (file,) = tmp_path.glob("*.json")
    result = json.loads(file.read_text())
    assert (result["completed"], result.get("failed", 0)) == (NUM_PROMPTS, 0)
    assert not any(result["errors"])
    assert result["total_output_tokens"] == NUM_PROMPTS * OUTPUT_LEN
    assert result["output_lens"] == [OUTPUT_LEN] * NUM_PROMPTS
    assert all(ttft > 0 for ttft in result["ttfts"])
