"""The tokens that a request asks to read, and `readings` of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm.answers.answer import AnswerParser
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput
from vllm.server.errors import ApiError
from vllm.server.protocol.generation import GenerationFields
from vllm.server.rendering.logprobs import positions, readings_row
from vllm.server.rendering.token_texts import TokenNames, TokenPieces
from vllm.server.state import ServerState
from vllm.utils.checks import check_texts, check_token_ids, check_vocabulary


@dataclass(frozen=True)
class ReadingPlan:
    """The tokens that one request reads at generated positions.

    Attributes:
        token_ids: shown in `readings`: logprob_token_ids, then the labels'.
        labels: label texts by token id.
        logits_indices: shown in `logits_values`.
        shows_topk: `readings` shows all entries, the top-k too: with max_tokens=0 no token in `logprobs` has them.
    """

    token_ids: list[int]
    labels: dict[int, str]
    logits_indices: list[int]
    shows_topk: bool = False

    @classmethod
    def of(cls, request: GenerationFields, state: ServerState, shows_topk: bool) -> ReadingPlan:
        """Raises VLLMValidationError for ids outside the vocabulary or too many, ApiError for a label of several."""
        config = state.engine.model_config
        ids = check_token_ids("logprob_token_ids", request.logprob_token_ids)
        labels = _label_tokens(request.labels, state)
        indices = check_token_ids("logits_indices", request.logits_indices)
        check_vocabulary("logits_indices", indices, config.vocab_size)
        cap = config.vocab_size if config.max_logprob_token_ids == -1 else config.max_logprob_token_ids
        lists = {"logprob_token_ids": ids, "labels": list(labels), "logits_indices": indices}
        given = {name: each for name, each in lists.items() if each}
        total = len({token_id for each in given.values() for token_id in each})
        if total > cap and (len(given) > 1 or "logprob_token_ids" not in given):
            message = f"Requested {' and '.join(given)} of length {total}, which is greater than max allowed: {cap}"
            raise VLLMValidationError(message, max(given, key=lambda name: len(given[name])), total)
        return cls(list(dict.fromkeys([*ids, *labels])), labels, indices, shows_topk)

    @property
    def engine_ids(self) -> list[int]:
        """All ids that the engine reads."""
        return list(dict.fromkeys([*self.token_ids, *self.logits_indices]))

    @property
    def label_entries(self) -> list[dict[str, Any]] | None:
        """The answer's `labels`."""
        return [{"label": text, "token_id": token_id} for token_id, text in self.labels.items()] or None

    async def choice_fields(self, readings: FlatLogprobs | None, names: TokenNames, is_first: bool) -> dict[str, Any]:
        """The choice's fields for the positions of `readings`; `is_first`: they begin the choice."""
        fields: dict[str, Any] = {}
        if readings is None:
            return fields
        if self.token_ids or self.shows_topk:
            fields["readings"] = await self._readings(readings, names)
        if self.logits_indices:
            keys = list(map(str, self.logits_indices))
            rows = readings.select(self.logits_indices).logits.tolist()
            values = [dict(zip(keys, map(_number, row), strict=True)) for row in rows]
            fields["logits_values_per_token"] = values
            if is_first and values:
                fields["logits_values"] = values[0]
        return fields

    async def _readings(self, readings: FlatLogprobs, names: TokenNames) -> list[dict[str, Any]]:
        result = []
        async for position in positions(readings):
            shown = position if self.shows_topk else position.pick(_indices(position.token_ids, self.token_ids))
            logits, probabilities = shown.logits, _softmax(shown.logits)
            # Not those of `shown`: in the *_logits modes they are logits.
            logprobs = logits - np.float32(shown.lse)
            result.append(
                {
                    "token_id": position.token_ids[0].item() if readings.has_sampled else None,
                    "ids": await readings_row(
                        shown.token_ids, logprobs, logits, shown.ranks, probabilities, self.labels, names
                    ),
                    "mass": _number(float(np.exp(logits.astype(np.float64) - shown.lse).sum())),
                    "lse": _number(shown.lse),
                    "entropy": _number(shown.entropy),
                }
            )
        return result


def _label_tokens(labels: Any, state: ServerState) -> dict[int, str]:
    """Label texts by their only token."""
    tokens: dict[int, str] = {}
    for index, label in enumerate(check_texts("labels", labels)):
        ids = state.tokenizer.encode(label, add_special_tokens=False)
        if len(ids) != 1:
            message = (
                f"labels[{index}] {label!r} is {len(ids)} tokens, {ids}; a label here is one token (mind a leading "
                "space); /generative_scoring takes longer ones"
            )
            raise ApiError(400, message, "labels", "invalid_value")
        if ids[0] in tokens:
            message = f"labels {tokens[ids[0]]!r} and {label!r} are the same token, {ids[0]}"
            raise ApiError(400, message, "labels", "invalid_value")
        tokens[ids[0]] = label
    return tokens


def _indices(token_ids: np.ndarray, wanted: list[int]) -> np.ndarray:
    """int64 [len(wanted)]: the index of each in `token_ids`."""
    where = {token_id: index for index, token_id in enumerate(token_ids.tolist())}
    return np.array([where[token_id] for token_id in wanted], np.int64)


def _softmax(logits: np.ndarray) -> np.ndarray:
    """float64; all NaN if every logit is -inf."""
    values = logits.astype(np.float64)
    top = values.max(initial=-np.inf)
    if np.isinf(top):
        return np.full(len(values), np.nan)
    weights = np.exp(values - top)
    return weights / weights.sum()


def _number(value: float) -> float | None:
    """None for what JSON cannot hold, and for an entropy that was not requested (NaN)."""
    return value if math.isfinite(value) else None


class PositionParts:
    """Writes `part` into the positions of a growing choice: reasoning, content or tool_call, where the token begins.
    Positions whose text may still become a marker wait for what comes."""

    def __init__(self, parser: AnswerParser, pieces: TokenPieces) -> None:
        """`pieces`: of the choice's tokens, from its beginning."""
        self._parser, self._pieces = parser, pieces
        self._offsets: list[int] = []
        self._waiting: dict[str, list[dict[str, Any]]] = {}

    def write(self, completion: CompletionOutput, lists: dict[str, list[dict[str, Any]]]) -> None:
        """Mark the positions of `lists`, each of what `completion` adds, in place: those that wait are taken out, and
        stand at the beginning of a later list of that name."""
        if not completion.token_ids or any(len(each) != len(completion.token_ids) for each in lists.values()):
            return
        self._offsets += self._pieces.add(completion.token_ids)[1]
        parts = []
        for offset in self._offsets:
            part = self._parser.part_at(offset)
            if part is None:
                break
            parts.append(part)
        del self._offsets[: len(parts)]
        for name, own in lists.items():
            known = self._waiting.pop(name, []) + own
            self._waiting[name] = known[len(parts) :]
            own[:] = [{**each, "part": part} for each, part in zip(known, parts, strict=False)]
