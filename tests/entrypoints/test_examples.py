"""The examples run, and print what they promise."""

from __future__ import annotations

import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from byte_tokenizer import VOCAB_SIZE, byte_id
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import LLM, SamplingParams

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_offline_example_runs(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["offline_logprob_token_ids.py"])
    monkeypatch.setattr("vllm.LLM", lambda model: llm)
    runpy.run_path(str(EXAMPLES / "offline_logprob_token_ids.py"), run_name="__main__")
    out = capsys.readouterr().out
    assert all(f"{label!r} " in out for label in (" Yes", " No", " A", " B", " C", " D"))
    assert out.count("label mass: 0.") == 2


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def run_get_logits_by_index(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["get_logits_by_index.py", *map(str, arguments)])
    runpy.run_path(str(EXAMPLES / "get_logits_by_index.py"), run_name="__main__")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_get_logits_by_index(
    num_ranks: int,
    tiny_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts, indices, path = ["The sky is", "1"], [byte_id(65), 2, VOCAB_SIZE - 1], tmp_path / "logits.json"
    options = ["--max-tokens", 3, "--tensor-parallel-size", num_ranks, "--json", path]
    run_get_logits_by_index(monkeypatch, "--model", tiny_folder, "--prompts", *prompts, "--indices", *indices, *options)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("LogitsCapturingSampler saw the same logits")
    rows = json.loads(path.read_text())

    wanted = SamplingParams(temperature=0, max_tokens=3, logprob_token_ids=indices)
    outputs = make_tiny_llm(tiny_folder).generate(prompts, wanted, use_tqdm=False)
    expected = [
        (output.prompt, number, index, position[index])
        for output in outputs
        for number, position in enumerate(output.outputs[0].logprobs)
        for index in indices
    ]
    assert len(rows) == len(lines) - 2 == len(expected) > 0
    for row, line, (prompt, number, index, reading) in zip(rows, lines[1:], expected, strict=False):
        assert (row["prompt"], row["position"], row["token_id"]) == (prompt, number, index)
        assert (row["token"], row["rank"]) == (reading.decoded_token, reading.rank)
        assert row["logit"] == pytest.approx(reading.logit, abs=1e-4)
        assert row["logprob"] == pytest.approx(reading.logprob, abs=1e-4)
        shown = (str(index), repr(row["token"]), f"{row['logit']:.4f}", f"{row['logprob']:.4f}", repr(prompt))
        assert all(text in line for text in shown)


def test_get_logits_by_index_says_when_the_logits_differ(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "vllm.v1.sample.logits_capturing_sampler.LogitsCapturingSampler.get_captured_logits"
    monkeypatch.setattr(name, lambda *_: torch.zeros(1, 1))
    run_get_logits_by_index(monkeypatch, "--model", tiny_folder, "--prompts", "a", "--indices", 5)
    assert capsys.readouterr().out.splitlines()[-1].startswith("LogitsCapturingSampler saw other logits, by up to ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tensor-parallel-size", 3), "tensor_parallel_size=3 does not fit the model's num_attention_heads=4"),
        (("--indices", VOCAB_SIZE), f"got {VOCAB_SIZE}"),
        (("--max-tokens", 0), "--max-tokens must be at least 1, got 0"),
    ],
    ids=str,
)
def test_get_logits_by_index_names_what_is_wrong(
    tiny_folder: Path,
    arguments: tuple,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises((ValueError, SystemExit)) as caught:
        run_get_logits_by_index(monkeypatch, "--model", tiny_folder, *arguments)
    text = capsys.readouterr().err if caught.type is SystemExit else str(caught.value)
    assert re.search(message, text)
