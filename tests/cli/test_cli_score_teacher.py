"""`vllm score` as a teacher: rollouts of ids and texts to Parquet, by an engine, a server and Ray; resumed, refused."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from byte_tokenizer import VOCAB_SIZE, byte_ids
from live_server import LiveServer
from tiny_llm import make_tiny_llm
from transformers import AutoModelForCausalLM

from vllm import LLM
from vllm.cli.main import build_parser, main
from vllm.scoring import run as score_run
from vllm.scoring.batches import batches
from vllm.scoring.part_files import PartRun
from vllm.scoring.rows import PartFolder
from vllm.scoring.teacher.task import TeacherTask

NUM_ROLLOUTS, TOO_LONG, WRONG = 9, 4, 6
RNG = np.random.default_rng(0)
STUDENT = ["--prompt-ids-field", "topk", "--student-logprobs-field", "said"]


def make_rollout(index: int) -> dict[str, Any]:
    """A rollout of 12 to 20 tokens, the last few of which have lists of 0 to 3 ids."""
    text = "a rollout " + "x" * (index + 2)
    num_rows = 3 + index
    lists = [RNG.permutation(VOCAB_SIZE)[: row % 4].tolist() for row in range(num_rows)]
    said = [np.log(RNG.dirichlet(np.ones(5))[: len(ids)]).tolist() for ids in lists]
    return {"text": text, "ids": byte_ids(text), "topk": lists, "said": said, "name": f"r{index}", "start": index}


ROLLOUTS = [make_rollout(index) for index in range(NUM_ROLLOUTS)]
ROLLOUTS[TOO_LONG]["ids"] = [5] * 200
ROLLOUTS[TOO_LONG]["text"] = "far too long " * 20
ROLLOUTS[WRONG]["topk"][1] = [VOCAB_SIZE]


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return make_tiny_llm(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROLLOUTS))
    monkeypatch.setattr(score_run, "load", lambda args: llm)
    monkeypatch.setattr(TeacherTask, "batch_rows", 4)


def rows_of(output: str) -> list[dict[str, Any]]:
    return pa.concat_tables(pq.read_table(path) for path in sorted(Path(output).glob("part-*.parquet"))).to_pylist()


def teach(output: str, *more: str, file: str = "a.jsonl") -> int:
    return main(["score", file, "--output", output, "--quiet", *more])


def assert_true(row: dict[str, Any], rollout: dict[str, Any], reference: Any) -> None:
    """The row has what the reference says of the rollout's last positions."""
    ids, lists = rollout["ids"], rollout["topk"]
    with torch.no_grad():
        logits = reference(torch.tensor([ids])).logits[0].numpy()[-1 - len(lists) : -1]
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    assert row["prompt_token_ids"] == ids and row["num_prompt_tokens"] == len(ids) and row["error"] is None
    assert row["first_position"] == len(ids) - len(lists)
    assert row["token_ids"] == lists
    own = ids[-len(lists) :]
    every = np.arange(len(own))
    np.testing.assert_allclose(row["own_logprobs"], logprobs[every, own], atol=1e-4)
    np.testing.assert_allclose(row["own_logits"], logits[every, own], atol=1e-4)
    np.testing.assert_allclose(row["lse"], (logits - logprobs)[:, 0], atol=1e-4)
    for index, (asked, said) in enumerate(zip(lists, rollout["said"], strict=True)):
        np.testing.assert_allclose(row["logprobs"][index], logprobs[index, asked], atol=1e-4)
        np.testing.assert_allclose(row["logits"][index], logits[index, asked], atol=1e-4)
        ranks = 1 + (logits[index][None] > logits[index, asked][:, None]).sum(axis=1)
        np.testing.assert_array_equal(row["ranks"][index], ranks)
        q = np.exp(logprobs[index, asked])
        p, q = np.append(np.exp(said), 1 - np.exp(said).sum()), np.append(q, 1 - q.sum())
        p[p < 1e-12] = 1e-300
        assert row["reverse_kl"][index] == pytest.approx((p * np.log(p / q)).sum(), abs=1e-4)


def assert_rows(rows: list[dict[str, Any]], reference: Any, dropped: tuple[str, ...] = ("ids",)) -> None:
    assert [row["index"] for row in rows] == list(range(NUM_ROLLOUTS))
    for row, rollout in zip(rows, ROLLOUTS, strict=True):
        assert row["name"] == rollout["name"] and not {"topk", "said", *dropped} & set(row)
        if row["index"] in (TOO_LONG, WRONG):
            assert row["logprobs"] is row["own_logprobs"] is row["reverse_kl"] is None
        else:
            assert_true(row, rollout, reference)
    assert "128" in rows[TOO_LONG]["error"] and rows[TOO_LONG]["num_prompt_tokens"] == 200
    assert "prompt_logprob_token_ids" in rows[WRONG]["error"]


def test_rollouts_of_ids(reference: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert teach("out", "--text-field", "ids", *STUDENT) == 1
    assert_rows(rows_of("out"), reference)
    assert "2 of 9 texts failed, first a.jsonl:5:" in capsys.readouterr().err
    assert len(list(Path("out").iterdir())) == 3


def test_rollouts_from_parquet(reference: Any) -> None:
    pq.write_table(pa.Table.from_pylist(ROLLOUTS), "a.parquet")
    assert teach("out", "--text-field", "ids", *STUDENT, file="a.parquet") == 1
    assert_rows(rows_of("out"), reference)


def test_rollouts_of_texts_and_the_arrays_asked_for() -> None:
    few = [{**row, "start": 5} for row in ROLLOUTS[:3]]
    Path("b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in few))
    more = ["--prompt-tables", "own_logprobs", "entropy", "--prompt-start-field", "start"]
    assert teach("own", "--prompt-logprobs", "0", *more, file="b.jsonl") == 0
    for row, rollout in zip(rows_of("own"), few, strict=True):
        assert row["text"] == rollout["text"] and row["ids"] == json.dumps(rollout["ids"])
        assert len(row["own_logprobs"]) == len(row["entropy"]) == len(rollout["ids"]) - 6
        assert "token_ids" not in row and row["first_position"] == 6
    assert teach("top", "--prompt-logprobs", "3", file="b.jsonl") == 0
    for row, rollout in zip(rows_of("top"), few, strict=True):
        assert [len(ids) for ids in row["token_ids"]] == [3] * (len(rollout["ids"]) - 1)
        assert all(ranks == [1, 2, 3] for ranks in row["ranks"])
        assert row["reverse_kl"] if "reverse_kl" in row else row["first_position"] == 1


def test_a_killed_run_goes_on(monkeypatch: pytest.MonkeyPatch, reference: Any, capsys: Any) -> None:
    teach("whole", "--text-field", "ids", *STUDENT)
    with monkeypatch.context() as patch:

        def die(self: PartFolder, number: int, content: bytes, plain: Any = PartFolder.write) -> None:
            if number == 1:
                raise KeyboardInterrupt
            plain(self, number, content)

        patch.setattr(PartFolder, "write", die)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            raise SystemExit(teach("out", "--text-field", "ids", *STUDENT))
    first = Path("out/part-00000000.parquet")
    before = first.stat().st_mtime_ns
    assert sorted(os.listdir("out")) == [first.name]
    assert teach("out", "--text-field", "ids", *STUDENT) == 2
    assert "--resume" in capsys.readouterr().err
    assert teach("out", "--text-field", "ids", *STUDENT, "--resume", "--prompt-tables", "lse") == 2
    assert "names" in capsys.readouterr().err
    assert teach("out", "--text-field", "ids", *STUDENT, "--resume") == 1
    assert first.stat().st_mtime_ns == before
    assert rows_of("out") == rows_of("whole")
    assert_rows(rows_of("out"), reference)


def test_a_server_reads(folder: Path, reference: Any) -> None:
    with LiveServer(folder, "--dtype", "float32", "--max-model-len", "128", env={"OMP_NUM_THREADS": "1"}) as server:
        for output, field in (("ids", "ids"), ("texts", "text")):
            assert teach(output, "--text-field", field, *STUDENT, "--url", server.url) == 1
            found = rows_of(output)
            if field == "ids":
                assert_rows(found, reference)
            else:
                assert (
                    found[0]["token_ids"] == ROLLOUTS[0]["topk"] and found[0]["prompt_token_ids"] == ROLLOUTS[0]["ids"]
                )


def test_a_batch_is_a_job_for_any_engine(llm: LLM, reference: Any) -> None:
    """As engines on a Ray cluster get it."""
    args = build_parser().parse_args(["score", "a.jsonl", "--text-field", "ids", *STUDENT, "--backend", "ray"])
    run = PartRun.of(args, TeacherTask(args))
    job = pickle.loads(pickle.dumps(run.job))
    scorer = job.make_scorer(llm)
    Path("out").mkdir()
    for part in (2, 0, 1):
        items = list(batches(run.texts, 4))[part]
        result = job.score(scorer, part, pickle.dumps(items))
        assert (result.part, result.num_failed) == (part, 2 * (part == 1))
        Path(f"out/part-{part}.parquet").write_bytes(result.content)
    assert_rows(rows_of("out"), reference)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ([], "one of --labels, --label-ids, --prompt-logprobs, --prompt-ids-field is required"),
        (["--labels", "a", "--prompt-logprobs", "1"], "--labels has no meaning for readings of prompts"),
        (["--labels", "a", "--prompt-tables", "lse"], "--prompt-tables has no meaning for labels"),
        (["--prompt-logprobs", "1", "--template", "{text}"], "--template has no meaning for readings"),
        (["--prompt-logprobs", "1", "--student-logprobs-field", "said"], "needs --prompt-ids-field"),
        (["--prompt-logprobs", "0", "--prompt-tables", "ranks"], "ranks needs --prompt-ids-field or"),
        (["--prompt-logprobs", "1", "--prompt-tables", "forward_kl"], "forward_kl needs --student-logprobs-field"),
        (["--prompt-ids-field", "no"], "a.jsonl:1: no field 'no'; there is 'text', "),
        (["--prompt-ids-field", "name"], "a.jsonl:1: field 'name' must be a list, got str"),
        (["--prompt-logprobs", "1", "--prompt-start-field", "name"], "field 'name' must be an integer, got str"),
        (["--prompt-logprobs", "1", "--text-field", "start"], "must be a string or a list of token ids, got a number"),
        (["--labels", "a", "--text-field", "ids"], "field 'ids' must be a string, got a list"),
        (["--prompt-logprobs", "1", "--output", "a.jsonl"], "a.jsonl is a file; it is to be a folder"),
        (["--prompt-logprobs", "1", "--backend", "ray", "--output-format", "csv"], "must be parquet"),
    ],
)
def test_what_cannot_be_asked(
    flags: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(args: Any) -> LLM:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(score_run, "load", refuse)
    assert main(["score", "a.jsonl", *flags]) == 2
    assert says in capsys.readouterr().err
