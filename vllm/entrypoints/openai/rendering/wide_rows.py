"""Rows of a thousand entries and more, up to the whole vocabulary, written as JSON.

What an entry says of its token alone is written once and remembered; the numbers are written a column at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from vllm.entrypoints.openai.rendering.token_texts import TokenNames, id_name
from vllm.entrypoints.openai.rendering.turns import ENTRIES_A_TURN, turn
from vllm.entrypoints.openai.rendering.written_json import Written

WIDE = 1024
"""Rows with more entries are written by this module."""

Heads = Callable[[list[int]], list[bytes]]


async def classic_row(token_ids: np.ndarray, logprobs: np.ndarray, chosen: str, names: TokenNames) -> Written:
    """{text: logprob}. The first entry has the text `chosen` as its key; of others with the same text the first one
    keeps it, and the rest go by their ids.

    Args:
        token_ids: int32 [E].
        logprobs: float32 [E].
        chosen: the first entry's key.
        names: how tokens are shown.
    """
    seen: set[str] = set()

    def heads(ids: list[int]) -> list[bytes]:
        texts, keys = names.texts(ids), names.heads(ids, _classic_head)
        if not seen:
            texts[0], keys[0] = chosen, _key(chosen)
        for index, text in enumerate(texts):
            if text in seen:
                keys[index] = _key(id_name(ids[index]))
            else:
                seen.add(text)
        return keys

    return await _write(b"{", heads, b"%b%b", token_ids, [logprobs], b"}")


async def chat_row(
    token_ids: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray, logits: np.ndarray, names: TokenNames
) -> Written:
    """[{token, bytes, token_id, logprob, rank, logit}]; arrays [E]."""
    form = b'%b%b,"rank":%b,"logit":%b}'
    return await _write(b"[", _heads(names, _chat_head), form, token_ids, [logprobs, ranks, logits], b"]")


async def prompt_row(
    token_ids: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray, logits: np.ndarray, names: TokenNames
) -> Written:
    """{token id: {decoded_token, logprob, rank, logit}}; arrays [E]."""
    form = b'%b%b,"rank":%b,"logit":%b}'
    return await _write(b"{", _heads(names, _prompt_head), form, token_ids, [logprobs, ranks, logits], b"}")


async def readings_row(
    token_ids: np.ndarray,
    logprobs: np.ndarray,
    logits: np.ndarray,
    ranks: np.ndarray,
    probabilities: np.ndarray,
    labels: dict[int, str],
    names: TokenNames,
) -> Written:
    """{token id: {token, label, logprob, logit, rank, probability}}, null for what is not finite; arrays [E]."""

    def heads(ids: list[int]) -> list[bytes]:
        shown = {token_id: _text(label) for token_id, label in labels.items()}
        known = names.heads(ids, _reading_head)
        return [b'%b%b,"logprob":' % (head, shown.get(own, b"null")) for own, head in zip(ids, known, strict=True)]

    form = b'%b%b,"logit":%b,"rank":%b,"probability":%b}'
    return await _write(b"{", heads, form, token_ids, [logprobs, logits, ranks, probabilities], b"}")


async def _write(
    opening: bytes, heads: Heads, form: bytes, token_ids: np.ndarray, columns: Sequence[np.ndarray], closing: bytes
) -> Written:
    parts = [opening]
    for start in range(0, len(token_ids), ENTRIES_A_TURN):
        await turn()
        span = slice(start, start + ENTRIES_A_TURN)
        numbers = (msgspec.json.encode(column[span].tolist())[1:-1].split(b",") for column in columns)
        rows = zip(heads(token_ids[span].tolist()), *numbers, strict=True)
        parts.append((b"," if start else b"") + b",".join([form % row for row in rows]))
    parts.append(closing)
    return Written(parts)


def _heads(names: TokenNames, write: Callable[[int, str, list[int] | None], bytes]) -> Heads:
    return lambda ids: names.heads(ids, write)


def _text(text: str) -> bytes:
    return msgspec.json.encode(text)


def _key(text: str) -> bytes:
    return _text(text) + b":"


def _classic_head(token_id: int, text: str, token_bytes: list[int] | None) -> bytes:
    return _key(text)


def _chat_head(token_id: int, text: str, token_bytes: list[int] | None) -> bytes:
    known = {"token": text, "bytes": token_bytes, "token_id": token_id}
    return msgspec.json.encode(known)[:-1] + b',"logprob":'


def _prompt_head(token_id: int, text: str, token_bytes: list[int] | None) -> bytes:
    return b'"%d":{"decoded_token":%b,"logprob":' % (token_id, _text(text))


def _reading_head(token_id: int, text: str, token_bytes: list[int] | None) -> bytes:
    return b'"%d":{"token":%b,"label":' % (token_id, _text(text))
