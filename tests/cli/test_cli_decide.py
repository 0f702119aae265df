"""`vllm decide` from the command line to its files: rows, tables, resuming, servers, measures, calibrations."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_server import LiveServer
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm import LLM
from vllm.cli.main import main
from vllm.decisions.calibration import Calibration
from vllm.decisions.evaluation import evaluate
from vllm.scoring import batches as score_batches
from vllm.scoring import run as score_run
from vllm.scoring.decide.report import DecisionReport

NUM_TEXTS, TOO_LONG = 23, 5
QUESTIONS = [
    {"type": "predicate", "name": "late", "instructions": "Late?"},
    {"type": "choice", "name": "who", "instructions": "Who?", "choices": [{"value": "me"}, {"value": "you"}]},
    {"type": "score", "instructions": "Much?", "levels": [{"label": "no"}, {"label": "bit"}, {"label": "yes"}]},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=512)


@pytest.fixture(scope="module")
def tiny(model: Path) -> LLM:
    return make_tiny_llm(model, max_model_len=256)


@pytest.fixture
def loaded(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Commands take the model that is loaded already, in batches of 8."""
    monkeypatch.setattr(score_run, "load", lambda args: tiny)
    monkeypatch.setattr(score_batches, "BATCH_ROWS", 8)
    return tiny


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    generator = random.Random(0)
    rows: list[dict[str, Any]] = []
    for i in range(NUM_TEXTS):
        words = generator.choices(["stop", "é", "😀", "it is", "on", "late"], k=generator.randint(1, 5))
        gold = {"is_late": i % 3 == 0, "person": generator.choice(["me", "you"]), "degree": i % 3}
        rows.append({"text": " ".join(words), "id": i, **gold})
    rows[TOO_LONG]["text"] = "far too long " * 20
    rows[2]["person"] = None
    Path("a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("q.json").write_text(json.dumps(QUESTIONS))


def decide(*more: str) -> int:
    return main(["decide", "a.jsonl", "--questions", "q.json", "--quiet", *more])


def lines(path: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def test_rows_are_the_answers_of_llm_decide(loaded: LLM) -> None:
    assert decide("--output", "o.jsonl", "--read", "values", "--permutations", "2") == 1
    rows = lines("o.jsonl")
    assert [row["id"] for row in rows] == list(range(NUM_TEXTS))
    assert "questions[0] ('late') makes a prompt of" in rows[TOO_LONG]["error"] and "answers" not in rows[TOO_LONG]
    (decision,) = loaded.decide(rows[0]["text"], QUESTIONS, read="values", permutations=2, use_tqdm=False)
    late, who, much = rows[0]["answers"].values()
    assert list(rows[0]["answers"]) == ["late", "who", "question_2"]
    assert rows[0]["num_prompt_tokens"] == decision.usage.input_tokens
    for own, answer in zip((late, who, much), decision.answers, strict=True):
        diagnostics = answer.diagnostics
        assert own["type"] == answer.type
        assert list(own["raw_probabilities"].values()) == pytest.approx(diagnostics.probabilities, abs=1e-5)
        assert list(own["logprobs"].values()) == pytest.approx(
            [each.logprob for each in diagnostics.orders[0].options], abs=1e-4
        )
        assert own["ranks"] == dict(
            zip(own["ranks"], (each.rank for each in diagnostics.orders[0].options), strict=True)
        )
        assert own["label_mass"] == pytest.approx(diagnostics.label_mass, abs=1e-5)
        assert own["order_sensitivity"] == pytest.approx(diagnostics.order_sensitivity, abs=1e-5)
    assert late["probabilities"]["true"] == pytest.approx(decision.answers[0].probability, abs=1e-5)
    assert who["prediction"] == max(who["probabilities"], key=who["probabilities"].get) == decision.answers[1].choice
    assert much["score"] == pytest.approx(decision.answers[2].score, abs=1e-5)
    assert much["prediction"] == ["no", "bit", "yes"][int(max(much["probabilities"], key=much["probabilities"].get))]


def test_tables_hold_what_jsonl_holds(loaded: LLM) -> None:
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    for name in ("o.jsonl", "o.csv", "o.parquet"):
        assert decide("--output", name) == 1
    wanted = lines("o.jsonl")
    left = {path.name for path in Path().glob("o.*")}
    assert left == {f"o.{form}{end}" for form in ("jsonl", "csv", "parquet") for end in ("", ".meta.json")}
    table = pq.read_table("o.parquet").to_pylist()
    assert table[TOO_LONG]["answers"] is None and table[TOO_LONG]["error"] == wanted[TOO_LONG]["error"]
    wanted_rows = [{"answers": None, "error": None, **row} for row in wanted]
    assert [{name: row[name] for name in wanted_rows[0]} for row in table] == wanted_rows
    with open("o.csv", encoding="utf-8", newline="") as file:
        cells = list(csv.DictReader(file))
    assert cells[0]["late.prediction"] == wanted[0]["answers"]["late"]["prediction"]
    assert float(cells[1]["who.confidence"]) == wanted[1]["answers"]["who"]["confidence"]
    assert json.loads(cells[1]["question_2.ranks"]) == wanted[1]["answers"]["question_2"]["ranks"]
    assert cells[TOO_LONG]["late.prediction"] == "" and cells[TOO_LONG]["error"] == wanted[TOO_LONG]["error"]


@pytest.mark.parametrize("output", ["o.jsonl", "o.parquet"])
def test_a_killed_run_is_continued(
    output: str, loaded: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if output.endswith("parquet"):
        pytest.importorskip("pyarrow")
    assert decide("--output", f"whole.{output}") == 1

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(DecisionReport, "add", append_then_stop(DecisionReport.add, 11))
        assert decide("--output", output) == 130
    assert decide("--output", output) == 2
    assert "exists; --resume continues it" in capsys.readouterr().err
    assert decide("--output", output, "--resume", "--permutations", "2") == 2
    assert "permutations 1, not 2" in capsys.readouterr().err
    assert decide("--output", output, "--resume") == 1
    assert Path(output).read_bytes() == Path(f"whole.{output}").read_bytes()


def append_then_stop(add: Any, count: int) -> Any:
    """A report's `add` that is interrupted at a row."""
    seen = []

    def stopping(self: Any, *row: Any, **how: Any) -> None:
        add(self, *row, **how)
        seen.append(row)
        if len(seen) == count:
            raise KeyboardInterrupt

    return stopping


def test_a_server_gives_the_same_rows(loaded: LLM, model: Path) -> None:
    Path("c.json").write_text('{"temperature": 2.0}')
    common = ["--permutations", "2", "--calibration", "c.json"]
    assert decide("--output", "local.jsonl", *common) == 1
    with LiveServer(model, "--max-model-len", "256") as server:
        assert decide("--output", "served.jsonl", "--url", server.url, *common) == 1
    for own, wanted in zip(lines("served.jsonl"), lines("local.jsonl"), strict=True):
        assert own.pop("error", None) == wanted.pop("error", None)
        if "answers" in wanted:
            assert own == nearly(wanted)


def nearly(value: Any) -> Any:
    """Equal but for the last bits of floats."""
    if isinstance(value, dict):
        return {name: nearly(each) for name, each in value.items()}
    return pytest.approx(value, abs=1e-5) if isinstance(value, float) else value


def test_rays_parts_are_the_rows_of_a_run_without_it(loaded: LLM, model: Path, ray_cluster: str) -> None:
    engine = ["--model", str(model), "--dtype", "float32", "--max-model-len", "256"]
    assert decide("--output", "whole.jsonl") == 1
    ray = ["--backend", "ray", "--replica-cpus", "1"]
    assert decide("--output", "parts", *ray, *engine) == 1
    joined = b"".join(path.read_bytes() for path in sorted(Path("parts").glob("part-*")))
    assert joined == Path("whole.jsonl").read_bytes()


def test_known_answers_measure_the_probabilities(loaded: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    gold = ["--gold", "late=is_late", "who=person", "question_2=degree"]
    assert main(["decide", "a.jsonl", "--questions", "q.json", "--output", "o.jsonl", *gold]) == 1
    printed = capsys.readouterr().out
    measured = json.loads(Path("o.evaluation.json").read_text())["questions"]
    assert Path("o.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    rows = [row for row in lines("o.jsonl") if "answers" in row]
    known = {
        "late": [(row, 0 if row["is_late"] else 1) for row in rows],
        "who": [(row, ["me", "you"].index(row["person"])) for row in rows if row["person"] is not None],
        "question_2": [(row, row["degree"]) for row in rows],
    }
    for name, pairs in known.items():
        shares = [list(row["answers"][name]["probabilities"].values()) for row, _ in pairs]
        wanted = evaluate(shares, [index for _, index in pairs], measured[name]["labels"])
        assert measured[name] == wanted.to_dict()
        right = round(wanted.accuracy * wanted.num_rows)
        assert f"{name}: accuracy {right} of {wanted.num_rows}" in printed
        assert f"calibration error {wanted.ece:.4f}" in printed
    assert measured["who"]["num_rows"] == NUM_TEXTS - 2, "neither the row without a label nor the one that failed"
    for part in ("o.jsonl", "o.evaluation.json", "o.png", "prompts/s", "known \\ predicted"):
        assert part in printed


def test_a_fitted_calibration_is_applied_to_later_runs(loaded: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    gold = ["--gold", "late=is_late", "who=person", "--fit-calibration", "c.json"]
    assert main(["decide", "a.jsonl", "--questions", "q.json", "--output", "o.jsonl", "--no-picture", *gold]) == 1
    printed = capsys.readouterr().out
    assert "late: fitted on 11 rows, measured on the 11 others" in printed
    held_out = json.loads(Path("o.evaluation.json").read_text())["held_out"]["late"]
    for when in ("before", "after"):
        assert f"{held_out[when]['ece']:.4f} {when}" in printed
    fitted = Calibration.load("c.json")
    assert sorted(fitted.names) == ["late", "who"] and fitted.names["who"].labels == ["me", "you"]

    assert decide("--output", "again.jsonl", "--calibration", "c.json", "--gold", "late=is_late", "--no-picture") == 1
    after = json.loads(Path("again.evaluation.json").read_text())["questions"]["late"]
    before = json.loads(Path("o.evaluation.json").read_text())["questions"]["late"]
    assert after["log_loss"] < before["log_loss"]
    for raw, own in zip(lines("o.jsonl"), lines("again.jsonl"), strict=True):
        for name, answer in own.get("answers", {}).items():
            was = raw["answers"][name]
            assert answer["raw_probabilities"] == was["raw_probabilities"] == nearly(was["probabilities"])
            keys = list(answer["probabilities"])
            scaling = fitted.names.get(name)
            if scaling is None:
                assert answer["probabilities"] == was["probabilities"]
            else:
                expected = scaling.apply(np.asarray([was["probabilities"][key] for key in keys]), keys)
                assert list(answer["probabilities"].values()) == pytest.approx(expected.tolist(), rel=1e-9)


def test_refusals_are_rows_and_are_not_measured(loaded: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    refused = ["--min-label-mass", "1", "--gold", "late=is_late", "--no-picture"]
    assert decide("--output", "o.jsonl", *refused) == 1
    answer = lines("o.jsonl")[0]["answers"]["late"]
    assert (answer["type"], answer["prediction"], answer["probabilities"]) == ("refusal", None, None)
    assert 0 < answer["label_mass"] < 1
    assert f"{NUM_TEXTS - 1} refusals of 'late' are not measured" in capsys.readouterr().err
    assert json.loads(Path("o.evaluation.json").read_text())["questions"] == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--output", "o.txt"], "--output must end in .jsonl, .csv, .parquet, got o.txt"),
        (["--gold", "late=is_late", "--picture", "q.json.png", "--output", "a.jsonl"], "would overwrite FILE"),
        (["--gold", "late=is_late", "--fit-calibration", "q.json"], "would overwrite --questions"),
        (["--gold", "late"], "write QUESTION=COLUMN, with one of the questions late, who, question_2"),
        (["--gold", "late=nothing"], "a.jsonl:1: no field 'nothing' for --gold"),
        (["--gold", "late=person"], "a.jsonl:1: 'person' (--gold) is"),
        (["--gold", "who=person", "who=person"], "two columns for the question 'who'"),
        (["--gold", "late=is_late", "--limit", "1", "--fit-calibration", "c.json"], "1 rows have a known answer"),
        (["--gold", "question_2=degree", "--fit-calibration", "c.json"], "questions[2] has no name"),
        (["--fit-calibration", "c.json"], "--fit-calibration needs --gold"),
        (["--picture", "p.png"], "--picture needs --gold"),
        (["--gold", "late=is_late", "--picture", "p.gif"], "--picture must end in"),
        (["--gold", "late=is_late", "--fit-calibration", "o.jsonl", "--output", "o.jsonl"], "would overwrite --output"),
        (["--gold", "late=is_late", "--backend", "ray"], "--gold and --backend ray exclude each other"),
        (["--calibration", "absent.json"], "cannot read absent.json"),
        (["--calibration", "other.json"], "calibration is for the labels ['a', 'b'], and questions[1] ('who')"),
        (["--min-label-mass", "2"], "min_label_mass must be in [0, 1], got 2"),
        (["--permutations", "65"], "permutations must be at most 64"),
        (["--truncate-prompt-tokens", "0"], "truncate_prompt_tokens must be -1 or at least 1"),
        (["--questions", "absent.json"], "cannot read absent.json"),
        (["--questions", "a.jsonl"], "a.jsonl: not JSON"),
        (["--questions", "none.json"], "none.json: questions must hold at least 1"),
        (["--questions", "twice.json"], "two questions have the name 'late'"),
        (["--replicas", "2"], "--replicas needs --backend ray"),
        (["--limit", "0"], "--limit must be at least 1"),
    ],
)
def test_refused_before_a_model_loads(
    arguments: list[str], message: str, no_load: None, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("other.json").write_text(json.dumps({"names": {"who": {"temperature": 2, "labels": ["a", "b"]}}}))
    Path("none.json").write_text("[]")
    Path("twice.json").write_text(json.dumps({"questions": [QUESTIONS[0]] * 2}))
    assert decide(*arguments) == 2
    error = capsys.readouterr().err.strip().split("\n")[-1]
    assert error.startswith("vllm decide: error: ") and message in error


def test_questions_that_no_text_could_be_asked_end_the_run(loaded: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    long = {"type": "predicate", "name": "long", "instructions": "so long " * 60}
    Path("q.json").write_text(json.dumps([long]))
    assert decide() == 2
    assert "questions[0] ('long') makes a prompt of" in capsys.readouterr().err
