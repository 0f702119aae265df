"""Rows of readings as JSON text, from a single entry to the whole vocabulary.

What depends on the token alone is encoded once and cached; the numbers are encoded by columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from vllm.server.rendering.token_texts import TokenNames, id_name
from vllm.server.rendering.written_json import ENTRIES_PER_TURN, Written, turn

Row = msgspec.Raw | Written

_FORM = b'%b%b,"rank":%b,"logit":%b}'


async def classic_row(token_ids: np.ndarray, logprobs: np.ndarray, chosen: str, names: TokenNames) -> Row:
    """{text: logprob}; arrays [E]. `chosen` is the first entry's text. Of entries with equal texts, the first one keeps
    the text and the others go by their ids."""
    seen: set[bytes] = set()

    def heads(ids: list[int]) -> list[bytes]:
        keys = names.heads(ids, _classic_head)
        if not seen:
            keys[0] = _key(chosen)
        for index, key in enumerate(keys):
            if key in seen:
                keys[index] = _key(id_name(ids[index]))
            else:
                seen.add(key)
        return keys

    return await _write(b"{", heads, b"%b%b", token_ids, [logprobs], b"}")


async def chat_row(
    token_ids: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray, logits: np.ndarray, names: TokenNames
) -> Row:
    """[{token, bytes, token_id, logprob, rank, logit}]; arrays [E]."""
    columns = [logprobs, ranks, logits]
    return await _write(b"[", lambda ids: names.heads(ids, _chat_head), _FORM, token_ids, columns, b"]")


async def id_row(token_ids: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray, logits: np.ndarray) -> Row:
    """[{token_id, logprob, rank, logit}]; arrays [E]."""

    def heads(ids: list[int]) -> list[bytes]:
        return [b'{"token_id":%d,"logprob":' % token_id for token_id in ids]

    return await _write(b"[", heads, _FORM, token_ids, [logprobs, ranks, logits], b"]")


async def prompt_row(
    token_ids: np.ndarray, logprobs: np.ndarray, ranks: np.ndarray, logits: np.ndarray, names: TokenNames
) -> Row:
    """{token id: {decoded_token, logprob, rank, logit}}; arrays [E]."""
    columns = [logprobs, ranks, logits]
    return await _write(b"{", lambda ids: names.heads(ids, _prompt_head), _FORM, token_ids, columns, b"}")


async def readings_row(
    token_ids: np.ndarray,
    logprobs: np.ndarray,
    logits: np.ndarray,
    ranks: np.ndarray,
    probabilities: np.ndarray,
    labels: dict[int, str],
    names: TokenNames,
) -> Row:
    """{token id: {token, label, logprob, logit, rank, probability}}, null for what is not finite; arrays [E]."""
    shown = {token_id: msgspec.json.encode(label) for token_id, label in labels.items()}

    def heads(ids: list[int]) -> list[bytes]:
        known = names.heads(ids, _reading_head)
        return [b'%b%b,"logprob":' % (head, shown.get(own, b"null")) for own, head in zip(ids, known, strict=True)]

    form = b'%b%b,"logit":%b,"rank":%b,"probability":%b}'
    return await _write(b"{", heads, form, token_ids, [logprobs, logits, ranks, probabilities], b"}")


async def _write(
    opening: bytes,
    heads: Callable[[list[int]], list[bytes]],
    form: bytes,
    token_ids: np.ndarray,
    columns: Sequence[np.ndarray],
    closing: bytes,
) -> Row:
    parts = [opening]
    for start in range(0, len(token_ids), ENTRIES_PER_TURN):
        if start:
            await turn()
        span = slice(start, start + ENTRIES_PER_TURN)
        numbers = map(_numbers, (column[span] for column in columns))
        entries = zip(heads(token_ids[span].tolist()), *numbers, strict=True)
        parts.append((b"," if start else b"") + b",".join([form % entry for entry in entries]))
    parts.append(closing)
    return Written(parts) if len(parts) > 3 else msgspec.Raw(b"".join(parts))


def _numbers(column: np.ndarray) -> list[bytes]:
    # The one column of integers is the ranks, where 0 is one that was left out.
    if column.dtype == np.int32 and not column.all():
        return [b"%d" % rank if rank else b"null" for rank in column.tolist()]
    return msgspec.json.encode(column.tolist())[1:-1].split(b",")


def _key(text: str) -> bytes:
    return msgspec.json.encode(text) + b":"


def _classic_head(token_id: int, text: str, token_bytes: list[int] | None) -> bytes:
    return _key(text)


def _chat_head(token_id: int, text: str, token_bytes: list[int] | None) -> bytes:
    known = {"token": text, "bytes": token_bytes, "token_id": token_id}
    return msgspec.json.encode(known)[:-1] + b',"logprob":'


def _prompt_head(token_id: int, text: str, token_bytes: list[int] | None) -> bytes:
    return b'"%d":{"decoded_token":%b,"logprob":' % (token_id, msgspec.json.encode(text))


def _reading_head(token_id: int, text: str, token_bytes: list[int] | None) -> bytes:
    return b'"%d":{"token":%b,"label":' % (token_id, msgspec.json.encode(text))
