"""vllm serve --audit-share: requests that are read once more by a reference, beside the road of their answers."""

from __future__ import annotations

import io
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
from live_server import LiveServer
from processes import children
from safetensors.torch import load_file, save_file
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import SamplingParams
from vllm.cli.serve import check_args
from vllm.exceptions import CliError
from vllm.server import audit_share
from vllm.server.server_args import ServerArgs

IDS = [70, 71, 72]
PROMPT = [65, 66, 67, 68]
_PATIENCE_SECONDS = 120.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and its reference: the same with other weights."""
    served, reference = (make_tiny_model(tmp_path_factory.mktemp(name)) for name in ("served", "reference"))
    file = reference / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.down_proj.weight"] *= 30
    save_file(tensors, file, {"format": "pt"})
    return served, reference


@pytest.fixture(scope="module")
def server(folders: tuple[Path, Path]) -> Iterator[tuple[LiveServer, Path]]:
    """A server that has all its readings read again, and the log."""
    served, reference = folders
    log = served / "audit.jsonl"
    flags = ("--audit-share", "1", "--audit-reference", f"{reference}:float32", "--audit-log", str(log))
    with LiveServer(served, "--max-model-len", "128", *flags, env={"OMP_NUM_THREADS": "1"}) as server:
        yield server, log


def rows_of(log: Path, count: int) -> list[dict[str, Any]]:
    """The log's rows, once there are so many."""
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while len(lines := log.read_text().splitlines()) < count:
        assert time.monotonic() < deadline, lines
        time.sleep(0.1)
    return [json.loads(line) for line in lines]


def ask(server: LiveServer, **fields: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": PROMPT, "temperature": 0, "ignore_eos": True, **fields}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_what_is_read_again(server: tuple[LiveServer, Path], folders: tuple[Path, Path]) -> None:
    live, log = server
    ask(live, max_tokens=3, logprob_token_ids=IDS)
    ask(live, max_tokens=0, logprob_token_ids=IDS)
    streamed = {
        "model": "tiny",
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": 4,
        "ignore_eos": True,
        "stream": True,
    }
    httpx.post(f"{live.url}/v1/completions", json={**streamed, "logprobs": 0}, timeout=60).raise_for_status()
    ask(live, max_tokens=3)  # reads nothing
    ask(live, max_tokens=0, echo=True, logprobs=1)  # reads the prompt alone
    whole, prompt_alone, sampled = rows_of(log, 3)
    assert [len(row["logprobs"]) for row in (whole, prompt_alone, sampled)] == [3, 1, 4]
    params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True, logprob_token_ids=IDS)
    served, reference = (make_tiny_llm(folder) for folder in folders)
    (own,) = served.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    expected = own.outputs[0].logprobs.select(IDS).logprobs
    assert whole["logprobs"] == [pytest.approx(row, abs=1e-5) for row in expected.tolist()]
    assert prompt_alone["logprobs"] == [pytest.approx(expected[0].tolist(), abs=1e-5)]
    forced = [*PROMPT, *own.outputs[0].token_ids]
    other = []
    for end in range(len(PROMPT), len(forced)):
        one = SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=IDS)
        (output,) = reference.generate([{"prompt_token_ids": forced[:end]}], one, use_tqdm=False)
        other.append(output.outputs[0].logprobs.select(IDS).logprobs[0])
    found = np.array(other, np.float64)
    assert whole["reference_logprobs"] == [pytest.approx(row, abs=1e-4) for row in found.tolist()]
    assert whole["max_abs_delta_logprob"] == pytest.approx(np.abs(expected - found).max(), abs=1e-4)
    assert whole["flips"] == (expected.argmax(1) != found.argmax(1)).sum()
    ours, theirs = (np.exp(each) / np.exp(each).sum(1, keepdims=True) for each in (expected, found))
    assert whole["kl"] == pytest.approx((theirs * np.log(theirs / ours)).sum(1), abs=1e-4)
    assert all(len(ids) == 1 for ids in sampled["token_ids"]) and "kl" not in sampled
    assert not {"prompt", "text", "prompt_token_ids"} & whole.keys()
    assert log.stat().st_mode & 0o777 == 0o600
    metrics = httpx.get(f"{live.url}/metrics").text
    assert 'vllm:audit_requests_total{result="read"} 3.0' in metrics
    assert 'vllm:audit_requests_total{result="failed"}' not in metrics
    assert "vllm:audit_rows_total 8.0" in metrics
    assert f"vllm:audit_flips_total {float(whole['flips'] + prompt_alone['flips'])}" in metrics


def test_a_reference_that_dies_harms_nobody(server: tuple[LiveServer, Path]) -> None:
    live, _ = server
    (reader,) = (pid for pid in children(live.process.pid) if os.getpriority(os.PRIO_PROCESS, pid) == 19)
    os.kill(reader, 9)
    for _ in range(3):
        assert ask(live, max_tokens=1, logprob_token_ids=IDS)["choices"]
    assert httpx.get(f"{live.url}/health").status_code == 200


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"audit_share": 2.0, "audit_reference": "m", "audit_log": "l"}, "--audit-share must be in 0..1, got 2.0"),
        ({"audit_share": 0.5, "audit_log": "l"}, "need each other"),
        ({"audit_reference": "int8", "audit_log": "l"}, "need each other"),
        ({"audit_log": "l"}, "--audit-log is for --audit-share"),
        ({"audit_share": 0.5, "audit_reference": "m", "audit_texts": True}, "--audit-texts needs --audit-log"),
        ({"audit_share": 0.5, "audit_reference": "int8", "audit_log": "l"}, "names no model"),
    ],
)
def test_flags_that_are_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(CliError, match=problem):
        check_args(ServerArgs(**fields))


class Reader:
    """A reader's process that answers each request alike."""

    def __init__(self, *_: object, **__: object) -> None:
        answer = json.dumps({"logprobs": [[-1.0, -2.0, -math.inf]]})
        self.stdin, self.stdout = io.StringIO(), io.StringIO(f'{{"ready": true}}\n{answer}\n{answer}\n')

    def poll(self) -> None:
        """It runs."""

    def terminate(self) -> None:
        """Nothing ends."""

    def wait(self, timeout: float | None = None) -> int:
        return 0


@pytest.mark.parametrize("is_full", [False, True])
def test_what_cannot_be_logged_is_counted(
    is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(audit_share.subprocess, "Popen", Reader)
    log = Path("/dev/full") if is_full else tmp_path / "log"
    audit = audit_share.ServedAudit(1.0, {}, str(log), keeps_texts=False, is_busy=lambda: False)
    for _ in range(2):
        audit._waiting.put(lambda: {"job": {}, "row": {"logprobs": [[-2.0, -1.0, -math.inf]]}})
    audit.close()
    counts = {sample.name: sample.value for metric in audit.collect() for sample in metric.samples}
    assert counts["vllm:audit_requests_total"] == counts["vllm:audit_flips_total"] == 2
    # A token that both models rule out differs by nothing.
    assert counts["vllm:audit_abs_delta_logprob_sum"] == 4 and 0 < counts["vllm:audit_kl_sum"] < 2
    assert ["No space left" in record.message for record in caplog.records if "log" in record.message] == [
        True
    ] * is_full
    if not is_full:
        assert [row["reference_logprobs"] for row in rows_of(log, 2)] == [[[-1.0, -2.0, None]]] * 2


def test_a_reading_is_followed_by_a_rest_while_the_server_has_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, busy_until = [0.0], [math.inf]
    clock = SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds), time=time.time
    )
    monkeypatch.setattr(audit_share.subprocess, "Popen", Reader)
    is_busy = lambda: now[0] < busy_until[0]  # noqa: E731
    audit = audit_share.ServedAudit(1.0, {}, str(tmp_path / "log"), keeps_texts=False, is_busy=is_busy)
    monkeypatch.setattr(audit_share, "time", clock)
    audit._rest(0.1)
    assert now[0] == pytest.approx(0.1 * audit_share._RESTS, abs=2 * audit_share._WAIT_SECONDS)
    now[0], busy_until[0] = 0.0, 0.5
    audit._rest(0.1)
    assert now[0] == pytest.approx(0.5, abs=2 * audit_share._WAIT_SECONDS)
    audit.close()


def test_a_log_that_cannot_be_written(folders: tuple[Path, Path], tmp_path: Path) -> None:
    flags = ("--audit-share", "1", "--audit-reference", str(folders[0]), "--audit-log", str(tmp_path / "no/log"))
    with LiveServer(folders[0], *flags, wait=False) as server:
        assert server.process.wait(120) != 0
        assert "--audit-log" in server.log() and "No such file" in server.log()
