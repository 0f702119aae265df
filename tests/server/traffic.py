"""Requests of every kind, drawn from a seed, each with what the offline engine says to it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest
from byte_tokenizer import VOCAB_SIZE

from vllm import LLM, RequestOutput, SamplingParams
from vllm.logprobs import PositionLogprobs

COMPLETIONS, CHAT, SCORING = "/v1/completions", "/v1/chat/completions", "/generative_scoring"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
WORDS = ("the", "stop", "cat", "élan", "😀", "a", "猫", "on", "it")
LABELS = [" ", "the", "a"]

# Fields that mean the same over HTTP and offline.
_COMPLETIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"n": 3, "logprobs": 2},
    {"logprob_token_ids": [7, 9, 11]},
    {"logprobs": -1, "max_tokens": 2},
    {"logprobs": 2, "prompt_logprobs": 2, "echo": True},
    {"prompt_logprobs": 1, "prompt_logprob_token_ids": [4, 8], "temperature": 0},
    {"max_tokens": 0, "logprob_token_ids": [4, 200]},
    {"best_of": 3, "n": 2, "logit_bias": {"9": 2.0}},
    {"stop": ["t", "e"], "top_p": 0.9, "logprobs": 0, "max_tokens": 40},
    {
        "max_tokens": 6,
        "min_tokens": 2,
        "ignore_eos": False,
        "repetition_penalty": 1.3,
        "bad_words": ["the"],
        "logprob_token_ids": [3],
        "n": 2,
    },
)
_CHATS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"logprobs": 3, "logprob_token_ids": [7, 9]},
    {"n": 2, "logprobs": 0, "top_k": 20},
    {"logprobs": -1, "max_tokens": 2},
)


@dataclass(frozen=True)
class Case:
    """A request, and the same for the offline engine.

    Attributes:
        path, body: what is sent.
        prompts: what `params` are for.
        params: None for scoring.
    """

    path: str
    body: dict[str, Any]
    prompts: list[Any]
    params: SamplingParams | None

    @property
    def streams(self) -> bool:
        """Whether the answer comes in chunks."""
        return bool(self.body.get("stream"))

    def check(self, answer: dict[str, Any], expected: list[Any]) -> None:
        """Compare a whole answer with `expected`."""
        if self.path == SCORING:
            for item, scores in zip(answer["data"], expected, strict=True):
                assert [entry["logprob"] for entry in item["labels"]] == _close(scores.logprobs.tolist())
            return
        choices = {choice["index"]: choice for choice in answer["choices"]}
        wanted = [(output, completion) for output in expected for completion in output.outputs]
        assert sorted(choices) == list(range(len(wanted)))
        for number, (output, completion) in enumerate(wanted):
            self._check_choice(answer, choices[number], output, completion)

    def _check_choice(self, answer: dict[str, Any], choice: dict[str, Any], output: RequestOutput, own: Any) -> None:
        is_chat = self.path == CHAT
        text = choice["message"]["content"] if is_chat else choice["text"]
        assert text == (output.prompt if self.body.get("echo") else "") + own.text
        assert choice["token_ids"] == own.token_ids
        assert choice["finish_reason"] == own.finish_reason
        shown = choice["logprobs"]
        if shown is not None and is_chat:
            _check_chat_logprobs(shown["content"], own.logprobs)
        elif shown is not None:
            echoed = list(output.prompt_logprobs) if self.body.get("echo") else []
            ids = output.prompt_token_ids if echoed else []
            _check_classic(shown, [*ids, *own.token_ids], [*echoed, *(own.logprobs if own.token_ids else ())])
        asked = self.body.get("logprob_token_ids")
        if asked:
            for position, reading in zip(own.logprobs, choice["readings"], strict=True):
                assert list(reading["ids"]) == list(map(str, asked))
                _check_by_id(reading["ids"], position)
        if self.body.get("prompt_logprobs") is not None:
            found = (answer if is_chat else choice)["prompt_logprobs"]
            for position, entries in zip(output.prompt_logprobs, found, strict=True):
                assert (entries is None) == (position is None)
                if position is not None:
                    assert list(map(int, entries)) == list(position)
                    _check_by_id(entries, position)


def _close(values: list[float]) -> Any:
    return pytest.approx(values, abs=1e-4, rel=1e-5)


def _shown(logprob: float) -> float:
    return max(logprob, -9999.0)


def _check_by_id(entries: dict[str, dict[str, Any]], position: PositionLogprobs) -> None:
    ids = [int(token_id) for token_id in entries]
    own = [position[token_id] for token_id in ids]
    values = list(entries.values())
    assert [value["rank"] for value in values] == [each.rank for each in own]
    finite = [(value["logprob"], each.logprob) for value, each in zip(values, own, strict=True) if value["logprob"]]
    assert [value for value, _ in finite] == _close([_shown(each) for _, each in finite])


def _check_classic(shown: dict[str, Any], token_ids: list[int], positions: list[PositionLogprobs | None]) -> None:
    assert shown["token_ids"] == token_ids
    for token_id, position, own, top in zip(
        token_ids, positions, shown["token_logprobs"], shown["top_logprobs"], strict=True
    ):
        if position is None:
            assert own is None and top is None
        else:
            assert own == _close(position[token_id].logprob)
            assert sorted(top.values()) == _close(sorted(_shown(each.logprob) for each in position.values()))


def _check_chat_logprobs(content: list[dict[str, Any]], positions: Iterable[PositionLogprobs]) -> None:
    for entry, position in zip(content, positions, strict=True):
        for each in (entry, *entry["top_logprobs"]):
            assert each["logprob"] == _close(_shown(position[each["token_id"]].logprob))
        # The generated token stands outside the top, if it is not one of them.
        assert len(position) - 1 <= len(entry["top_logprobs"]) <= len(position)


def offline(llm: LLM, cases: Sequence[Case]) -> list[list[Any]]:
    """The offline engine's results for each case, one a prompt."""
    pairs = [(prompt, case.params) for case in cases if case.params is not None for prompt in case.prompts]
    outputs = iter(llm.generate([prompt for prompt, _ in pairs], [params for _, params in pairs], use_tqdm=False))
    scored = [prompt for case in cases if case.params is None for prompt in case.prompts]
    scores = iter(llm.score_labels(scored, LABELS, use_tqdm=False))
    return [list(islice(scores if case.params is None else outputs, len(case.prompts))) for case in cases]


def draw(rng: random.Random, kind: int) -> Case:
    """A request of the kind with this number, modulo the number of kinds; its prompt and numbers are random."""
    kinds = len(_COMPLETIONS) + len(_CHATS) + 1
    kind %= kinds
    streams = rng.random() < 0.5
    common = {"seed": rng.randrange(2**31), "max_tokens": rng.randint(1, 12), "ignore_eos": True}
    if kind < len(_COMPLETIONS):
        return _completion(rng, {**common, **_COMPLETIONS[kind]}, streams)
    if kind < kinds - 1:
        return _chat(rng, {**common, **_CHATS[kind - len(_COMPLETIONS)]}, streams)
    query, items = _text(rng), [_text(rng) for _ in range(rng.randint(1, 5))]
    body = {"model": "tiny", "query": query, "items": items, "labels": LABELS}
    return Case(SCORING, body, [query + item for item in items], None)


def _completion(rng: random.Random, fields: dict[str, Any], streams: bool) -> Case:
    if fields.get("echo"):
        prompts: list[Any] = [_text(rng)]
    else:
        prompts = [rng.choices(range(3, VOCAB_SIZE), k=rng.randint(1, 60)) for _ in range(rng.choice((1, 1, 1, 3)))]
    offline = {name: value for name, value in fields.items() if name != "echo"}
    body = {"model": "tiny", "prompt": prompts, "stream": streams and "best_of" not in fields, "return_token_ids": True}
    body.update(fields)
    return Case(COMPLETIONS, body, prompts, SamplingParams(**offline))


def _chat(rng: random.Random, fields: dict[str, Any], streams: bool) -> Case:
    content = _text(rng)
    messages = [{"role": "user", "content": content}]
    body = {**fields, "model": "tiny", "messages": messages, "chat_template": TEMPLATE, "stream": streams}
    if "logprobs" in fields:
        body.update(logprobs=True, top_logprobs=fields["logprobs"])
    body["return_token_ids"] = True
    return Case(CHAT, body, [f"<user>{content}<assistant>"], SamplingParams(**fields))


def _text(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, 8)))


def put_together(chunks: list[dict[str, Any]], path: str) -> dict[str, Any]:
    """The whole answer from a stream's chunks."""
    answer: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        assert "error" not in chunk, chunk
        answer.update({name: value for name, value in chunk.items() if name != "choices"})
        for part in chunk["choices"]:
            if path == CHAT:
                part["message"] = {"content": part.pop("delta").get("content") or ""}
            own = choices.setdefault(part["index"], {})
            choices[part["index"]] = _joined(own, part) if own else part
    return {**answer, "choices": list(choices.values())}


def _joined(first: Any, second: Any) -> Any:
    if isinstance(first, dict) and isinstance(second, dict):
        return {name: _joined(first.get(name), second.get(name)) for name in {**first, **second}}
    if first is None or second is None:
        return second if first is None else first
    return first + second if isinstance(first, (str, list)) and not isinstance(second, int) else second
