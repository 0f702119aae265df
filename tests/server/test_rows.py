"""Rows of readings as JSON: equal whether written in parts or at once; parts of several requests take turns."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from byte_tokenizer import VOCAB_SIZE, make_byte_tokenizer

from vllm.server.rendering import logprobs
from vllm.server.rendering.logprobs import classic_row
from vllm.server.rendering.token_texts import TokenNames
from vllm.server.rendering.written_json import Written, encode_parts, turn

ALL = {"temperature": 0, "ignore_eos": True, "max_tokens": 3}
TALK = {"messages": [{"role": "user", "content": "é"}], "chat_template": "{{ messages[0].content }}", "logprobs": True}
EVERY_ID = list(range(VOCAB_SIZE))


@pytest.fixture
def widen(monkeypatch):
    """Let rows have several parts, down to one entry a part."""

    def apply():
        monkeypatch.setattr(logprobs, "ENTRIES_PER_TURN", 1)

    return apply


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"logprobs": -1}),
        ("/v1/completions", {"logprobs": -1, "return_tokens_as_token_ids": True}),
        ("/v1/completions", {"logprobs": -1, "seed": 3, "temperature": 1.5, "n": 2}),
        ("/v1/completions", {"logprobs": 2, "echo": True, "prompt": "😀 the"}),
        ("/v1/completions", {"prompt_logprobs": -1, "prompt_logprob_token_ids": [7]}),
        ("/v1/completions", {"logprob_token_ids": EVERY_ID, "labels": ["t", "h"]}),
        ("/v1/completions", {"logprob_token_ids": [9, 7], "allowed_token_ids": [7, 8], "labels": ["a"]}),
        ("/v1/completions", {"logprobs": -1, "allowed_token_ids": [7, 8]}),
        ("/v1/completions", {"logprobs": -1, "max_tokens": 0}),
        ("/v1/chat/completions", {**TALK, "top_logprobs": -1}),
        ("/v1/chat/completions", {**TALK, "top_logprobs": -1, "seed": 3, "temperature": 1.5}),
        ("/v1/chat/completions", {**TALK, "top_logprobs": 3, "logprob_token_ids": [7, 4], "prompt_logprobs": 0}),
        ("/v1/chat/completions", {**TALK, "top_logprobs": -1, "return_tokens_as_token_ids": True}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_wide_rows_are_the_others_in_json(server, widen, path, body, stream):
    body = {"prompt": "é the", **ALL, **body} if path == "/v1/completions" else {**ALL, **body}

    def choices():
        chunks = server.stream(path, **body) if stream else [server.post(path, **body)]
        # Which of two sequences is ahead in a stream is nobody's promise.
        chunks.sort(key=lambda chunk: chunk["choices"][0]["index"])
        return [(chunk["choices"], chunk.get("prompt_logprobs")) for chunk in chunks]

    usual = choices()
    widen()
    assert choices() == usual


def test_equal_texts_in_different_parts(tmp_path, monkeypatch):
    """The chosen token has its text, then the first one that comes, across parts."""
    monkeypatch.setattr(logprobs, "ENTRIES_PER_TURN", 2)
    names = TokenNames(make_byte_tokenizer(tmp_path), as_ids=False)
    fragments = [i for i in range(VOCAB_SIZE) if names.texts([i]) == ["\ufffd"]][:3]
    letters = [i for i in range(VOCAB_SIZE) if names.texts([i]) in (["a"], ["b"])]
    token_ids = np.array([fragments[0], *letters, *fragments[1:]], np.int32)
    values = -np.arange(5, dtype=np.float32)
    written = asyncio.run(classic_row(token_ids, values, "b", names))
    keys = json.loads(b"".join(written.parts))
    a, b = letters
    assert keys == {"b": 0.0, "a": -1.0, f"token_id:{b}": -2.0, "\ufffd": -3.0, f"token_id:{fragments[2]}": -4.0}
    assert names.texts([a]) == ["a"]


def test_written_parts_stand_where_they_belong():
    content = {"a": [Written([b"[1", b",2]"]), {"b": Written([b"null"])}], "c": "\0"}
    parts = encode_parts(content)
    assert parts[1:3] == [b"[1", b",2]"], "parts are not put together"
    assert msgspec.json.decode(b"".join(parts)) == {"a": [[1, 2], {"b": None}], "c": "\0"}
    with pytest.raises(TypeError, match="object"):
        encode_parts({"a": object()})


def test_each_time_round_the_loop_does_one_piece():
    rounds = 0
    pieces: list[int] = []

    async def count():
        nonlocal rounds
        while True:
            rounds += 1
            await asyncio.sleep(0)

    async def work():
        for _ in range(5):
            await turn()
            pieces.append(rounds)

    async def run():
        counter = asyncio.create_task(count())
        workers = [asyncio.create_task(work()) for _ in range(4)]
        await asyncio.sleep(0)
        workers.pop().cancel()
        await asyncio.gather(*workers)
        counter.cancel()

    asyncio.run(run())
    assert len(pieces) == 15
    assert len(set(pieces)) == 15, "two pieces in one round"


def test_small_rows_share_a_turn(monkeypatch):
    taken = []

    async def note():
        taken.append(1)

    monkeypatch.setattr(logprobs, "turn", note)
    part = SimpleNamespace(end_indices=21 * np.arange(1, 101), lse=np.zeros(100), entropy=np.zeros(100))
    for name in ("token_ids", "logprobs", "logits", "ranks"):
        setattr(part, name, np.zeros(2100))

    async def run():
        return [position async for position in logprobs.positions(SimpleNamespace(parts=lambda num_entries: [part]))]

    assert len(asyncio.run(run())) == 100
    assert len(taken) == 1
