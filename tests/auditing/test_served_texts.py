"""Whole texts from servers: each form of logprobs is read exactly, tokens that differ are said, and no KL is made up.

The forms are those of the servers' documentation. llama-cpp-python 0.3.36 answers in `behind`, vLLM 0.32 in `ids`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from readers_here import read_here
from scripted_server import Request, ScriptedServer, answer, refusal
from tiny_llm import make_tiny_model

from vllm.auditing.report import audit_table
from vllm.auditing.served_texts import Names, ServedTextScorer
from vllm.auditing.servers import AnyServer
from vllm.auditing.text_task import table_path
from vllm.exceptions import CliError
from vllm.scoring.batches import Progress
from vllm.scoring.files import Item
from vllm.tokenizers.tokenizer import Tokenizer, get_tokenizer

# The third has characters of several bytes, whose tokens have no text of their own.
TEXTS = ["some words, of a text", "another", "naïve café"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return get_tokenizer(str(model))


def logprobs_of(token_ids: Sequence[int], size: int, seed: int = 7) -> np.ndarray:
    """float64 [size], of the token after these."""
    logits = np.random.default_rng([seed, *token_ids]).normal(size=size) * 3
    return logits - np.logaddexp.reduce(logits)


class Other:
    """A server whose model is `logprobs_of`.

    Args:
        form: `ids` (vLLM's prompt_logprobs), `echo` of texts or ids (OpenAI), `ended` (the same, with no token of an
            answer), `behind` (echo with the logprobs of the place behind), `content` (llama.cpp), `tgi` or `none`.
        first: a token that it puts before each text.
        hides_first: its answers leave that out.
        shift: added to each id of a text, as another tokenizer would.
    """

    def __init__(
        self, form: str, tokenizer: Tokenizer, first: int | None = None, hides_first: bool = False, shift: int = 0
    ):
        self.form, self.first, self.hides_first, self.shift = form, first, hides_first, shift
        self._tokenizer, self.size = tokenizer, tokenizer.vocab_size

    def ids_of(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        ids = [token + self.shift for token in self._tokenizer.encode(prompt)]
        return ids if self.first is None else [self.first, *ids]

    def name(self, token: int) -> str:
        """Parts of characters are left out, as llama-cpp-python does."""
        return self._tokenizer.decode([token], skip_special_tokens=False).replace("\N{REPLACEMENT CHARACTER}", "")

    async def __call__(self, request: Request) -> bytes:
        body, path = request.body, request.path
        if path == "/v1/models":
            return answer({"object": "list", "data": [{"id": "theirs", "object": "model"}]})
        if path == "/generate" and self.form == "tgi":
            return self._generated(body)
        if path == "/v1/chat/completions" and self.form == "tgi":
            pytest.fail("a chat is another prompt")
        if path == "/v1/completions" and self.form == "tgi":
            return answer({"choices": [{"index": 0, "text": "x", "logprobs": None, "finish_reason": "length"}]})
        if path != "/v1/completions" or self.form == "none":
            return refusal(404, "no such route")
        if isinstance(body["prompt"], list) and self.form == "behind":
            return refusal(422, "prompt: Input should be a valid string")
        ids = self.ids_of(body["prompt"])
        if len(ids) > 60:
            return refusal(400, "the prompt is longer than the context")
        if self.form == "content":
            return self._content(ids, body)
        if self.form == "ids":
            return self._prompt_logprobs(ids, body)
        return self._echo(ids, body["logprobs"]) if body.get("echo") else refusal(400, "echo is needed")

    def _best(self, ids: Sequence[int], count: int) -> list[tuple[int, float]]:
        values = logprobs_of(ids, self.size)
        return [(int(i), float(values[i])) for i in np.argsort(-values)[:count]]

    def _prompt_logprobs(self, ids: list[int], body: dict[str, Any]) -> bytes:
        rows: list[Any] = [None]
        for place in range(1, len(ids)):
            values = logprobs_of(ids[:place], self.size)
            entries = {ids[place], int(values.argmax())}
            rank = {token: 1 + int((values > values[token]).sum()) for token in entries}
            rows.append({
                str(token): {"logprob": values[token], "rank": rank[token], "decoded_token": self.name(token)}
                for token in entries
            })  # fmt: skip
        own = {"prompt_logprobs": rows} if "prompt_logprobs" in body else {}
        return answer({"choices": [{"text": "x", "logprobs": None, **own}]})

    def _echo(self, ids: list[int], top: int) -> bytes:
        whole = ids if self.form == "ended" else [*ids, self._best(ids, 1)[0][0]]
        # The place whose distribution each token has beside it.
        beside = range(1, len(ids) + 1) if self.form == "behind" else range(len(whole))
        tokens, logprobs, tops = [], [], []
        for token, end in zip(whole, beside, strict=False):
            values = logprobs_of(whole[:end], self.size)
            best = {self.name(i): value for i, value in reversed(self._best(whole[:end], top))}
            tokens.append(self.name(token))
            logprobs.append(float(values[token]))
            tops.append({**best, self.name(token): float(values[token])})
        logprobs[0], tops[0] = None, None
        if self.hides_first:
            tokens, logprobs, tops = tokens[1:], [None, *logprobs[2:]], [None, *tops[2:]]
        columns = {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": tops}
        usage = {"prompt_tokens": len(ids), "completion_tokens": int(self.form != "ended")}
        return answer({"choices": [{"text": "x", "logprobs": columns}], "usage": usage})

    def _content(self, ids: list[int], body: dict[str, Any]) -> bytes:
        entries = [
            {"id": i, "token": self.name(i), "logprob": value}
            for i, value in self._best(ids, body.get("logprobs") or 1)
        ]
        return answer({"choices": [{"text": "x", "logprobs": {"content": [{**entries[0], "top_logprobs": entries}]}}]})

    def _generated(self, body: dict[str, Any]) -> bytes:
        ids = self.ids_of(body["inputs"])
        prefill = [
            {"id": token, "text": self.name(token),
             "logprob": float(logprobs_of(ids[:place], self.size)[token]) if place else None}
            for place, token in enumerate(ids)
        ]  # fmt: skip
        details = {"finish_reason": "length", "generated_tokens": 1, "seed": None, "prefill": prefill, "tokens": []}
        return answer({"generated_text": "x", "details": details})


def reference_rows(folder: Path, tokenizer: Tokenizer, texts: list[str], chunk: int | None = None) -> Path:
    """Files of a reference: rows, and a table of `logprobs_of` with another seed."""
    path, size, tables = folder / "reference.jsonl", tokenizer.vocab_size, []
    with path.open("w") as rows:
        for index, text in enumerate(texts):
            ids, own = tokenizer.encode(text), []
            starts = [0] if chunk is None else range(0, len(ids) - chunk + 1, chunk)
            for start in starts:
                piece = ids[start : start + (chunk or len(ids))]
                for place in range(1 + (chunk or 0) // 2, len(piece)):
                    tables.append(logprobs_of(piece[:place], size, seed=8).astype(np.float32))
                    own.append(float(tables[-1][piece[place]]))
            row = {"index": index, "token_ids": ids, "own_logprobs": own, "num_prompt_tokens": len(ids)}
            rows.write(f"{json.dumps(row)}\n")
    table_path(path).write_bytes(np.stack(tables).tobytes())
    return path


def read(
    other: Other, tokenizer: Tokenizer, folder: Path, texts: list[str] = TEXTS, chunk: int | None = None, first: int = 0
) -> list[dict[str, Any]]:
    with ScriptedServer(other) as server:
        args = argparse.Namespace(url=server.url, model=None, api_key=None, timeout=20.0, concurrency=4)
        with AnyServer(args) as asked:
            scorer = ServedTextScorer(asked, tokenizer, chunk, reference_rows(folder, tokenizer, texts, chunk))
            items = [Item(i, text, {}) for i, text in enumerate(texts)][first:]
            return list(scorer.score(items, first, 0, Progress(len(items), shown=False)))


@pytest.mark.parametrize("form", ["ids", "echo", "behind", "content", "tgi"])
def test_own_tokens_and_likeliest_ones_are_exact(form: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """In each form; null is what it does not tell: of `behind` the first, and a token without a text of its own."""
    other, names = Other(form, tokenizer), Names(tokenizer)
    num_known = 0
    for row, text in zip(read(other, tokenizer, tmp_path), TEXTS, strict=True):
        ids = tokenizer.encode(text)
        assert len(row["own_logprobs"]) == len(row["same_top"]) == len(ids) - 1
        for place in range(1, len(ids)):
            theirs, ours = (logprobs_of(ids[:place], other.size, seed) for seed in (7, 8))
            own, same = row["own_logprobs"][place - 1], row["same_top"][place - 1]
            if form == "behind" and (place == 1 or not names.is_unique(other.name(ids[place]))):
                assert own is None and same is None
                continue
            assert own == pytest.approx(theirs[ids[place]], abs=1e-9)
            assert same in (None, theirs.argmax() == ours.argmax())
            num_known += same is not None
    assert num_known > 0 or form == "tgi"


def test_pieces_are_read_at_their_token_ids(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = read(Other("ids", tokenizer), tokenizer, tmp_path, [TEXTS[0]], chunk=8)
    ids = tokenizer.encode(TEXTS[0])
    pieces = [ids[start : start + 8] for start in range(0, len(ids) - 7, 8)]
    expected = [
        logprobs_of(each[:place], tokenizer.vocab_size)[each[place]] for each in pieces for place in range(5, 8)
    ]
    assert rows[0]["own_logprobs"] == pytest.approx(expected, abs=1e-9)
    with pytest.raises(CliError, match="reads texts, not token ids"):
        read(Other("behind", tokenizer), tokenizer, tmp_path, [TEXTS[0]], chunk=8)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"form": "tgi", "first": 70}, "before texts, the reference does not"),
        ({"form": "tgi", "shift": 1}, "other tokens: 0 is"),
    ],
)
def test_other_tokens_are_errors_of_their_rows(
    other: dict[str, Any], message: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    for row in read(Other(tokenizer=tokenizer, **other), tokenizer, tmp_path):
        assert message in row["error"] and "own_logprobs" not in row


def test_a_row_too_long_has_the_servers_error(tokenizer: Tokenizer, tmp_path: Path) -> None:
    rows = read(Other("ids", tokenizer), tokenizer, tmp_path, ["short", "x" * 80])
    assert "error" not in rows[0] and rows[1]["error"] == "the prompt is longer than the context"


def test_a_run_goes_on_behind_batches_that_are_there(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Rows and tables of the reference are those of the row."""
    whole = read(Other("ids", tokenizer), tokenizer, tmp_path)
    assert read(Other("ids", tokenizer), tokenizer, tmp_path, first=2)[0] == whole[2]


@pytest.mark.parametrize("form", ["none", "ended"])
def test_a_server_without_logprobs_of_prompts_is_refused(form: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """So is one of which nothing tells whose place an echo's logprobs are of."""
    with pytest.raises(
        CliError, match="gives no logprobs of prompts.*read --labels through it, or name its model's file"
    ):
        read(Other(form, tokenizer), tokenizer, tmp_path)


def test_nan_is_no_logprob(tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "logprobs_of", lambda ids, size, seed=7: np.full(size, math.nan))
    with pytest.raises(CliError, match="gives no logprobs of prompts"):
        read(Other("tgi", tokenizer), tokenizer, tmp_path)


def test_an_audit_has_no_kl_of_a_server(model: Path, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: Any) -> None:
    """Its other figures are of what it gives; null in the JSON, a dash in the table, and why."""
    import vllm

    read_here(monkeypatch)
    options: dict[str, Any] = {"reference": f"{model}:float32", "max_model_len": 128, "readings": tmp_path / "r"}
    with ScriptedServer(Other("ids", tokenizer)) as server:
        found = vllm.audit(TEXTS, candidates=[server.url], budget="flips<=50%", **options)
        with pytest.raises(ValueError, match="name a model there, and the server as a candidate"):
            vllm.audit(TEXTS, **{**options, "reference": server.url}, candidates=[f"{model}:float32"])
    (candidate,) = found.candidates
    llm = vllm.LLM(str(model), dtype="float32", max_model_len=128, max_logprob_token_ids=-1)
    params = vllm.SamplingParams(max_tokens=0, prompt_logprob_token_ids=list(range(llm.model_config.vocab_size)))
    losses, deltas, same = np.zeros(2), [], []
    for output in llm.generate(TEXTS, params, use_tqdm=False):
        ids = output.prompt_token_ids
        for place in range(1, len(ids)):
            pair = output.prompt_tables.logprobs[place - 1], logprobs_of(ids[:place], tokenizer.vocab_size)
            losses -= [each[ids[place]] for each in pair]
            deltas.append(abs(pair[0][ids[place]] - pair[1][ids[place]]))
            same.append(pair[0].argmax() == pair[1].argmax())
    text = found.to_dict()["candidates"][0]["text"]
    assert text["kl_mean"] is text["kl_p999"] is text["kl_percentiles"]["99"] is None
    assert text["positions"] == text["top1_positions"] == len(deltas)
    assert text["perplexity_ratio"] == pytest.approx(math.exp((losses[1] - losses[0]) / len(deltas)), rel=1e-5)
    assert text["abs_delta_logprob"]["mean"] == pytest.approx(np.mean(deltas), rel=1e-5)
    assert text["top1_agreement"] == np.mean(same)
    assert text["absent"] == {"kl": "a server gives some tokens at each position, not the whole vocabulary"}
    table = audit_table(found)
    assert "Mean    KLD:          - ±          -" in table and "kl: a server gives" in table
    assert candidate.name == server.url and found.budget is not None and found.budget.cheapest is None
