"""Readings as OpenAI's endpoints show them: the classic lists of completions, the entries of chat, prompt positions.

JSON has no infinity: an impossible token's logprob is OpenAI's -9999.0.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from vllm.entrypoints.openai.token_texts import TokenNames, id_name
from vllm.logprobs import FlatLogprobs, PromptLogprobs

IMPOSSIBLE = -9999.0

# So many entries are made between two turns of the event loop: some milliseconds.
_ENTRIES_A_TURN = 4096


class Position(NamedTuple):
    """One position's entries, the token itself first."""

    token_ids: list[int]
    logprobs: list[float]
    logits: list[float]
    ranks: list[int]


class ChatEntry(msgspec.Struct):
    """A token's reading in chat's shape."""

    token: str
    logprob: float
    bytes: list[int] | None
    token_id: int
    rank: int
    logit: float


class ClassicLogprobs(msgspec.Struct):
    """A choice's `logprobs` in completions' shape."""

    text_offset: list[int] = []
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[msgspec.Raw | dict[str, float] | None] = []
    token_ids: list[int] = []
    ranks: list[int | None] = []

    def extend(self, other: ClassicLogprobs) -> None:
        """Append what comes after."""
        for name in self.__struct_fields__:
            getattr(self, name).extend(getattr(other, name))


def positions(readings: FlatLogprobs) -> Iterator[Position]:
    """Every position that was read."""
    logprobs, logits = _finite(readings.logprobs), _finite(readings.logits)
    for start, stop in zip(readings.start_indices.tolist(), readings.end_indices.tolist(), strict=True):
        span = slice(start, stop)
        yield Position(
            readings.token_ids[span].tolist(),
            logprobs[span].tolist(),
            logits[span].tolist(),
            readings.ranks[span].tolist(),
        )


async def classic_logprobs(
    readings: FlatLogprobs,
    names: TokenNames,
    pieces: Sequence[str],
    offsets: Sequence[int],
) -> ClassicLogprobs:
    """Completions' shape of positions that follow one another.

    Args:
        readings: of P positions, each with its token first.
        names: how tokens are shown.
        pieces: each position's text [P].
        offsets: where it begins [P].
    """
    result = ClassicLogprobs(text_offset=list(offsets))
    turns = Turns()
    for position, piece in zip(positions(readings), pieces, strict=True):
        await turns.take(len(position.token_ids))
        chosen = id_name(position.token_ids[0]) if names.as_ids else piece
        top: Any = _keyed(chosen, position, names)
        result.tokens.append(chosen)
        result.token_logprobs.append(position.logprobs[0])
        result.token_ids.append(position.token_ids[0])
        result.ranks.append(position.ranks[0])
        if len(top) > _ENTRIES_A_TURN:
            top = msgspec.Raw(msgspec.json.encode(top))
        result.top_logprobs.append(top)
    return result


async def classic_prompt_logprobs(
    readings: PromptLogprobs | None,
    names: TokenNames,
    token_ids: Sequence[int],
    pieces: Sequence[str],
    offsets: Sequence[int],
) -> ClassicLogprobs:
    """The same for a prompt, whose first position, if not more, has no reading."""
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
    """Chat's `content`: each generated token with the true top `num_topk` (-1: the vocabulary), then `ids`."""
    content = []
    turns = Turns()
    for position in positions(readings):
        shown = _top_then_ids(position, num_topk, ids)
        top: list[ChatEntry] = []
        for start in range(0, len(shown), _ENTRIES_A_TURN):
            part = shown[start : start + _ENTRIES_A_TURN]
            await turns.take(len(part))
            top += _chat_entries(position, part, names)
        (own,) = _chat_entries(position, [0], names)
        await turns.take(1)
        entry: dict[str, Any] = {name: getattr(own, name) for name in own.__struct_fields__}
        # Encoded here, in turns: the whole answer is encoded in one.
        entry["top_logprobs"] = msgspec.Raw(msgspec.json.encode(top)) if len(top) > _ENTRIES_A_TURN else top
        content.append(entry)
    return content


async def prompt_logprobs(readings: PromptLogprobs, names: TokenNames) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id, null where nothing was read."""
    result: list[dict[str, Any] | None] = [None] * readings.num_unread
    turns = Turns()
    for position in positions(readings):
        await turns.take(len(position.token_ids))
        texts = names.texts(position.token_ids)
        result.append(
            {
                str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": text, "logit": logit}
                for token_id, text, logprob, logit, rank in zip(position.token_ids, texts, *position[1:], strict=True)
            }
        )
    return result


class Turns:
    """Lets the event loop take a turn once in a while."""

    def __init__(self) -> None:
        self._num_entries = 0

    async def take(self, num_entries: int) -> None:
        """Count entries that are about to be made."""
        self._num_entries += num_entries
        if self._num_entries >= _ENTRIES_A_TURN:
            self._num_entries = 0
            await asyncio.sleep(0)


def _finite(values: np.ndarray) -> np.ndarray:
    return np.where(np.isneginf(values), np.float32(IMPOSSIBLE), values)


def _keyed(chosen: str, position: Position, names: TokenNames) -> dict[str, float]:
    """Logprobs by text. The chosen token keeps its text as its key, then the likelier one does; others with that text
    go by their ids."""
    texts = names.texts(position.token_ids)
    texts[0] = chosen
    keyed = dict(zip(texts, position.logprobs, strict=True))
    if len(keyed) == len(texts):
        return keyed
    keyed = {}
    for text, token_id, logprob in zip(texts, position.token_ids, position.logprobs, strict=True):
        keyed[id_name(token_id) if text in keyed else text] = logprob
    return keyed


def _top_then_ids(position: Position, num_topk: int, ids: Sequence[int]) -> list[int]:
    """Entries' indices: the k most likely in order, then those of `ids` that are not among them."""
    num_entries = len(position.token_ids)
    k = num_entries if num_topk < 0 else num_topk
    # The entries after the first begin with the top k, but for the first if it is one of them.
    candidates = range(min(k + 1, num_entries))
    top = sorted(candidates, key=lambda i: (-position.logits[i], position.token_ids[i]))[:k]
    if not ids:
        return top
    shown = {position.token_ids[i] for i in top}
    index_of = {token_id: i for i, token_id in enumerate(position.token_ids)}
    return top + [index_of[token_id] for token_id in ids if token_id not in shown]


def _chat_entries(position: Position, indices: Sequence[int], names: TokenNames) -> list[ChatEntry]:
    token_ids = [position.token_ids[i] for i in indices]
    return [
        ChatEntry(text, position.logprobs[i], names.bytes_of(token_id), token_id, position.ranks[i], position.logits[i])
        for i, token_id, text in zip(indices, token_ids, names.texts(token_ids), strict=True)
    ]
