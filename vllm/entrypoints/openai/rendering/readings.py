"""Which tokens a request wants read, and their readings by id."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm.entrypoints.openai.errors import ApiError
from vllm.entrypoints.openai.protocol.extensions import ReadingFields
from vllm.entrypoints.openai.rendering.logprobs import Position, positions
from vllm.entrypoints.openai.rendering.token_texts import TokenNames
from vllm.entrypoints.openai.rendering.turns import Turns
from vllm.entrypoints.openai.rendering.wide_rows import WIDE, readings_row
from vllm.entrypoints.openai.rendering.written_json import Written
from vllm.entrypoints.openai.state import ServerState
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import FlatLogprobs
from vllm.utils.checks import check_texts, check_token_ids, check_vocabulary


@dataclass(frozen=True)
class ReadingPlan:
    """The tokens that one request reads at generated positions.

    Attributes:
        token_ids: those that `readings` shows: logprob_token_ids, then the labels'.
        labels: a label's text by its token.
        logits_indices: those that `logits_values` shows.
        shows_topk: `readings` holds the top-k, too, as no token stands for them in `logprobs` (max_tokens=0).
    """

    token_ids: list[int]
    labels: dict[int, str]
    logits_indices: list[int]
    shows_topk: bool = False

    @classmethod
    def of(cls, request: ReadingFields, state: ServerState, shows_topk: bool) -> ReadingPlan:
        """What the request's fields ask for.

        Raises:
            VLLMValidationError: ids outside the vocabulary, or too many.
            ApiError: a label that is not one token.
        """
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
            raise VLLMValidationError(
                f"Requested {' and '.join(given)} of length {total}, which is greater than max allowed: {cap}",
                parameter=max(given, key=lambda name: len(given[name])),
                value=total,
            )
        return cls(list(dict.fromkeys([*ids, *labels])), labels, indices, shows_topk)

    @property
    def engine_ids(self) -> list[int]:
        """What the engine is asked to read."""
        return list(dict.fromkeys([*self.token_ids, *self.logits_indices]))

    @property
    def label_entries(self) -> list[dict[str, Any]] | None:
        """The answer's `labels`."""
        return [{"label": text, "token_id": token_id} for token_id, text in self.labels.items()] or None

    async def choice_fields(self, readings: FlatLogprobs | None, names: TokenNames, is_first: bool) -> dict[str, Any]:
        """The fields of a choice that show these tokens, for the positions of `readings`; `is_first`: the first of
        them is the choice's first."""
        fields: dict[str, Any] = {}
        if readings is None:
            return fields
        if self.token_ids or self.shows_topk:
            fields["readings"] = await self._readings(readings, names)
        if self.logits_indices:
            values = fields["logits_values_per_token"] = self._logits(readings)
            if is_first and values:
                fields["logits_values"] = values[0]
        return fields

    async def _readings(self, readings: FlatLogprobs, names: TokenNames) -> list[dict[str, Any]]:
        result = []
        turns = Turns()
        has_sampled = readings.has_sampled
        for position in positions(readings):
            shown = position if self.shows_topk else position.pick(_indices(position.token_ids, self.token_ids))
            await turns.take(len(shown.token_ids))
            result.append(
                {
                    "token_id": position.token_ids[0].item() if has_sampled else None,
                    "ids": await self._by_id(shown, names),
                    "mass": _number(float(np.exp(shown.logits.astype(np.float64) - shown.lse).sum())),
                    "lse": _number(shown.lse),
                    "entropy": _number(shown.entropy),
                }
            )
        return result

    async def _by_id(self, shown: Position, names: TokenNames) -> Written | dict[str, dict[str, Any]]:
        probabilities = _softmax(shown.logits)
        logprobs = shown.logits - np.float32(shown.lse)
        if len(logprobs) > WIDE:
            return await readings_row(
                shown.token_ids, logprobs, shown.logits, shown.ranks, probabilities, self.labels, names
            )
        ids = shown.token_ids.tolist()
        columns = (each.tolist() for each in (logprobs, shown.logits, shown.ranks, probabilities))
        return {
            str(token_id): {
                "token": text,
                "label": self.labels.get(token_id),
                "logprob": _number(logprob),
                "logit": _number(logit),
                "rank": rank,
                "probability": _number(probability),
            }
            for token_id, text, logprob, logit, rank, probability in zip(ids, names.texts(ids), *columns, strict=True)
        }

    def _logits(self, readings: FlatLogprobs) -> list[dict[str, float | None]]:
        logits = readings.select(self.logits_indices).logits.tolist()
        keys = list(map(str, self.logits_indices))
        return [dict(zip(keys, map(_number, row), strict=True)) for row in logits]


def _label_tokens(labels: Any, state: ServerState) -> dict[int, str]:
    """Each label's text by its one token."""
    tokens: dict[int, str] = {}
    for index, label in enumerate(check_texts("labels", labels)):
        ids = state.tokenizer.encode(label, add_special_tokens=False)
        if len(ids) != 1:
            raise ApiError(
                400,
                f"labels[{index}] {label!r} is {len(ids)} tokens, {ids}; a label here is one token (mind a leading "
                "space); /generative_scoring takes longer ones",
                param="labels",
                code="invalid_value",
            )
        if ids[0] in tokens:
            raise ApiError(
                400,
                f"labels {tokens[ids[0]]!r} and {label!r} are the same token, {ids[0]}",
                param="labels",
                code="invalid_value",
            )
        tokens[ids[0]] = label
    return tokens


def _indices(token_ids: np.ndarray, wanted: list[int]) -> np.ndarray:
    """int64 [len(wanted)]: where each stands in `token_ids`."""
    where = {token_id: index for index, token_id in enumerate(token_ids.tolist())}
    return np.array([where[token_id] for token_id in wanted], np.int64)


def _softmax(logits: np.ndarray) -> np.ndarray:
    """float64; NaN where no token is possible: no distribution over them exists then."""
    values = logits.astype(np.float64)
    top = values.max(initial=-np.inf)
    if np.isinf(top):
        return np.full(len(values), np.nan)
    weights = np.exp(values - top)
    return weights / weights.sum()


def _number(value: float) -> float | None:
    """What JSON can hold: null for an infinity, or for what was not asked for."""
    return value if math.isfinite(value) else None
