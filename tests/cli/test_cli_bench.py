"""`vllm bench latency` and `vllm bench throughput`: what they run and what they say about it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_llm import is_empty, make_tiny_llm, make_tiny_model

from vllm import LLM
from vllm.cli.bench import run as bench_run
from vllm.cli.main import main

KINDS = {"latency": "--batch-size", "throughput": "--num-prompts"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return make_tiny_llm(make_tiny_model(tmp_path_factory.mktemp("bench")))


@pytest.fixture
def requests(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """(prompt, params) of every request, in order."""
    engine, added = tiny.llm_engine, []
    add = engine.add_request

    def record(request_id: str, prompt: Any, params: Any) -> None:
        added.append((prompt, params))
        add(request_id, prompt, params)

    monkeypatch.setattr(engine, "add_request", record)
    monkeypatch.setattr(bench_run, "load_engine", lambda args: engine)
    yield added
    assert is_empty(tiny)


@pytest.mark.parametrize(("kind", "flag"), KINDS.items())
def test_the_workload_is_what_was_asked_for(
    kind: str, flag: str, requests: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = [flag, "3", "--input-len", "10", "--output-len", "4", "--num-ids", "5", "--warmup", "1", "--repeats", "2"]
    assert main(["bench", kind, *sizes, "--json", str(tmp_path / "r.json")]) == 0
    assert [len(prompt) for prompt, _ in requests] == [10] * 9
    assert len({tuple(prompt) for prompt, _ in requests}) == 9
    for _, params in requests:
        assert (params.max_tokens, params.ignore_eos, len(set(params.logprob_token_ids))) == (4, True, 5)
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["benchmark"], result["num_prompts"], result["input_len"]) == (kind, 3, 10)
    shown = capsys.readouterr().out
    for name, figure in result["figures"].items():
        assert name in shown
        assert len(figure["runs"]) == 2
        assert (figure["min"], figure["max"]) == (min(figure["runs"]), max(figure["runs"]))
        assert figure["median"] == statistics.median(figure["runs"])


def test_figures_follow_from_the_times(requests: list[Any], tmp_path: Path) -> None:
    sizes = ["--input-len", "10", "--output-len", "4", "--num-ids", "5", "--repeats", "1"]
    path = tmp_path / "r.json"
    assert main(["bench", "throughput", "--num-prompts", "3", *sizes, "--json", str(path)]) == 0
    figures = {name: figure["median"] for name, figure in json.loads(path.read_text())["figures"].items()}
    seconds = figures.pop("seconds")
    counts = {name: round(rate * seconds, 6) for name, rate in figures.items()}
    assert counts == {
        "prompts_per_second": 3,
        "prompt_tokens_per_second": 30,
        "output_tokens_per_second": 12,
        "ids_read_per_second": 60,
    }
    assert main(["bench", "latency", "--batch-size", "3", *sizes, "--json", str(path)]) == 0
    figures = {name: figure["median"] for name, figure in json.loads(path.read_text())["figures"].items()}
    first, further = figures["first_token_seconds"], figures["seconds_per_further_token"]
    assert 0 < first < figures["batch_seconds"]
    assert first + 3 * further == pytest.approx(figures["batch_seconds"])
    assert figures["output_tokens_per_second"] * figures["batch_seconds"] == pytest.approx(12)


def test_one_token_has_no_further_ones(requests: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", "--input-len", "4", "--output-len", "1", "--repeats", "1"]) == 0
    assert "first_token_seconds" in (out := capsys.readouterr().out) and "further" not in out
    assert main(["bench", "throughput", "--num-prompts", "2", "--output-len", "1", "--input-len", "4"]) == 0
    assert "ids_read" not in capsys.readouterr().out


def test_the_same_seed_is_the_same_workload(requests: list[Any]) -> None:
    flags = ["bench", "latency", "--input-len", "8", "--output-len", "1", "--num-ids", "3"]
    for seed in ("7", "7", "8"):
        assert main([*flags, "--seed", seed]) == 0
    runs = [[(prompt, params.logprob_token_ids) for prompt, params in requests[i : i + 4]] for i in (0, 4, 8)]
    assert runs[0] == runs[1] != runs[2]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--input-len", "0"], "argument --input-len/--random-input-len: must be at least 1, got 0"),
        (["--repeats", "0"], "argument --repeats/--num-iters: must be at least 1, got 0"),
        (["--num-ids", "-1"], "argument --num-ids: must be at least 0, got -1"),
        (["--output-len", "x"], "argument --output-len/--random-output-len"),
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_bad_flags(kind: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", kind, *flags])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_what_does_not_fit_the_model(requests: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "latency", "--input-len", "129"]) == 2
    assert "max_model_len=128" in capsys.readouterr().err
    assert main(["bench", "latency", "--num-ids", "100000"]) == 2
    assert "--num-ids must be at most the vocabulary's 268, got 100000" in capsys.readouterr().err
    assert main(["bench", "latency", "--json", str(tmp_path / "no" / "r.json")]) == 2
    assert "--json: there is no folder" in capsys.readouterr().err


def test_bench_needs_to_know_which(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench"])
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("vllm bench: error: the following arguments are required: COMMAND")


@pytest.mark.parametrize(("kind", "flag"), KINDS.items())
def test_what_drafts_bring(
    kind: str, flag: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    llm = make_tiny_llm(make_tiny_model(tmp_path_factory.mktemp("drafts")), speculative_config=drafts)
    monkeypatch.setattr(bench_run, "load_engine", lambda args: llm.llm_engine)
    sizes = [flag, "2", "--input-len", "20", "--output-len", "40", "--repeats", "2", "--warmup", "0"]
    assert main(["bench", kind, *sizes, "--json", str(tmp_path / "r.json")]) == 0
    figures = json.loads((tmp_path / "r.json").read_text())["figures"]
    stats = llm.llm_engine.engine_core.stats()
    assert stats["num_accepted_tokens"] > 0
    assert 0 <= figures["acceptance_rate"]["min"] <= figures["acceptance_rate"]["max"] <= 1
    assert 1 <= figures["acceptance_length"]["min"] <= figures["acceptance_length"]["max"] <= 5
    assert figures["accepted_tokens"]["max"] <= figures["draft_tokens"]["max"] <= 4 * figures["num_drafts"]["max"]
    rates = [figures[f"acceptance_rate_{place}"]["median"] for place in range(2)]
    assert 1 >= rates[0] >= rates[1] > 0
