"""Upstream's flags of the commands: taken with upstream's meaning, or refused by name with what to do instead."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted_server import Request, ScriptedServer, answer, events
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm.cli.bench import run as bench_run
from vllm.cli.bench.load import Outcome
from vllm.cli.bench.saved import num_good
from vllm.cli.main import main


class Words:
    """A server whose tokens are words."""

    def __init__(self) -> None:
        self.calls: list[Request] = []

    async def __call__(self, request: Request) -> bytes:
        body = request.body
        if request.path == "/v1/models":
            return answer({"data": [{"id": "Org/first"}, {"id": "second"}]})
        if request.path == "/version":
            return answer({"version": "7.8"})
        if request.path == "/tokenize":
            text = body["prompt"] if "prompt" in body else "<u>" + body["messages"][0]["content"]
            return answer({"tokens": [len(word) for word in text.split()]})
        if request.path == "/detokenize":
            return answer({"prompt": " ".join(map(str, body["tokens"]))})
        if not request.path.startswith("/v1/"):
            return answer({})
        self.calls.append(request)
        usage = {"prompt_tokens": 10, "completion_tokens": body["max_tokens"]}
        if not body.get("stream"):
            return answer({"usage": usage, "choices": [{"text": "whole"}]})
        is_chat = request.path == "/v1/chat/completions"
        chunk: dict[str, Any] = {"delta": {"content": "x"}} if is_chat else {"text": "x"}
        return events(*[{"choices": [chunk]}] * body["max_tokens"], {"choices": [], "usage": usage})


@pytest.fixture
def words() -> Words:
    return Words()


@pytest.fixture
def server(words: Words) -> Iterator[ScriptedServer]:
    with ScriptedServer(words) as running:
        yield running


def bench(server: ScriptedServer, words: Words, *flags: str) -> list[dict[str, Any]]:
    """The bodies of the requests that `vllm bench serve` makes, the warm-up's left out."""
    words.calls.clear()
    assert main(["bench", "serve", "--base-url", server.url + "/v1", "--num-warmups", "0", *flags]) == 0
    return [request.body for request in words.calls]


def test_random_prompts_as_upstream_asks_for_them(server: ScriptedServer, words: Words) -> None:
    sizes = ["--random-input-len", "20", "--random-output-len", "8", "--random-range-ratio", "0.5"]
    flags = ["--dataset-name", "random", *sizes, "--random-prefix-len", "3", "--num-prompts", "40"]
    found = bench(server, words, *flags, "--max-concurrency", "4", "--request-rate", "inf", "--disable-tqdm")
    assert len(found) == 40 and server.max_open <= 4
    lengths = {len(body["prompt"]) - 3 for body in found}
    assert 10 <= min(lengths) < max(lengths) <= 30
    assert len({tuple(body["prompt"][:3]) for body in found}) == 1
    assert 4 <= min(body["max_tokens"] for body in found) < max(body["max_tokens"] for body in found) <= 12
    assert all(body["ignore_eos"] and body["model"] == "Org/first" for body in found)


def test_prefixes_that_repeat(server: ScriptedServer, words: Words) -> None:
    of = "--prefix-repetition-"
    sizes = [of + "prefix-len", "5", of + "suffix-len", "2", of + "num-prefixes", "3", of + "output-len", "4"]
    found = bench(server, words, "--dataset-name", "prefix_repetition", *sizes, "--num-prompts", "9")
    prefixes = [tuple(body["prompt"][:5]) for body in found]
    assert len(set(prefixes)) == 3 and all(prefixes.count(each) == 3 for each in prefixes)
    assert {(len(body["prompt"]), body["max_tokens"]) for body in found} == {(7, 4)}


def test_conversations_of_a_file(server: ScriptedServer, words: Words, tmp_path: Path) -> None:
    def talk(*texts: str) -> dict[str, Any]:
        return {"conversations": [{"from": "x", "value": text} for text in texts]}

    path = tmp_path / "talks.json"
    good = [talk("one two three four " + str(i), "five six seven eight nine") for i in range(3)]
    path.write_text(json.dumps([*good, talk("too short", "five six seven eight"), talk("one two three four")]))
    flags = ["--dataset-name", "sharegpt", "--dataset-path", str(path), "--backend", "openai-chat"]
    found = bench(server, words, *flags, "--num-prompts", "3")
    assert sorted(body["messages"][0]["content"][-1] for body in found) == ["0", "1", "2"]
    assert all(body["max_tokens"] == 5 and "ignore_eos" not in body for body in found)
    assert len(bench(server, words, *flags, "--num-prompts", "7", "--sharegpt-output-len", "4")) == 7
    assert len(bench(server, words, *flags, "--num-prompts", "7", "--no-oversample", "--ignore-eos")) == 3


def test_lines_of_a_file(server: ScriptedServer, words: Words, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"text {i}", "output_tokens": i + 2}) + "\n" for i in range(3)))
    flags = ["--dataset-name", "custom", "--dataset-path", str(path), "--num-prompts", "3", "--disable-shuffle"]
    found = bench(server, words, *flags, "--skip-chat-template", "--custom-output-len", "-1", "--max-concurrency", "1")
    assert [(body["prompt"], body["max_tokens"]) for body in found] == [("text 0", 2), ("text 1", 3), ("text 2", 4)]
    # Rendered as a chat, by the server.
    found = bench(server, words, *flags, "--custom-output-len", "9")
    assert [(body["prompt"], body["max_tokens"]) for body in found] == [([7, 1], 9)] * 3


def test_what_requests_hold(server: ScriptedServer, words: Words) -> None:
    flags = ["--top-p", "0.9", "--temperature", "0.5", "--logprobs", "3", "--extra-body", '{"min_tokens": 2}']
    flags += ["--header", "X-Team=a", "--num-prompts", "1", "--served-model-name", "second", "--model", "Org/any"]
    more = ["--endpoint", "/v1/completions", "--no-stream"]
    (body,) = bench(server, words, *flags, *more)
    assert (body["top_p"], body["temperature"], body["logprobs"], body["min_tokens"]) == (0.9, 0.5, 3, 2)
    assert body["model"] == "second" and "stream" not in body
    assert words.calls[0].headers["x-team"] == "a"


def test_adapters_and_variables_of_the_template(server: ScriptedServer, words: Words) -> None:
    flags = [
        "--num-prompts",
        "4",
        "--max-concurrency",
        "1",
        "--lora-modules",
        "a",
        "b",
        "--chat-template-kwargs",
        '{"x": 1}',
    ]
    found = bench(server, words, *flags, "--lora-assignment", "round-robin", "--endpoint-type", "openai-chat")
    assert [body["model"] for body in found] == ["a", "b", "a", "b"]
    assert all(body["chat_template_kwargs"] == {"x": 1} for body in found)
    assert {body["model"] for body in bench(server, words, *flags)} <= {"a", "b"}


def test_a_result_as_upstreams_tools_read_it(server: ScriptedServer, words: Words, tmp_path: Path) -> None:
    flags = ["--num-prompts", "3", "--random-output-len", "4", "--request-rate", "500", "--burstiness", "0.5"]
    flags += ["--save-result", "--result-dir", str(tmp_path / "new"), "--metadata", "card=none", "--label", "try"]
    bench(server, words, *flags, "--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "25,99")
    (file,) = (tmp_path / "new").iterdir()
    assert file.name.startswith("try-500qps-first-") and file.suffix == ".json"
    result = json.loads(file.read_text())
    assert (result["backend"], result["model_id"], result["num_prompts"]) == ("vllm", "Org/first", 3)
    assert (result["completed"], result["failed"], result["card"]) == (3, 0, "none")
    assert (result["request_rate"], result["burstiness"], result["max_concurrency"]) == (500, 0.5, None)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 12)
    assert result["output_throughput"] * result["duration"] == pytest.approx(12)
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p25", "p99")} <= set(result)
    assert "ttfts" not in result

    bench(server, words, *flags, "--save-detailed", "--result-filename", "r.json", "--goodput", "e2el:100000")
    result = json.loads((tmp_path / "new" / "r.json").read_text())
    assert result["generated_texts"] == ["xxxx"] * 3 and result["output_lens"] == [4] * 3
    assert [len(each) for each in result["itls"]] == [3] * 3 and len(result["ttfts"]) == 3
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])


def test_good_requests_are_within_every_limit() -> None:
    fast = Outcome(began=0.0, ended=1.0, token_times=[0.1, 0.2], output_tokens=2)
    slow = Outcome(began=0.0, ended=1.0, token_times=[0.9, 1.0], output_tokens=2)
    broken = Outcome(began=0.0, error="it broke")
    assert num_good([fast, slow, broken], {"ttft": 500.0}) == 1
    assert num_good([fast, slow, broken], {"e2el": 1000.0}) == 2
    assert num_good([fast, slow], {"e2el": 999.0}) == 0


def test_host_and_port(server: ScriptedServer, words: Words) -> None:
    port = server.url.rpartition(":")[2]
    assert main(["bench", "serve", "--host", "127.0.0.1", "--port", port, "--num-prompts", "1", "--warmup", "0"]) == 0
    assert len(words.calls) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["bench", "serve", "--dataset-name", "sonnet"], "sonnet is not supported: take --dataset-name custom"),
        (["bench", "serve", "--dataset-name", "nosuch"], "must be one of random, sharegpt, custom"),
        (["bench", "serve", "--dataset-name", "sharegpt"], "--dataset-name sharegpt needs --dataset-path FILE"),
        (["bench", "serve", "--dataset-name", "custom", "--dataset-path", "/no"], "there is no file /no"),
        (["bench", "serve", "--dataset-path", __file__], "has no effect on random"),
        (["bench", "serve", "--hf-subset", "x"], "--hf-subset is not supported: take --dataset-name custom"),
        (["bench", "serve", "--ramp-up-strategy", "linear"], "--ramp-up-strategy is not supported: the rate"),
        (["bench", "serve", "--use-beam-search"], "--use-beam-search is not supported"),
        (["bench", "serve", "--backend", "openai-embeddings"], "must be one of vllm, openai, openai-chat"),
        (["bench", "serve", "--backend", "openai-chat", "--endpoint", "/v1/completions"], "--backend openai-chat asks"),
        (["bench", "serve", "--goodput", "itl:3"], "must be ttft:MS, tpot:MS or e2el:MS"),
        (["bench", "serve", "--percentile-metrics", "ttft,x"], "must be some of ttft,tpot,itl,e2el, got 'x'"),
        (["bench", "serve", "--random-range-ratio", "1"], "must be in [0, 1), got 1"),
        (["bench", "serve", "--header", "x"], "must be KEY=VALUE"),
        (["bench", "serve", "--probe-request-rate", "1"], "--probe-request-rate is not supported: run a second"),
        (["run-batch", "--url", "x", "-i", "a", "-o", "b"], "--url is not supported: `vllm serve` has /metrics"),
        (["bench", "throughput", "--async-engine"], "--async-engine is not supported: `vllm bench serve`"),
        (["bench", "throughput", "--backend", "hf"], "must be vllm, this engine, got 'hf'"),
        (["bench", "latency", "--n", "2"], "must be 1, got 2: ask for more prompts"),
        (["bench", "latency", "--dataset-name", "hf"], "hf is not supported"),
        (["bench", "sweep", "serve", "--x"], "vllm bench sweep: error: this command is not supported"),
        (["bench", "startup", "--model", "x"], "vllm bench startup: error: this command is not supported"),
        (["launch", "render"], "vllm launch: error: this command is not supported"),
        (["chat", "--model-name", "x"], "--model-name says how to talk to a server, and needs --url"),
        (["serve", "--help=nosuch"], "--help=nosuch: there is no such group or flag"),
    ],
)
def test_what_is_not_done_is_refused_by_name(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        code = main([*flags, "-q", "hi"] if flags[0] == "chat" else flags)
    except SystemExit as end:
        code = end.code
    error = capsys.readouterr().err
    assert code == 2 and message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("asked", "shown", "hidden"),
    [
        ("all", "--max-model-len", ""),
        ("listgroup", "server\nengine", "--port"),
        ("Frontend", "--port", "--max-model-len"),
        ("CacheConfig", "--gpu-memory-utilization", "--port"),
        ("max-model-len", "--max-model-len INT", "--port"),
        ("--max_model_len", "--max-model-len INT", "--port"),
        ("lora", "--max-lora-rank", "--port"),
    ],
)
def test_parts_of_the_help(asked: str, shown: str, hidden: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["serve", f"--help={asked}"])
    out = capsys.readouterr().out
    assert end.value.code == 0 and shown in out
    assert not hidden or hidden not in out


def test_a_served_model_by_name(server: ScriptedServer, words: Words, capsys: pytest.CaptureFixture[str]) -> None:
    for command, path in (("chat", "/v1/chat/completions"), ("complete", "/v1/completions")):
        for name, model in (("second", "second"), ("", "Org/first")):
            words.calls.clear()
            flags = ["--url", server.url + "/v1", "--model-name", name, "--api-key", "k", "--max-tokens", "2"]
            assert main([command, *flags, "-q", "hi"]) == 0
            assert capsys.readouterr().out == "xx\n"
            assert (words.calls[0].path, words.calls[0].body["model"]) == (path, model)
            assert words.calls[0].headers["authorization"] == "Bearer k"
    assert main(["chat", "--url", server.url, "--model-name", "third", "-q", "hi"]) == 2
    assert "there is no 'third'" in capsys.readouterr().err


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_tiny_llm(make_tiny_model(tmp_path_factory.mktemp("tiny"))).llm_engine


@pytest.mark.parametrize("kind", ["throughput", "latency"])
def test_the_engine_over_texts_of_a_file(
    kind: str, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_run, "load_engine", lambda args: engine)
    texts, path = tmp_path / "texts.jsonl", tmp_path / "r.json"
    texts.write_text('{"prompt": "ab"}\n{"prompt": "abcd"}\n')
    size = [
        "--batch-size" if kind == "latency" else "--num-prompts",
        "2",
        "--num-iters-warmup",
        "0",
        "--num-iters",
        "2",
    ]
    flags = [*size, "--dataset-name", "custom", "--dataset-path", str(texts), "--output-len", "3"]
    assert main(["bench", kind, *flags, "--output-json", str(path), "--disable-detokenize"]) == 0
    result = json.loads(path.read_text())
    if kind == "latency":
        assert len(result["latencies"]) == 2 and list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    else:
        assert (result["num_requests"], result["total_num_tokens"]) == (2, 6 + 6)
        assert result["tokens_per_second"] * result["elapsed_time"] == pytest.approx(12)
