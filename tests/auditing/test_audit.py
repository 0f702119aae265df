"""`vllm audit` and `vllm.audit` from rows to what they found, on a random model."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import numpy as np
import pytest
from tiny_llm import make_tiny_llm, make_tiny_model

import vllm
from vllm.auditing import readings as readings_module
from vllm.cli.main import main
from vllm.exceptions import VLLMValidationError

LABELS = ["a", "b", "cd"]
TEXTS = ["one", "two and three", "four", "five six seven", "eight " * 40, "nine"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = [{"text": text, "label": "a" if i % 2 else "cd", "kind": f"k{i % 2}"} for i, text in enumerate(TEXTS)]
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def audited(model: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A folder with the results of one audit, and its exit code."""
    folder = tmp_path_factory.mktemp("audit")
    arguments = [str(rows), "--labels", *LABELS, "--template", "{text}:", "--reference", f"{model}:float32"]
    arguments += ["--candidate", f"{model}:bfloat16", "--candidate", "reference", "--by", "kind"]
    arguments += ["--readings", str(folder / "readings"), "--output", str(folder / "a.json"), "--quiet"]
    arguments += ["--page", str(folder / "a.html"), "--max-model-len", "128", "--budget", "flips<=99%"]
    return folder, main(["audit", *arguments])


def test_the_json_has_what_the_engine_reads(audited, model):
    folder, code = audited
    assert code == 0
    found = json.loads((folder / "a.json").read_text())
    assert found["version"] == 1 and found["reference"]["name"] == f"{model}:float32"
    # The long text fits in no context: five of six are compared.
    assert [each["rows"] for each in found["candidates"]] == [5, 5] and found["reference"]["failed"] == 1
    tables = []
    for dtype in ("float32", "bfloat16"):
        llm = make_tiny_llm(model, dtype=dtype)
        prompts = [f"{text}:" for text in TEXTS if len(text) < 100]
        tables.append(np.stack([each.logprobs for each in llm.score_labels(prompts, LABELS, use_tqdm=False)]))
    own, other = (each.astype(np.float64) for each in tables)
    p, q = (np.exp(each) / np.exp(each).sum(1, keepdims=True) for each in (own, other))
    labels = found["candidates"][0]["labels"]
    assert labels["flips"] == (own.argmax(1) != other.argmax(1)).sum()
    assert labels["kl_mean"] == pytest.approx((p * np.log(p / q)).sum(1).mean(), rel=1e-3, abs=1e-9)
    assert labels["abs_delta_logprob"]["mean"] == pytest.approx(np.abs(other - own).mean(), rel=1e-3)
    assert {"mean", "p99"} <= set(labels["abs_delta_logprob"]) and labels["tv_mean"] > 0
    assert labels["gold"]["rows"] == 5
    assert [group["group"] for group in found["candidates"][0]["by"]["kind"]] == ["k1", "k0"]
    for each in (found["reference"], *found["candidates"]):
        assert each["seconds"] > 0 and each["peak_mib"] > 50
    assert found["budget"]["cheapest"] in [each["name"] for each in found["candidates"]]


def test_the_reference_in_other_company_has_no_spread(audited):
    folder, _ = audited
    labels = json.loads((folder / "a.json").read_text())["candidates"][1]["labels"]
    assert (labels["flips"], labels["kl_mean"], labels["abs_delta_logprob"]["max"]) == (0, 0, 0)


def test_the_page_needs_nothing_from_outside(audited):
    folder, _ = audited
    page = (folder / "a.html").read_text()
    assert page.count("<svg") >= 4 and "<script" not in page and 'src="http' not in page and "<link" not in page


def test_readings_that_are_there_are_used_again(audited, model, rows, monkeypatch):
    """A later audit of the same rows starts no process for the reference; results are arrays as well."""
    folder, _ = audited

    def refuse(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(readings_module.subprocess, "run", refuse)
    found = vllm.audit(
        rows,
        labels=LABELS,
        template="{text}:",
        reference=f"{model}:float32",
        candidates=[f"{model}:bfloat16"],
        readings=folder / "readings",
        max_model_len=128,
    )
    table = found.candidates[0].label_tables[""]
    assert table.reference.shape == (5, 3) and table.reference.dtype == np.float32
    assert found.candidates[0].labels.rows == 5


def test_gold_of_no_label_is_named(audited, model, rows):
    folder, _ = audited
    options = {"labels": LABELS, "template": "{text}:", "reference": f"{model}:float32", "max_model_len": 128}
    with pytest.raises(VLLMValidationError, match="--gold kind: no row has one of the labels there"):
        vllm.audit(rows, candidates=f"{model}:bfloat16", gold="kind", readings=folder / "readings", **options)


def test_a_killed_run_goes_on_where_it_was(audited, model, rows, tmp_path):
    """Half of a row is cut off, and all rows are as they were."""
    folder, _ = audited
    own = json.loads((folder / "a.json").read_text())["candidates"][0]["readings"]
    whole = Path(own).read_bytes()
    lines = whole.splitlines(keepends=True)
    Path(own).write_bytes(b"".join(lines[:3]) + lines[3][:20])
    Path(f"{own}.cost.json").unlink()
    found = vllm.audit(
        rows,
        labels=LABELS,
        template="{text}:",
        reference=f"{model}:float32",
        candidates=f"{model}:bfloat16",
        readings=folder / "readings",
        max_model_len=128,
    )
    assert Path(own).read_bytes() == whole and found.candidates[0].seconds > 0


def test_a_full_disk_is_named_and_loses_nothing(audited, model, rows, tmp_path, capsys):
    """A limit of file sizes is met as a full disk is: in the middle of the rows."""
    folder, _ = audited
    done = json.loads((folder / "a.json").read_text())["candidates"][0]["readings"]
    whole, readings = Path(done).read_bytes(), tmp_path / "r"
    arguments = [str(rows), "--labels", *LABELS, "--template", "{text}:", "--reference", f"{model}:bfloat16"]
    arguments += ["--candidate", "reference", "--max-model-len", "128", "--readings", str(readings), "--quiet"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Above the files beside the rows.
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) * 3 // 4, hard))
    try:
        assert main(["audit", *arguments]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (file,) = readings.glob("*.jsonl")
    error = capsys.readouterr().err
    assert "cannot write" in error and file.name in error
    kept = file.read_bytes()
    assert 0 < len(kept) < len(whole) and kept.rpartition(b"\n")[0] == whole[: len(kept)].rpartition(b"\n")[0]
    assert main(["audit", *arguments]) == 0
    assert file.read_bytes() == whole


def _refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_what_cannot_be_read_is_said_before_a_model_loads(model, rows, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(readings_module.subprocess, "run", lambda *_, **__: pytest.fail("a model was loaded"))
    base = ["--reference", f"{model}:float32", "--candidate", "bfloat16"]
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    _refused([str(empty), "--labels", "a", *base], "no texts", capsys)
    _refused([str(tmp_path / "none.jsonl"), "--labels", "a", *base], "none.jsonl", capsys)
    _refused([str(rows), *base], "--text-field", capsys)
    _refused(
        [str(rows), "--labels", "a", "--reference", f"{model}:float33", "--candidate", "bfloat16"], "float33", capsys
    )
    _refused([str(rows), "--labels", "a", *base, "--budget", "speed<=1"], "--budget", capsys)
    _refused([str(rows), "--labels", "a", *base, "--chunk-tokens", "8"], "--chunk-tokens", capsys)
    _refused([str(rows), "--labels", "a", *base, "--model", "m"], "--model", capsys)
    _refused([str(rows), "--labels", "a", *base, "--by", "kind", "size"], "--by: no row has a field 'size'", capsys)
    _refused([str(rows), "--labels", "a", *base, "--gold", "truth"], "--gold: no row has a field 'truth'", capsys)
    _refused([str(rows), "--labels", "a", *base, "--candidate", "colour=red"], "red", capsys)
    _refused([str(rows), "--text-field", "text", *base, "--candidate", "http://127.0.0.1:1"], "no answer", capsys)


def test_another_vocabulary_is_named(model, rows, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    other = make_tiny_model(tmp_path / "other")
    file = other / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    first, second = list(vocabulary)[5:7]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(content))
    arguments = [str(rows), "--labels", "a", "--reference", f"{model}:float32", "--candidate", str(other)]
    _refused(arguments, "another vocabulary", capsys)


def test_texts_are_read_over_the_whole_vocabulary(model, rows, tmp_path):
    """Against the engine's own tables of both, position by position; the texts come from a folder."""
    folder = tmp_path / "texts"
    folder.mkdir()
    texts = ["a text of some words", "another one, which is longer", "x" * 200]
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_text(text)
    found = vllm.audit(
        folder,
        reference=f"{model}:float32",
        candidates=["bfloat16", "reference"],
        readings=tmp_path / "readings",
        max_model_len=128,
    )
    statistics, tables = found.candidates[0].text, []
    assert statistics is not None and statistics.texts == 2 and found.reference.failed == 1
    for dtype in ("float32", "bfloat16"):
        llm = make_tiny_llm(model, dtype=dtype, max_logprob_token_ids=-1)
        everything = list(range(llm.model_config.vocab_size))
        params = vllm.SamplingParams(max_tokens=0, prompt_logprob_token_ids=everything)
        outputs = llm.generate(texts[:2], params, use_tqdm=False)
        tables.append([(each.prompt_tables.logprobs.astype(np.float64), each.prompt_token_ids) for each in outputs])
    own, other = (np.concatenate([logprobs for logprobs, _ in each]) for each in tables)
    following = np.concatenate([ids[1:] for _, ids in tables[0]])
    kl = (np.exp(own) * (own - other)).sum(1)
    assert statistics.positions == len(kl)
    # The sums of bfloat16 are those of another batch, and a KL of 1e-6 is a difference of logprobs near 0.
    assert statistics.kl_mean == pytest.approx(kl.mean(), rel=1e-3)
    assert statistics.kl_p999 == pytest.approx(np.quantile(kl, 0.999), rel=1e-3)
    assert statistics.top1_agreement == (own.argmax(1) == other.argmax(1)).mean()
    places = np.arange(len(following))
    losses = [-each[places, following].mean() for each in (own, other)]
    assert statistics.perplexity_ratio == pytest.approx(np.exp(losses[1] - losses[0]), rel=1e-5)
    assert found.candidates[1].text.kl_max == 0 and found.candidates[1].text.top1_agreement == 1


def test_pieces_are_read_as_llama_cpp_reads_them(model, tmp_path):
    """Each whole piece of 8 tokens has the positions after the fifth token read: 3 of them."""
    found = vllm.audit(
        ["abcdefghijklmnopqrstuvw", "short"],
        reference=f"{model}:float32",
        candidates=["bfloat16"],
        chunk_tokens=8,
        max_model_len=128,
        readings=tmp_path / "readings",
    )
    reference = [json.loads(line) for line in Path(found.reference.readings).read_text().splitlines()]
    assert "fewer than" in reference[1]["error"]
    count = len(reference[0]["token_ids"])
    assert found.candidates[0].text.positions == 3 * (count // 8) == len(reference[0]["own_logprobs"])


def test_questions_are_compared_by_their_answers(tmp_path, model):
    questions = [
        {"name": "good", "type": "predicate", "instructions": "Is it good?"},
        {"name": "red", "type": "choice", "instructions": "Is it red?", "choices": [{"value": each} for each in "abc"]},
    ]
    found = vllm.audit(
        [{"text": "a red one", "known": "yes"}, {"text": "a green one", "known": "no"}],
        questions=questions,
        reference=f"{model}:float32",
        candidates=["bfloat16", "reference"],
        gold="good=known",
        max_model_len=2048,
        readings=tmp_path / "readings",
        hf_overrides={"max_position_embeddings": 2048},
    )
    with pytest.raises(VLLMValidationError, match="--gold bad=known: write QUESTION=COLUMN"):
        vllm.audit(["x"], questions=questions, reference=f"{model}:float32", candidates="bfloat16", gold="bad=known")
    first, again = found.candidates
    assert set(first.questions) == {"good", "red"} and first.labels.rows == 4
    assert first.questions["good"].gold.rows == 2 and first.questions["red"].gold is None
    assert first.labels.abs_delta_logprob["mean"] > 0 == again.labels.abs_delta_logprob["max"]
