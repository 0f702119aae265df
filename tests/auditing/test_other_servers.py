"""Labels from servers of others: what each form of logprobs gives is read exactly, and what it lacks is said.

The forms are those that the servers' documentation has; the tests marked `peer` ask llama.cpp's own server.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_server import Request, ScriptedServer, answer, refusal
from tiny_llm import make_tiny_llm, make_tiny_model

from vllm.auditing.other_servers import label_scorer
from vllm.auditing.servers import AnyServer
from vllm.cli.main import main
from vllm.exceptions import CliError
from vllm.scoring.batches import Progress
from vllm.scoring.files import Item
from vllm.scoring.labels.templates import Template

SIZE = 200
TEXTS = {i: f"t{i}" for i in range(SIZE)}


def logprobs_of(token_ids: list[int]) -> np.ndarray:
    """float64 [SIZE], of the token after these."""
    logits = np.random.default_rng([7, *token_ids]).normal(size=SIZE) * 3
    return logits - np.logaddexp.reduce(logits)


class Other:
    """A server whose model is `logprobs_of`.

    Args:
        form: `ids` (vLLM), `content` (llama.cpp), `classic` (OpenAI, llama-cpp-python), `tgi`, `chats`
            (chats alone) or `none`.
        most: how many of its likeliest tokens it gives.
        tokenizes: it has /tokenize.
    """

    def __init__(self, form: str, most: int = SIZE, tokenizes: bool = True) -> None:
        self.form, self.most, self.tokenizes = form, most, tokenizes

    async def __call__(self, request: Request) -> bytes:
        body, path = request.body, request.path
        if path == "/info" and self.form == "tgi":
            return answer({"model_id": "theirs", "max_total_tokens": 64})
        if path == "/v1/models" and self.form != "tgi":
            return answer({"data": [{"id": "theirs"}]})
        if path == "/tokenize" and self.tokenizes:
            text = body.get("content", body.get("prompt"))
            return answer({"tokens": tokens_of(text)})
        if path == "/v1/completions" and self.form not in ("tgi", "none", "chats"):
            return self._completion(body)
        if path == "/v1/completions" and self.form == "tgi":
            return answer({"choices": [{"index": 0, "text": "x", "logprobs": None, "finish_reason": "length"}]})
        if path == "/v1/chat/completions" and self.form in ("tgi", "chats"):
            entries = [{"token": TEXTS[i], "logprob": -1.0, "top_logprobs": []} for i in range(5)]
            return answer({"choices": [{"message": {"content": "x"}, "logprobs": {"content": entries}}]})
        if path == "/generate" and self.form == "tgi":
            top = body["parameters"]["top_n_tokens"]
            if top > self.most:
                return refusal(422, "`top_n_tokens` must be >= 0 and <= 5")
            best = self._likeliest(tokens_of(body["inputs"]), top)
            entries = [{"id": i, "text": TEXTS[i], "logprob": value, "special": False} for i, value in best]
            return answer({"generated_text": "x", "details": {"tokens": entries[:1], "top_tokens": [entries]}})
        return refusal(404, "no such route")

    def _completion(self, body: dict[str, Any]) -> bytes:
        prompt = body["prompt"]
        if isinstance(prompt, list) and self.form == "classic":
            return refusal(400, "prompt must be a string")
        ids = prompt if isinstance(prompt, list) else tokens_of(prompt)
        if len(ids) > 60:
            return refusal(400, "the prompt is longer than the context")
        if self.most < SIZE and body.get("logprobs", 0) > self.most:
            return refusal(400, f"logprobs must be at most {self.most}")
        best = self._likeliest(ids, max(1, body.get("logprobs", 0)))
        if self.form == "ids" and "logprob_token_ids" in body:
            values = logprobs_of(ids)
            best = best[:1] + [(i, values[i]) for i in body["logprob_token_ids"]]
        if self.form == "content":
            entries = [{"id": i, "token": TEXTS[i], "bytes": [], "logprob": value} for i, value in best]
            logprobs: Any = {"content": [{**entries[0], "top_logprobs": entries}]}
        else:
            name = (
                (lambda i: f"token_id:{i}")
                if body.get("return_tokens_as_token_ids") and self.form == "ids"
                else TEXTS.get
            )
            top = {name(i): max(value, -9999.0) for i, value in best}
            logprobs = {"tokens": [name(best[0][0])], "token_logprobs": [best[0][1]], "top_logprobs": [top]}
        return answer({"choices": [{"text": "x", "logprobs": logprobs}], "usage": {"prompt_tokens": len(ids)}})

    @staticmethod
    def _likeliest(ids: list[int], count: int) -> list[tuple[int, float]]:
        values = logprobs_of(ids)
        return [(int(i), float(values[i])) for i in np.argsort(-values)[:count]]


def tokens_of(text: str) -> list[int]:
    """`t5t17` is the tokens 5 and 17; of another text each word is one."""
    if text.startswith("t") and text[1:2].isdigit():
        return [int(each) for each in text[1:].split("t")]
    return [len(word) for word in text.split()]


def read(
    other: Other,
    labels: list[Any],
    texts: list[str],
    known: list[list[int]] | None = None,
    template: str | None = "{text}:",
    known_texts: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    with ScriptedServer(other) as server:
        args = argparse.Namespace(url=server.url, model=None, api_key=None, timeout=20.0, concurrency=4)
        with AnyServer(args) as asked:
            parsed = None if template is None else Template(template)
            scorer = label_scorer(asked, parsed, labels, "rows.jsonl", (list(known_texts), known or []))
            items = [Item(i, text, {}) for i, text in enumerate(texts)]
            return list(scorer.score(items, 0, 0, Progress(len(items), shown=False)))


PROMPTS = ["one two", "three", "four five six"]


def expected(prompt: str, label: list[int]) -> tuple[float, int]:
    """The label's logprob, and its first token's rank."""
    whole = tokens_of(f"{prompt}:")
    total, rank = 0.0, 0
    for index, token in enumerate(label):
        values = logprobs_of([*whole, *label[:index]])
        total += values[token]
        rank = rank if index else 1 + int((values > values[token]).sum())
    return float(total), rank


ALL_FORMS = [("ids", 20), ("content", SIZE), ("classic", SIZE)]


@pytest.mark.parametrize(("form", "most"), ALL_FORMS)
def test_labels_are_exact_where_all_can_be_had(form: str, most: int) -> None:
    rows = read(Other(form, most), ["t5", "t17"], PROMPTS)
    for row, prompt in zip(rows, PROMPTS, strict=True):
        for name, ids in (("t5", [5]), ("t17", [17])):
            value, rank = expected(prompt, ids)
            assert row["logprobs"][name] == pytest.approx(value, abs=1e-9)
            assert row["ranks"][name] == (None if form == "ids" else rank)
        assert row["label_mass"] == pytest.approx(sum(math.exp(each) for each in row["logprobs"].values()))
        assert row["num_prompt_tokens"] == len(tokens_of(f"{prompt}:"))


@pytest.mark.parametrize("form", ["ids", "content"])
def test_labels_of_several_tokens_are_read_token_by_token(form: str) -> None:
    rows = read(Other(form), ["t5t17", "t5t18t3", "t9"], PROMPTS)
    for row, prompt in zip(rows, PROMPTS, strict=True):
        whole = tokens_of(f"{prompt}:")
        for name, ids in (("t5t17", [5, 17]), ("t5t18t3", [5, 18, 3]), ("t9", [9])):
            steps = [logprobs_of([*whole, *ids[:index]])[token] for index, token in enumerate(ids)]
            assert row["logprobs"][name] == pytest.approx(sum(steps), abs=1e-9)


@pytest.mark.parametrize(("form", "most"), [("content", 20), ("classic", 5), ("tgi", 5)])
def test_labels_beyond_what_a_server_gives_are_missing(form: str, most: int) -> None:
    texts = [f"{'word ' * i}end" for i in range(30)]
    rows = read(Other(form, most, tokenizes=False), ["t5", "t17"], texts, [[5], [17]])
    counts = {True: 0, False: 0}
    for row, text in zip(rows, texts, strict=True):
        for name, ids in (("t5", [5]), ("t17", [17])):
            value, rank = expected(text, ids)
            counts[rank <= most] += 1
            if rank <= most:
                assert row["logprobs"][name] == pytest.approx(value, abs=1e-9) and row["ranks"][name] == rank
            else:
                assert name not in row["logprobs"] and row["label_mass"] is None
    assert min(counts.values()) > 0


def test_the_usual_prompt_names_the_labels_as_the_references_does() -> None:
    """Its texts of label ids, which a server of others does not tell."""
    rows = read(Other("ids"), [5, 17], ["one two"], [[5], [17]], template=None, known_texts=(" five", " x"))
    prompt = Template.default([" five", " x"]).render("rows.jsonl", Item(0, "one two", {}))
    values = logprobs_of(tokens_of(prompt))
    assert rows[0]["logprobs"] == pytest.approx({"5": values[5], "17": values[17]}, abs=1e-9)
    with pytest.raises(CliError, match="write --template"):
        read(Other("ids"), [5, 17], PROMPTS, template=None)


def test_a_row_that_the_server_refuses_has_its_error() -> None:
    rows = read(Other("content"), ["t5", "t17"], ["short", "word " * 70])
    assert "error" not in rows[0] and rows[1]["error"] == "the prompt is longer than the context"


@pytest.mark.parametrize(
    ("other", "labels", "known", "message"),
    [
        (Other("none"), ["t5"], [], "no labels can be read"),
        (Other("chats"), ["t5"], [], "/v1/chat/completions makes another prompt"),
        (Other("tgi", 5, tokenizes=False), ["t5"], [[5, 6]], "labels of several tokens need a server with /tokenize"),
        (Other("classic"), ["t5t6"], [], "'t5t6' has 2"),
        (Other("content"), ["t5"], [[6]], "another vocabulary: 't5' is the tokens \\[5\\], of the reference \\[6\\]"),
        (Other("classic", tokenizes=False), [5, 17], [], "write --labels"),
    ],
)
def test_what_cannot_be_read_is_said(other: Other, labels: list[Any], known: list[list[int]], message: str) -> None:
    with pytest.raises(CliError, match=message):
        read(other, labels, PROMPTS, known)


def test_an_audit_counts_rows_without_a_label(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Missing rows are not compared, a budget cannot be kept by leaving them out, and flips among them are counted."""
    model = make_tiny_model(tmp_path / "m")
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f"{json.dumps({'text': 'word ' * i + 'end'})}\n" for i in range(30)))
    ids = [70, 71]
    with ScriptedServer(Other("content", 100, tokenizes=False)) as server:
        arguments = [
            str(rows),
            "--label-ids",
            *map(str, ids),
            "--template",
            "{text}",
            "--reference",
            f"{model}:float32",
        ]
        arguments += ["--candidate", server.url, "--max-model-len", "256", "--readings", str(tmp_path / "r"), "--quiet"]
        code = main(["audit", *arguments, "--output", str(tmp_path / "a.json"), "--budget", "flips<=99%"])
    (found,) = json.loads((tmp_path / "a.json").read_text())["candidates"]
    llm = make_tiny_llm(model, max_model_len=256)
    prompts = ["word " * i + "end" for i in range(30)]
    reference = np.stack([each.logprobs for each in llm.score_labels(prompts, ids, use_tqdm=False)]).argmax(1)
    whole, lacking, flips, flips_missing = 0, {"70": 0, "71": 0}, 0, 0
    for prompt, best in zip(prompts, reference, strict=True):
        values = logprobs_of(tokens_of(prompt))
        there = [token for token in ids if (values > values[token]).sum() < 100]
        own = max(there, key=lambda token: values[token], default=None)
        is_flip = own is not None and own != ids[best]
        if len(there) == 2:
            whole, flips = whole + 1, flips + is_flip
        else:
            flips_missing += is_flip
            for token in {*ids} - {*there}:
                lacking[str(token)] += 1
    assert whole > 0 and found["rows"] == whole and found["labels"]["flips"] == flips
    assert found["missing"] == {"rows": 30 - whole, "labels": lacking, "flips": flips_missing}
    assert code == 1, "rows that are missing may be anything"
    error = capsys.readouterr().err
    assert f"{30 - whole} rows lack labels" in error and f"'70' in {lacking['70']}" in error


@pytest.mark.peer
def test_llama_cpps_server_gives_every_label(tmp_path: Path) -> None:
    """Its logprobs of the embedded model, whose activations it rounds to 8 bits, are near ours: an audit says by how
    much."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="llama.cpp is not installed (pip install xllamacpp)")
    from vllm import audit
    from vllm.loader.resolve import embedded_model_path

    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.port, params.warmup = str(embedded_model_path()), 1024, 0, False
    params.n_parallel, params.cpuparams.n_threads, params.cpuparams_batch.n_threads = 1, 2, 2
    served = xllamacpp.Server(params)
    (found,) = audit(
        ["A fine pen, I love it.", "It broke at once."], labels=[" positive", " negative", " not good"],
        reference="embedded:float32", candidates=served.listening_address, readings=tmp_path / "r",
    ).candidates  # fmt: skip
    assert found.rows == 2 and found.missing is None
    assert 0 < found.labels.abs_delta_logprob["max"] < 1
