"""`vllm bench serve`: the load that it puts on a server, and what it says about the answers."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_server import LiveServer
from scripted_server import Request, ScriptedServer, answer, events, refusal
from tiny_llm import make_tiny_model

from vllm.cli.bench import load as bench_load
from vllm.cli.bench.load import Call, Outcome, latencies, percentiles, rates, run_load
from vllm.cli.main import main
from vllm.utils.server_client import ServerClient


class Generator:
    """Answers requests of all three endpoints; those whose number is in `failing` with an error."""

    def __init__(self) -> None:
        self.calls: list[Request] = []
        self.failing: set[int] = set()
        self.pause = 0.0
        self.metrics: str | None = None
        self.drafts = 10

    async def __call__(self, request: Request) -> bytes:
        if request.path == "/v1/models":
            return answer({"data": [{"id": "first"}, {"id": "second"}]})
        if request.path == "/version":
            return answer({"version": "7.8"})
        if request.path == "/metrics":
            if self.metrics is None:
                return refusal(404, "there are none")
            self.drafts += 5
            return answer(self.metrics.format(self.drafts, 4 * self.drafts, 2 * self.drafts).encode())
        if request.path == "/detokenize":
            return answer({"prompt": " ".join(map(str, request.body["tokens"]))})
        self.calls.append(request)
        number = len(self.calls) - 1
        await asyncio.sleep(self.pause)
        if number in self.failing:
            return refusal(500, "it broke")
        body = request.body
        usage = {"prompt_tokens": 10, "completion_tokens": body.get("max_tokens", 0)}
        if not body.get("stream"):
            return answer({"usage": usage})
        if request.path == "/v1/completions":
            chunks: list[dict[str, Any]] = [{"choices": [{"text": ""}]}] * body["max_tokens"]
        else:
            deltas = [{"role": "assistant", "content": ""}, *[{"content": "x"}] * body["max_tokens"], {"content": ""}]
            chunks = [{"choices": [{"delta": delta}]} for delta in deltas]
        return events(*chunks, {"choices": [], "usage": usage})


@pytest.fixture
def generator() -> Generator:
    return Generator()


@pytest.fixture
def server(generator: Generator) -> Iterator[ScriptedServer]:
    with ScriptedServer(generator) as running:
        yield running


def bench(url: str, *flags: str) -> int:
    return main(["bench", "serve", "--url", url, *flags])


def bodies(generator: Generator) -> list[dict[str, Any]]:
    """The bodies that were asked for, and forgotten, in an order that does not depend on which connection was
    faster."""
    found = [request.body for request in generator.calls]
    generator.calls.clear()
    return sorted(found, key=json.dumps)


def test_completions_are_asked_for_as_the_flags_say(
    server: ScriptedServer, generator: Generator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--num-prompts", "5", "--warmup", "2", "--input-len", "10", "--output-len", "4", "--num-ids", "3"]
    path = tmp_path / "r.json"
    assert bench(server.url, *flags, "--vocab-size", "50", "--model", "second", "--json", str(path)) == 0
    shown = capsys.readouterr().out
    found = bodies(generator)
    assert len({tuple(body["prompt"]) for body in found}) == 7
    for body in found:
        assert len(body["prompt"]) == 10 and all(0 <= token_id < 50 for token_id in body["prompt"])
        assert len(set(body["logprob_token_ids"])) == 3 and body["logprobs"] == 1
        assert (body["model"], body["max_tokens"], body["temperature"], body["ignore_eos"]) == ("second", 4, 0.0, True)
        assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
    result = json.loads(path.read_text())
    assert (result["benchmark"], result["model"], result["server_version"]) == ("serve", "second", "7.8")
    assert (result["num_prompts"], result["concurrency"], result["request_rate"], result["failures"]) == (
        5,
        16,
        None,
        0,
    )
    assert [len(request["token_times"]) for request in result["requests"]] == [4] * 5
    assert result["rates"]["output_tokens_per_second"] * result["rates"]["seconds"] == pytest.approx(20)
    assert result["rates"]["prompt_tokens_per_second"] * result["rates"]["seconds"] == pytest.approx(50)
    for name in (*result["rates"], *result["latencies"], "p50", "p90", "p99"):
        assert name in shown
    assert set(result["latencies"]) == {
        "end_to_end_seconds",
        "first_token_seconds",
        "further_token_seconds",
        "inter_token_seconds",
    }


METRICS = """
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0"}} {0}
vllm:spec_decode_num_drafts_total{{engine="1"}} {0}
vllm:spec_decode_num_drafts_created{{engine="0"}} 1.7e9
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {1}
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {2}
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} 7
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {2}
"""


def test_a_server_that_drafts_says_how_many_were_right(
    server: ScriptedServer, generator: Generator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator.metrics = METRICS
    path = tmp_path / "r.json"
    assert bench(server.url, "--num-prompts", "2", "--warmup", "1", "--json", str(path)) == 0
    found = json.loads(path.read_text())["speculation"]
    assert found == {
        "acceptance_rate": 0.5,
        "acceptance_length": 2.0,
        "num_drafts": 10,
        "draft_tokens": 20,
        "accepted_tokens": 10,
        "acceptance_rates_by_position": [1.0, 0.0],
    }
    shown = capsys.readouterr().out
    assert "acceptance_length" in shown and "acceptance_rate_1" in shown


def test_chats_are_texts_and_begin_with_the_first_word(
    server: ScriptedServer, generator: Generator, tmp_path: Path
) -> None:
    path = tmp_path / "r.json"
    flags = ["--endpoint", "chat", "--num-prompts", "3", "--warmup", "0", "--input-len", "4", "--output-len", "6"]
    assert bench(server.url, *flags, "--json", str(path)) == 0
    assert all(request.path == "/v1/chat/completions" for request in generator.calls)
    for body in bodies(generator):
        ((message,), has_prompt) = body["messages"], "prompt" in body
        assert message["role"] == "user" and len(message["content"].split()) == 4 and not has_prompt
    # Neither the role nor the empty end is a token.
    assert [len(request["token_times"]) for request in json.loads(path.read_text())["requests"]] == [6] * 3


def test_scores_are_whole_answers(server: ScriptedServer, generator: Generator, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    flags = ["--endpoint", "score", "--num-prompts", "3", "--warmup", "1", "--input-len", "4", "--num-ids", "2"]
    assert bench(server.url, *flags, "--json", str(path)) == 0
    assert all(request.path == "/generative_scoring" for request in generator.calls)
    for body in bodies(generator):
        assert body["query"] == [] and len(body["items"]) == 1 and len(body["items"][0]) == 4
        assert len(set(body["label_token_ids"])) == 2
    result = json.loads(path.read_text())
    assert set(result["latencies"]) == {"end_to_end_seconds"} and result["output_len"] is None


def test_the_same_seed_is_the_same_workload(server: ScriptedServer, generator: Generator) -> None:
    runs = []
    for seed in ("7", "7", "8"):
        assert bench(server.url, "--num-prompts", "4", "--num-ids", "2", "--output-len", "1", "--seed", seed) == 0
        runs.append(bodies(generator))
    assert runs[0] == runs[1] != runs[2]
    assert not any("stream" in body for body in runs[0])


def test_no_more_requests_than_asked_for_are_in_flight(server: ScriptedServer, generator: Generator) -> None:
    generator.pause = 0.01
    assert bench(server.url, "--num-prompts", "12", "--concurrency", "3", "--output-len", "1") == 0
    assert server.max_open == 3
    assert max(request.number_on_connection for request in generator.calls) >= 3  # connections are kept


def test_failures_are_counted_shown_and_an_exit_code(
    server: ScriptedServer, generator: Generator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator.failing = {2, 5, 6}
    path = tmp_path / "r.json"
    assert bench(server.url, "--num-prompts", "6", "--warmup", "2", "--json", str(path)) == 1
    error = capsys.readouterr().err
    assert "3 of 6 requests failed:\n  3: http://127.0.0.1:" in error and "answered 500: it broke" in error
    result = json.loads(path.read_text())
    assert result["failures"] == 3
    assert sum(request["error"] is not None for request in result["requests"]) == 3
    assert result["rates"]["requests_per_second"] * result["rates"]["seconds"] == pytest.approx(3)


def test_nothing_but_failures(server: ScriptedServer, generator: Generator, capsys: pytest.CaptureFixture[str]) -> None:
    generator.failing = set(range(100))
    assert bench(server.url, "--num-prompts", "3", "--warmup", "0") == 1
    assert "3 of 3 requests failed" in capsys.readouterr().err
    assert bench(server.url, "--num-prompts", "3", "--warmup", "1") == 2  # it would measure nothing
    assert capsys.readouterr().err.startswith("vllm bench serve: error: http://127.0.0.1:")


def test_requests_come_at_their_rate_whether_others_are_done_or_not(
    server: ScriptedServer, generator: Generator
) -> None:
    generator.pause = 0.2
    calls = [Call("/v1/completions", {"max_tokens": 1})] * 6

    async def run() -> list[Outcome]:
        client = ServerClient(server.url)
        try:
            return await run_load(client, calls, request_rate=100.0, seed=3)
        finally:
            await client.close()

    outcomes = asyncio.run(run())
    draw = random.Random(3)
    intervals = [draw.expovariate(100.0) for _ in calls]
    for i in range(1, 6):
        # From when it was due: a client that falls behind does not hide it.
        assert outcomes[i].began - outcomes[i - 1].began == pytest.approx(intervals[i], abs=1e-6)
    assert server.max_open > 1


def test_figures_follow_from_the_times() -> None:
    outcomes = [
        Outcome(began=10.0, ended=14.0, token_times=[11.0, 12.0, 14.0], prompt_tokens=5, output_tokens=3),
        Outcome(began=11.0, ended=15.0, token_times=[14.0, 15.0], prompt_tokens=7, output_tokens=5),
        Outcome(began=9.0, error="broken"),
    ]
    assert rates(outcomes) == {
        "seconds": 6.0,
        "requests_per_second": 2 / 6,
        "prompt_tokens_per_second": 12 / 6,
        "output_tokens_per_second": 8 / 6,
    }
    found = latencies(outcomes)
    assert {name: values["mean"] for name, values in found.items()} == {
        "end_to_end_seconds": 4.0,
        "first_token_seconds": 2.0,
        "further_token_seconds": pytest.approx((3 / 2 + 1 / 4) / 2),
        "inter_token_seconds": pytest.approx((1 + 2 + 1) / 3),
    }
    assert rates(outcomes[2:])["requests_per_second"] == 0.0 and latencies(outcomes[2:]) == {}


@pytest.mark.parametrize("count", [1, 2, 3, 10, 257])
def test_percentiles_are_numpys(count: int) -> None:
    draw = random.Random(count)
    values = [draw.random() for _ in range(count)]
    found = percentiles(values)
    assert found["mean"] == pytest.approx(np.mean(values))
    for percent in bench_load.PERCENTILES:
        assert found[f"p{percent}"] == pytest.approx(np.percentile(values, percent))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-prompts", "0"], "argument --num-prompts: must be at least 1, got 0"),
        (["--request-rate", "0"], "argument --request-rate: must be above 0, got 0"),
        (["--request-rate", "nan"], "argument --request-rate: must be above 0, got nan"),
        (["--request-rate", "x"], "argument --request-rate: invalid"),
        (["--endpoint", "embeddings"], "argument --endpoint: invalid choice"),
        (["--dtype", "float32"], "unrecognized arguments: --dtype"),
    ],
)
def test_bad_usage(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        bench("http://127.0.0.1:1", *flags)
    assert end.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--endpoint", "score"], "--num-ids must be from 1 to --vocab-size=8192, got 0"),
        (["--num-ids", "9", "--vocab-size", "8"], "--num-ids must be from 0 to --vocab-size=8, got 9"),
        (["--json", "no/such/folder/r.json"], "--json: there is no folder no/such/folder"),
        (["--url", "no url"], "--url must be http://HOST:PORT"),
        (["--model", "third"], "--model: there is no 'third' at http://127.0.0.1:"),
    ],
)
def test_what_cannot_be_measured(
    flags: list[str], message: str, server: ScriptedServer, generator: Generator, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(server.url, *flags) == 2
    error = capsys.readouterr().err
    assert error.startswith("vllm bench serve: error: ") and message in error and error.count("\n") == 1
    assert not generator.calls


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    template = folder / "template.jinja"
    template.write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}:")
    with LiveServer(folder, "--chat-template", str(template)) as running:
        yield running


@pytest.mark.parametrize("flags", [[], ["--endpoint", "chat"], ["--endpoint", "score"], ["--request-rate", "1000"]])
def test_a_live_server(flags: list[str], live: LiveServer, tmp_path: Path) -> None:
    sizes = ["--num-prompts", "6", "--input-len", "8", "--output-len", "5", "--num-ids", "2", "--vocab-size", "250"]
    path = tmp_path / "r.json"
    assert bench(live.url, *sizes, "--warmup", "1", "--json", str(path), *flags) == 0
    result = json.loads(path.read_text())
    is_score = "score" in flags
    assert (result["model"], result["failures"], len(result["requests"])) == ("tiny", 0, 6)
    for request in result["requests"]:
        assert request["output_tokens"] == (1 if is_score else 5)
        assert request["prompt_tokens"] == 8 or "chat" in flags
        assert sorted(request["token_times"]) == request["token_times"]
        assert bool(request["token_times"]) != is_score
        assert all(0 < when <= request["seconds"] for when in request["token_times"])
