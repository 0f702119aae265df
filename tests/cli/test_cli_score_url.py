"""`vllm score --url`: the rows of a run in this process, from a server that may be away, overloaded or another one."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer
from preloaded import FORKED
from scripted_server import Request, ScriptedServer, answer, refusal
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import LLM
from vllm.cli.main import main
from vllm.scoring import batches as score_batches
from vllm.scoring import run as score_run
from vllm.utils import server_client

NUM_TEXTS, TOO_LONG = 61, 20
LABELS = ["a", " the", "the stop", "stop it"]
PROMPT = "a cat that sat on a mat for long said "

# Runs the command and kills itself as soon as so many bytes were written, or so many answers came.
KILLED_RUN = """
import os, signal, sys
from vllm.scoring import rows as score_rows
from vllm.utils import server_client
from vllm.cli.main import main

bytes_left, answers_left = int(sys.argv[1]), int(sys.argv[2])
die = lambda: os.kill(os.getpid(), signal.SIGKILL)

def append(self, row, plain=score_rows.RowFile.append):
    global bytes_left
    before = self._file.tell()
    plain(self, row)
    bytes_left -= self._file.tell() - before
    if bytes_left <= 0:
        self._file.truncate(self._file.tell() + bytes_left)
        die()

async def post(self, path, body, plain=server_client.ServerClient.post):
    global answers_left
    answers_left -= 1
    answer = await plain(self, path, body)
    if answers_left <= 0:
        die()
    return answer

score_rows.RowFile.append, server_client.ServerClient.post = append, post
sys.exit(main(sys.argv[3:]))
"""
NEVER = 10**9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def tiny(model: Path) -> LLM:
    return make_tiny_llm(model)


@pytest.fixture(scope="module")
def live(model: Path) -> Iterator[LiveServer]:
    with LiveServer(model, "--max-model-len", "128", "--api-key", "sesame") as server:
        yield server


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_API_KEY", "sesame")
    generator = random.Random(0)
    words = ["the stop", "cat", "é", "😀", "it is", "\u2028", "on"]
    texts = [" ".join(generator.choices(words, k=generator.randint(1, 12))) for _ in range(NUM_TEXTS)]
    texts[TOO_LONG] = "far too long " * 20
    Path("a.jsonl").write_text("".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts)))


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_client, "RETRY_DELAYS", (0.0, 0.01, 0.02))


def arguments(output: str, *more: str) -> list[str]:
    labels = [] if {"--labels", "--label-ids"} & set(more) else ["--labels", *LABELS]
    fixed = ["--template", PROMPT + "{text}:", "--quiet", "--no-picture", "--output", output]
    return ["score", "a.jsonl", *labels, *fixed, *more]


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").split("\n")[:-1]]


def assert_same_rows(found: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Equal but for the last bits of floats."""
    assert len(found) == len(wanted)
    for own, other in zip(found, wanted, strict=True):
        assert list(own) == list(other)
        for name in own:
            assert own[name] == nearly(other[name]), (own["index"], name)


def nearly(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: nearly(each) for name, each in value.items()}
    if isinstance(value, list):
        return [nearly(each) for each in value]
    return pytest.approx(value, rel=1e-4, abs=1e-4) if isinstance(value, float) else value


def offline_rows(tiny: LLM, monkeypatch: pytest.MonkeyPatch, *more: str) -> list[dict[str, Any]]:
    with monkeypatch.context() as patch:
        patch.setattr(score_run, "load", lambda args: tiny)
        assert main(arguments("offline.jsonl", "--overwrite", *more)) == 1
    return lines("offline.jsonl")


def fails(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("vllm score: error: ") and message in error and "\n" not in error, error


# -- against a live server ------


@pytest.mark.parametrize(
    "labels", [["--labels", *LABELS], ["--labels", "a", "b"], ["--labels", "the"], ["--label-ids", "70", "9", "200"]]
)
def test_rows_are_those_of_a_run_in_this_process(
    labels: list[str], live: LiveServer, tiny: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = offline_rows(tiny, monkeypatch, *labels)
    offline_errors = capsys.readouterr().err
    assert main(arguments("o.jsonl", "--url", live.url, *labels)) == 1
    assert_same_rows(lines("o.jsonl"), wanted)
    assert wanted[TOO_LONG]["error"].startswith("the prompt has ")
    assert capsys.readouterr().err == offline_errors


def test_killed_at_random_points_and_resumed_until_done(
    live: LiveServer, tiny: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    wanted = offline_rows(tiny, monkeypatch)
    size = Path("offline.jsonl").stat().st_size

    def run(num_bytes: int, num_answers: int) -> int:
        command = [sys.executable, "-c", FORKED + KILLED_RUN, str(num_bytes), str(num_answers)]
        command += arguments("o.jsonl", "--url", live.url, "--resume", "--concurrency", "5")
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert result.returncode == -signal.SIGKILL or "1 of 61 texts failed" in result.stderr, result.stderr
        return result.returncode

    generator, output = random.Random(3), Path("o.jsonl")
    torn, sizes, before = 0, [0], b""
    for attempt in range(8):
        num_bytes = generator.randrange(1, size // 5) if attempt % 2 == 0 else NEVER
        num_answers = generator.randrange(1, 18) if attempt % 2 else NEVER
        assert run(num_bytes, num_answers) == -signal.SIGKILL
        content = output.read_bytes() if output.exists() else b""
        whole = before[: before.rfind(b"\n") + 1]
        assert content.startswith(whole)  # what was there stays as it is
        torn += not content.endswith(b"\n")
        sizes.append(content.count(b"\n"))
        before = content
    assert torn and sizes == sorted(sizes) and 0 < sizes[-1] < NUM_TEXTS
    assert run(NEVER, NEVER) == 1
    assert_same_rows(lines("o.jsonl"), wanted)


def test_a_picture_a_table_and_a_summary(live: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--labels", "a", "the", "--output", "o.jsonl", "--url", f"{live.url}/v1", "--model", "tiny"]
    assert main(["score", "a.jsonl", *flags, "--template", "{text}", "--limit", "5"]) == 0
    shown = capsys.readouterr().out
    assert "P(the)" in shown and "throughput: " in shown and "(5 prompts" in shown
    assert Path("o.png").read_bytes().startswith(b"\x89PNG")


def test_keys(live: LiveServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    url = ["--url", live.url, "--limit", "2"]
    fails(arguments("o.jsonl", *url, "--api-key", "wrong"), "answered 401: ", capsys)
    monkeypatch.delenv("VLLM_API_KEY")
    fails(arguments("o.jsonl", *url), "answered 401: ", capsys)
    assert not Path("o.jsonl").exists()
    assert main(arguments("o.jsonl", *url, "--api-key", "sesame")) == 0
    assert "sesame" not in Path("o.jsonl.meta.json").read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--labels", "a", ""], "answered 400: "),
        (["--label-ids", "1", "100000"], "answered 400: "),
        (["--labels", "a" * 200, "b"], "answered 400: "),
        (["--model", "gpt-5"], "--model: there is no 'gpt-5' at http://127.0.0.1:"),
    ],
)
def test_what_the_server_cannot_do_is_said_before_a_file_is_written(
    flags: list[str], message: str, live: LiveServer, capsys: pytest.CaptureFixture[str]
) -> None:
    fails(arguments("o.jsonl", "--url", live.url, *flags), message, capsys)
    assert not Path("o.jsonl").exists()


# -- against a scripted one ------


class Scorer:
    """Answers as the server does, with readings that are a function of the prompt.

    Attributes:
        scored: the prompts that were scored, in order; the one that `vllm score` asks about the labels with left out.
        trouble: called with a prompt; bytes to answer with in place of its scores, or None.
        pause: seconds that a prompt takes.
    """

    def __init__(self) -> None:
        self.name, self.max_model_len, self.version = "fake", 1000, "1.0"
        self.scored: list[str] = []
        self.trouble: Callable[[str], bytes | None] = lambda prompt: None
        self.pause: Callable[[str], float] = lambda prompt: 0.0

    async def __call__(self, request: Request) -> bytes:
        if request.path == "/v1/models":
            card = {"id": self.name, "max_model_len": self.max_model_len}
            return answer({"data": [card, {**card, "id": "other"}]})
        if request.path == "/version":
            return answer({"version": self.version})
        if request.path == "/tokenize":
            return answer({"count": len(request.body["prompt"])})
        (prompt,) = request.body["items"]
        if prompt != "a":
            await asyncio.sleep(self.pause(prompt))
            if (bad := self.trouble(prompt)) is not None:
                return bad
            self.scored.append(prompt)
        draw = random.Random(prompt)
        logprobs = [-draw.random() * 5 for _ in request.body["labels"]]
        total = sum(map(math.exp, logprobs))
        labels = [
            {
                "label": label,
                "token_ids": [i],
                "probability": math.exp(logprob) / total,
                "logprob": logprob,
                "logit": logprob + 9,
                "rank": i + 1,
            }
            for i, (label, logprob) in enumerate(zip(request.body["labels"], logprobs, strict=True))
        ]
        return answer({"data": [{"num_prompt_tokens": len(prompt), "label_mass": 0.5, "labels": labels}]})


@pytest.fixture
def scorer() -> Scorer:
    return Scorer()


@pytest.fixture
def fake(scorer: Scorer, no_waits: None) -> Iterator[ScriptedServer]:
    with ScriptedServer(scorer) as server:
        yield server


def prompts() -> list[str]:
    return [PROMPT + json.loads(line)["text"] + ":" for line in Path("a.jsonl").read_text().split("\n")[:-1]]


def test_rows_are_in_order_whatever_the_answers_order_is(scorer: Scorer, fake: ScriptedServer) -> None:
    draw = random.Random(5)
    scorer.pause = lambda prompt: draw.random() * 0.02
    assert main(arguments("o.jsonl", "--url", fake.url, "--concurrency", "7")) == 0
    wanted = prompts()
    assert scorer.scored != wanted and sorted(scorer.scored) == sorted(wanted)
    rows = lines("o.jsonl")
    assert [row["index"] for row in rows] == list(range(NUM_TEXTS))
    for row, prompt in zip(rows, wanted, strict=True):
        assert row["logprobs"]["a"] == -random.Random(prompt).random() * 5
    assert fake.max_open == 7


def test_an_overloaded_server_is_asked_again(scorer: Scorer, fake: ScriptedServer) -> None:
    draw = random.Random(6)
    troubles = [refusal(429, "full", Retry_After="0"), refusal(503, "starting"), b""]
    asked: list[str] = []

    def trouble(prompt: str) -> bytes | None:
        asked.append(prompt)
        return draw.choice(troubles) if asked.count(prompt) < 3 else None

    scorer.trouble = trouble
    assert main(arguments("o.jsonl", "--url", fake.url)) == 0
    assert [row["index"] for row in lines("o.jsonl")] == list(range(NUM_TEXTS))
    assert sorted(scorer.scored) == sorted(prompts()) and len(asked) == 3 * NUM_TEXTS


def test_a_server_that_stays_away_is_one_error_and_what_is_there_is_kept(
    scorer: Scorer, fake: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(score_batches, "BATCH_ROWS", 16)
    lost = prompts()[37]
    scorer.trouble = lambda prompt: refusal(503, "out to lunch") if prompt == lost else None
    flags = ["--url", fake.url, "--concurrency", "1"]
    fails(arguments("o.jsonl", *flags), "/generative_scoring answered 503: out to lunch", capsys)
    assert [row["index"] for row in lines("o.jsonl")] == list(range(37))
    scorer.trouble = lambda prompt: None
    assert main(arguments("o.jsonl", "--resume", *flags)) == 0
    assert [row["index"] for row in lines("o.jsonl")] == list(range(NUM_TEXTS))
    assert all(scorer.scored.count(prompt) == 1 for prompt in prompts()[:38])


def test_faults_of_one_text_are_its_row(
    scorer: Scorer, fake: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = {
        3: refusal(400, "odd", "items"),
        5: refusal(500, "generation failed: NaN"),
        8: refusal(413, "longer than the limit"),
    }
    by_prompt = {prompts()[index]: fault for index, fault in faults.items()}
    scorer.trouble = by_prompt.get
    assert main(arguments("o.jsonl", "--url", fake.url)) == 1
    assert "3 of 61 texts failed, first a.jsonl:4: odd" in capsys.readouterr().err
    rows = lines("o.jsonl")
    assert {row["index"]: row["error"] for row in rows if "error" in row} == {
        3: "odd",
        5: "generation failed: NaN",
        8: "longer than the limit",
    }
    assert all(rows[index]["num_prompt_tokens"] == len(prompts()[index]) for index in faults)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (refusal(400, "what?", "labels"), "answered 400: what?"),
        (refusal(404, "there is no route /generative_scoring"), "answered 404: there is no route"),
        (answer({"data": [{"score": 0.5}]}), "the answer does not have the labels' scores"),
        (answer([]), "the answer does not have the labels' scores"),
    ],
)
def test_faults_of_more_than_a_text_end_the_run(
    data: bytes, message: str, scorer: Scorer, fake: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    scorer.trouble = lambda prompt: data
    fails(arguments("o.jsonl", "--url", fake.url), message, capsys)
    assert lines("o.jsonl") == []


def test_values_that_json_has_no_number_for(scorer: Scorer, fake: ScriptedServer) -> None:
    nothing = {"probability": None, "logprob": None, "logit": None, "rank": 3}
    entries = [{"label": label, "token_ids": [i], **nothing} for i, label in enumerate(LABELS)]
    scorer.trouble = lambda prompt: answer({"data": [{"num_prompt_tokens": 1, "label_mass": 0.0, "labels": entries}]})
    assert main(arguments("o.jsonl", "--url", fake.url, "--limit", "1")) == 0
    (row,) = lines("o.jsonl")
    for name in ("probs", "logprobs", "logits"):
        assert row[name] == dict.fromkeys(LABELS)
    assert row["prediction"] is None and row["label_mass"] == 0.0


@pytest.mark.parametrize(
    ("change", "flags", "message"),
    [
        ({"name": "new"}, [], "model 'fake', not 'new';"),
        ({}, ["--model", "other"], "model 'fake', not 'other';"),
        ({"max_model_len": 7}, [], "max_model_len 1000, not 7;"),
        ({"version": "2.0"}, [], "server_version '1.0', not '2.0';"),
        ({}, ["--limit", "5"], "num_texts 61, not 5;"),
    ],
)
def test_rows_of_another_kind_are_not_continued(
    change: dict[str, Any],
    flags: list[str],
    message: str,
    scorer: Scorer,
    fake: ScriptedServer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(arguments("o.jsonl", "--url", fake.url)) == 0
    before = Path("o.jsonl").read_bytes()
    for name, value in change.items():
        setattr(scorer, name, value)
    fails(arguments("o.jsonl", "--url", fake.url, "--resume", *flags), message, capsys)
    assert Path("o.jsonl").read_bytes() == before


def test_rows_of_a_model_in_this_process_are_not_continued_by_a_server(
    tiny: LLM, fake: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    offline_rows(tiny, monkeypatch)
    fails(arguments("offline.jsonl", "--url", fake.url, "--resume"), "server_version None, not '1.0';", capsys)
    assert main(arguments("o.jsonl", "--url", fake.url)) == 0
    fails(arguments("o.jsonl", "--resume"), "server_version '1.0', not None;", capsys)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--dtype", "float32"], "--dtype is for a model in this process, and has no effect on the one at --url"),
        (["--max-model-len", "5"], "--max-model-len is for a model in this process"),
        (["--no-enable-prefix-caching"], "--enable-prefix-caching is for a model in this process"),
        (["--url", "localhost:1"], "--url must be http://HOST:PORT"),
        (["--labels", "a", "a"], "--labels: 'a' is there twice"),
    ],
)
def test_flags_that_do_not_go_with_a_server(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    fails(arguments("o.jsonl", "--url", "http://127.0.0.1:1", *flags), message, capsys)


@pytest.mark.parametrize("flag", ["--api-key", "--timeout", "--concurrency"])
def test_flags_that_need_a_server(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    fails(arguments("o.jsonl", flag, "4"), f"{flag} says how to talk to a server, and needs --url", capsys)


def test_flags_at_their_defaults_are_fine(fake: ScriptedServer) -> None:
    flags = ["--dtype", "auto", "--seed", "0", "--enable-prefix-caching"]
    assert main(arguments("o.jsonl", "--url", fake.url, *flags)) == 0
