"""Readings as OpenAI's endpoints show them: the classic lists of completions, the entries of chat, prompt positions.

JSON has no infinity: an impossible token's logprob is OpenAI's -9999.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from vllm.entrypoints.openai.rendering.token_texts import TokenNames, id_name
from vllm.entrypoints.openai.rendering.turns import Turns
from vllm.entrypoints.openai.rendering.wide_rows import WIDE, chat_row, classic_row, prompt_row
from vllm.entrypoints.openai.rendering.written_json import Written
from vllm.logprobs import FlatLogprobs, PromptLogprobs

IMPOSSIBLE = -9999.0

# The arrays of so many entries are put together at once: about a millisecond.
_ENTRIES_A_PART = 65536


class Position(NamedTuple):
    """One position's entries, the token itself first."""

    token_ids: np.ndarray  # int32 [E]
    logprobs: np.ndarray  # float32 [E]
    logits: np.ndarray  # float32 [E]
    ranks: np.ndarray  # int32 [E]
    lse: float
    entropy: float  # NaN when it was not asked for

    def pick(self, indices: np.ndarray) -> Position:
        """The entries at `indices`."""
        return self._replace(
            token_ids=self.token_ids[indices],
            logprobs=self.logprobs[indices],
            logits=self.logits[indices],
            ranks=self.ranks[indices],
        )


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
    top_logprobs: list[Written | dict[str, float] | None] = []
    token_ids: list[int] = []
    ranks: list[int | None] = []

    def extend(self, other: ClassicLogprobs) -> None:
        """Append what comes after."""
        for name in self.__struct_fields__:
            getattr(self, name).extend(getattr(other, name))


def positions(readings: FlatLogprobs) -> Iterator[Position]:
    """Every position that was read."""
    for part in readings.parts(_ENTRIES_A_PART):
        token_ids, logprobs, logits, ranks = part.token_ids, part.logprobs, part.logits, part.ranks
        start = 0
        for stop, lse, entropy in zip(part.end_indices.tolist(), part.lse.tolist(), part.entropy.tolist(), strict=True):
            own = slice(start, stop)
            yield Position(token_ids[own], logprobs[own], logits[own], ranks[own], lse, entropy)
            start = stop


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
        token_id = position.token_ids[0].item()
        logprobs = _finite(position.logprobs)
        chosen = id_name(token_id) if names.as_ids else piece
        result.tokens.append(chosen)
        result.token_logprobs.append(logprobs[0].item())
        result.token_ids.append(token_id)
        result.ranks.append(position.ranks[0].item())
        if len(position.token_ids) > WIDE:
            result.top_logprobs.append(await classic_row(position.token_ids, logprobs, chosen, names))
        else:
            result.top_logprobs.append(_keyed(chosen, position.token_ids.tolist(), logprobs.tolist(), names))
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
        shown = position.pick(_top_then_ids(position, num_topk, ids))
        await turns.take(1 + len(shown.token_ids))
        (own,) = _chat_entries(position.pick(np.zeros(1, np.int64)), names)
        top: Written | list[ChatEntry]
        if len(shown.token_ids) > WIDE:
            logprobs, logits = _finite(shown.logprobs), _finite(shown.logits)
            top = await chat_row(shown.token_ids, logprobs, shown.ranks, logits, names)
        else:
            top = _chat_entries(shown, names)
        content.append({**{name: getattr(own, name) for name in own.__struct_fields__}, "top_logprobs": top})
    return content


async def prompt_logprobs(readings: PromptLogprobs, names: TokenNames) -> list[Written | dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id, null where nothing was read."""
    result: list[Written | dict[str, Any] | None] = [None] * readings.num_unread
    turns = Turns()
    for position in positions(readings):
        await turns.take(len(position.token_ids))
        logprobs, logits = _finite(position.logprobs), _finite(position.logits)
        if len(logprobs) > WIDE:
            result.append(await prompt_row(position.token_ids, logprobs, position.ranks, logits, names))
            continue
        token_ids = position.token_ids.tolist()
        columns = logprobs.tolist(), logits.tolist(), position.ranks.tolist()
        result.append(
            {
                str(token_id): {"logprob": logprob, "rank": rank, "decoded_token": text, "logit": logit}
                for token_id, text, logprob, logit, rank in zip(
                    token_ids, names.texts(token_ids), *columns, strict=True
                )
            }
        )
    return result


def _finite(values: np.ndarray) -> np.ndarray:
    return np.where(values == -np.inf, np.float32(IMPOSSIBLE), values)


def _keyed(chosen: str, token_ids: list[int], logprobs: list[float], names: TokenNames) -> dict[str, float]:
    """Logprobs by text. The chosen token keeps its text as its key, then the likelier one does; others with that text
    go by their ids."""
    texts = names.texts(token_ids)
    texts[0] = chosen
    keyed = dict(zip(texts, logprobs, strict=True))
    if len(keyed) == len(texts):
        return keyed
    keyed = {}
    for text, token_id, logprob in zip(texts, token_ids, logprobs, strict=True):
        keyed[id_name(token_id) if text in keyed else text] = logprob
    return keyed


def _top_then_ids(position: Position, num_topk: int, ids: Sequence[int]) -> np.ndarray:
    """Entries' indices int64: the k most likely in order, then those of `ids` that are not among them."""
    num_entries = len(position.token_ids)
    k = num_entries if num_topk < 0 else num_topk
    # The entries after the first are the top k in order, but for the first if it is one of them.
    ranked = slice(1, min(k + 1, num_entries))
    falling, first = -position.logits[ranked], -position.logits[0]
    tied = slice(int(np.searchsorted(falling, first)), int(np.searchsorted(falling, first, side="right")))
    place = tied.start + int(np.searchsorted(position.token_ids[ranked][tied], position.token_ids[0]))
    top = np.insert(np.arange(ranked.start, ranked.stop), place, 0)[:k]
    if not ids:
        return top
    shown = set(position.token_ids[top].tolist())
    index_of = {token_id: index for index, token_id in enumerate(position.token_ids.tolist())}
    return np.append(top, [index_of[token_id] for token_id in ids if token_id not in shown]).astype(np.int64)


def _chat_entries(position: Position, names: TokenNames) -> list[ChatEntry]:
    token_ids, ranks = position.token_ids.tolist(), position.ranks.tolist()
    logprobs, logits = _finite(position.logprobs).tolist(), _finite(position.logits).tolist()
    return [
        ChatEntry(text, logprob, names.bytes_of(token_id), token_id, rank, logit)
        for token_id, text, logprob, rank, logit in zip(
            token_ids, names.texts(token_ids), logprobs, ranks, logits, strict=True
        )
    ]
