"""Readings as OpenAI's endpoints show them: the classic lists of completions, the entries of chat, prompt positions.

JSON has no infinity: an impossible token's logprob is OpenAI's -9999.0.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from vllm.logprobs import FlatLogprobs, PromptLogprobs
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


IMPOSSIBLE = np.float32(-9999.0)
_MINUS_INFINITY = np.float32(-np.inf)

# Entries whose arrays are put together at once, which takes about a millisecond.
_ENTRIES_PER_PART = 65536


class Position(NamedTuple):
    """One position's entries, the token itself first."""

    token_ids: np.ndarray  # int32 [E]
    logprobs: np.ndarray  # float32 [E]
    logits: np.ndarray  # float32 [E]
    ranks: np.ndarray  # int32 [E]
    lse: float
    entropy: float  # NaN when not requested

    def pick(self, indices: np.ndarray) -> Position:
        """The entries at `indices`."""
        columns = self.token_ids, self.logprobs, self.logits, self.ranks
        token_ids, logprobs, logits, ranks = (column[indices] for column in columns)
        return Position(token_ids, logprobs, logits, ranks, self.lse, self.entropy)


class ClassicLogprobs(msgspec.Struct):
    """A choice's `logprobs` in completions' shape."""

    text_offset: list[int] = []
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[Row | None] = []
    token_ids: list[int] = []
    ranks: list[int | None] = []

    def extend(self, other: ClassicLogprobs) -> None:
        """Append what comes after."""
        for name in self.__struct_fields__:
            getattr(self, name).extend(getattr(other, name))

    def take(self, count: int) -> ClassicLogprobs:
        """Remove and return the first `count` positions."""
        taken = ClassicLogprobs()
        for name in self.__struct_fields__:
            values = getattr(self, name)
            setattr(taken, name, values[:count])
            del values[:count]
        return taken


async def positions(readings: FlatLogprobs) -> AsyncGenerator[Position, None]:
    """Every position that was read; waits for a turn whenever ENTRIES_PER_TURN entries come together."""
    num_entries = 0
    for part in readings.parts(_ENTRIES_PER_PART):
        token_ids, logprobs, logits, ranks = part.token_ids, part.logprobs, part.logits, part.ranks
        start = 0
        for stop, lse, entropy in zip(part.end_indices.tolist(), part.lse.tolist(), part.entropy.tolist(), strict=True):
            num_entries += stop - start
            if num_entries >= ENTRIES_PER_TURN:
                num_entries = 0
                await turn()
            own = slice(start, stop)
            yield Position(token_ids[own], logprobs[own], logits[own], ranks[own], lse, entropy)
            start = stop


async def classic_logprobs(
    readings: FlatLogprobs, names: TokenNames, pieces: Sequence[str], offsets: Sequence[int]
) -> ClassicLogprobs:
    """Completions' shape of P positions, each with its token first; `pieces` [P] are the tokens' texts, which begin at
    `offsets` [P]."""
    result = ClassicLogprobs(text_offset=list(offsets))
    rest = iter(pieces)
    async for position in positions(readings):
        token_id, piece = position.token_ids[0].item(), next(rest)
        logprobs = _finite(position.logprobs)
        chosen = id_name(token_id) if names.as_ids else piece
        result.tokens.append(chosen)
        result.token_logprobs.append(logprobs[0].item())
        result.token_ids.append(token_id)
        result.ranks.append(position.ranks[0].item() or None)
        result.top_logprobs.append(await classic_row(position.token_ids, logprobs, chosen, names))
    return result


async def classic_prompt_logprobs(
    readings: PromptLogprobs | None,
    names: TokenNames,
    token_ids: Sequence[int],
    pieces: Sequence[str],
    offsets: Sequence[int],
) -> ClassicLogprobs:
    """The same for a prompt, where one or more first positions were not read."""
    count = len(token_ids) if readings is None else readings.num_unread
    result = ClassicLogprobs(
        text_offset=list(offsets[:count]),
        tokens=[id_name(token_id) for token_id in token_ids[:count]] if names.as_ids else list(pieces[:count]),
        token_logprobs=[None] * count,
        top_logprobs=[None] * count,
        token_ids=list(token_ids[:count]),
        ranks=[None] * count,
    )
    if readings is not None:
        result.extend(await classic_logprobs(readings, names, pieces[count:], offsets[count:]))
    return result


async def chat_logprobs(
    readings: FlatLogprobs, names: TokenNames, num_topk: int, ids: Sequence[int]
) -> list[dict[str, Any]]:
    """Chat's `content`: each generated token with the true top `num_topk` (-1: the vocabulary), itself if it is not one
    of them, then `ids`."""
    content = []
    async for position in positions(readings):
        token_id = position.token_ids[0].item()
        logprobs, logits = _finite(position.logprobs), _finite(position.logits)
        shown = _top_then_ids(position, num_topk, ids)
        content.append(
            {
                "token": names.texts([token_id])[0],
                "bytes": names.bytes_of(token_id),
                "token_id": token_id,
                "logprob": logprobs[0].item(),
                "rank": position.ranks[0].item() or None,
                "logit": logits[0].item(),
                "top_logprobs": await chat_row(
                    position.token_ids[shown], logprobs[shown], position.ranks[shown], logits[shown], names
                ),
            }
        )
    return content


async def token_logprobs(readings: FlatLogprobs, names: TokenNames | None) -> list[dict[str, Any]]:
    """`content` of /inference/v1/generate: each generated token with all entries of its position, itself first. Tokens
    are ids alone without `names`. Where none was generated (max_tokens=0), the token's fields are null."""
    content = []
    async for position in positions(readings):
        logprobs, logits = _finite(position.logprobs), _finite(position.logits)
        columns = position.token_ids, logprobs, position.ranks, logits
        own: dict[str, Any] = dict.fromkeys(("token_id", "logprob", "rank", "logit"))
        if readings.has_sampled:
            own = {name: column[0].item() for name, column in zip(own, columns, strict=True)}
            own["rank"] = own["rank"] or None
        if names is not None:
            known = own["token_id"]
            own["token"] = "" if known is None else names.texts([known])[0]
            own["bytes"] = None if known is None else names.bytes_of(known)
        own["top_logprobs"] = await (id_row(*columns) if names is None else chat_row(*columns, names))
        content.append(own)
    return content


async def prompt_logprobs(readings: PromptLogprobs, names: TokenNames) -> list[Row | None]:
    """vLLM's `prompt_logprobs`: by token id, null where nothing was read."""
    result: list[Row | None] = [None] * readings.num_unread
    async for position in positions(readings):
        logprobs, logits = _finite(position.logprobs), _finite(position.logits)
        result.append(await prompt_row(position.token_ids, logprobs, position.ranks, logits, names))
    return result


def _finite(values: np.ndarray) -> np.ndarray:
    return np.where(values == _MINUS_INFINITY, IMPOSSIBLE, values)


def _top_then_ids(position: Position, num_topk: int, ids: Sequence[int]) -> np.ndarray:
    """Indices (int64), each once: of the k most likely entries in order, behind k > 0 of them of the first one, then of
    `ids`."""
    num_entries = len(position.token_ids)
    k = num_entries if num_topk < 0 else num_topk
    # The entries after the first are the top k in order, without the first if it is one of them.
    ranked = slice(1, min(k + 1, num_entries))
    falling, first = -position.logits[ranked], -position.logits[0]
    tied = slice(int(np.searchsorted(falling, first)), int(np.searchsorted(falling, first, side="right")))
    place = tied.start + int(np.searchsorted(position.token_ids[ranked][tied], position.token_ids[0]))
    top = np.insert(np.arange(ranked.start, ranked.stop), place, 0)[:k]
    if 0 < k <= place:
        # Some clients read k entries, others look for the token among them.
        top = np.append(top, 0)
    if not ids:
        return top
    shown = set(position.token_ids[top].tolist())
    index_of = {token_id: index for index, token_id in enumerate(position.token_ids.tolist())}
    return np.append(top, [index_of[token_id] for token_id in ids if token_id not in shown]).astype(np.int64)
