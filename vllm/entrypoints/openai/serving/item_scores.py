"""Scoring: a request's fields to the scores of its items."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from vllm.entrypoints.openai.errors import ApiError
from vllm.entrypoints.openai.protocol.scoring import ScoringFields
from vllm.entrypoints.openai.rendering.token_texts import id_name
from vllm.entrypoints.openai.serving.engine_requests import Submission
from vllm.entrypoints.openai.serving.scoring_prompts import PromptBuilder, ScoringPrompt
from vllm.entrypoints.openai.serving.usage import cached_tokens_shown
from vllm.entrypoints.openai.state import ServerState
from vllm.outputs import LabelScores, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.utils.checks import check_integer, wrong_type
from vllm.v1.engine.input_processor import ProcessedPrompt
from vllm.v1.engine.label_scoring import Label, LabelScorer, encode_labels

MAX_READINGS = 2**18
"""Most tokens of labels, over all items, that one request may read."""

MAX_TOKENS = 2**24
"""Most tokens of prompts that one request may make, counting each branch of the labels."""

# More characters, ids or readings than this are processed in a thread, to keep the event loop responsive.
_LARGE = 4096
# An item's cost beside its readings, in readings.
_ITEM_WORK = 16

Result = TypeVar("Result")


@dataclass(frozen=True)
class ScoredItems:
    """The result of a request, by item.

    Attributes:
        label_names: each label's text, as given or decoded.
        prompts: one per item.
        scores: one per item.
        usage: the request's token counts.
        is_large: making an answer of it is slow.
    """

    label_names: list[str]
    prompts: list[ScoringPrompt]
    scores: list[LabelScores]
    usage: dict[str, Any]
    is_large: bool


async def score_items(state: ServerState, body: ScoringFields, request_id: str) -> ScoredItems:
    """Check everything, queue it and wait for the results.

    Raises:
        ApiError, VLLMValidationError: a field that cannot be honoured; nothing is queued then.
        ApiError, EngineDeadError: see Submission.
    """
    items = _item_list(body.items)
    state.check_count(len(items), "items")
    field = body.given_field()
    labels = getattr(body, field)
    is_large = _size([body.query, *items, *(labels if isinstance(labels, list) else ())]) > _LARGE
    plan = await in_thread_if(is_large, lambda: _Plan.of(state, body, items, field))
    requests = await in_thread_if(plan.is_large, plan.requests)
    prompts, params = zip(*requests, strict=True)
    submission = await Submission.queue(state, request_id, prompts, params, body.priority or 0)
    outputs = await submission.results()
    return await in_thread_if(plan.is_large, lambda: plan.result(outputs))


async def in_thread_if(condition: bool, function: Callable[[], Result]) -> Result:
    """The function's result; it runs in a thread if `condition`."""
    return await asyncio.to_thread(function) if condition else function()


@dataclass(frozen=True)
class _Plan:
    """A checked request."""

    label_names: list[str]
    scorer: LabelScorer
    prompts: list[ScoringPrompt]
    processed: list[ProcessedPrompt]
    is_large: bool

    @classmethod
    def of(cls, state: ServerState, body: ScoringFields, items: list[Any], field: str) -> _Plan:
        """`field`: the one that holds the labels."""
        config, tokenizer = state.engine.model_config, state.engine.tokenizer
        labels = _labels(state, getattr(body, field), field, len(items))
        scorer = LabelScorer(labels, config.max_model_len)
        _check_num_requests(state, scorer.num_requests * len(items), field)
        builder = PromptBuilder(
            tokenizer,
            config.vocab_size,
            item_first=body.item_first is True,
            add_special_tokens=body.add_special_tokens is not False,
            max_len=scorer.max_prompt_len,
            max_total=MAX_TOKENS // scorer.num_requests,
            truncate_to=_truncated_len(body.truncate_prompt_tokens, scorer.max_prompt_len, config.max_model_len),
        )
        prompts = builder.build(body.query, items)
        processed = [ProcessedPrompt(None, prompt.token_ids, body.cache_salt) for prompt in prompts]
        num_readings = sum(len(label.token_ids) for label in labels)
        is_large = len(items) * (_ITEM_WORK + num_readings) > _LARGE
        return cls([_name(label, tokenizer) for label in labels], scorer, prompts, processed, is_large)

    def requests(self) -> list[tuple[ProcessedPrompt, SamplingParams]]:
        """The engine's requests of all prompts."""
        return [request for prompt in self.processed for request in self.scorer.requests(prompt)]

    def result(self, outputs: list[RequestOutput]) -> ScoredItems:
        """`outputs`: of `requests`, in order."""
        each = self.scorer.num_requests
        rows = [outputs[start : start + each] for start in range(0, len(outputs), each)]
        scores = [self.scorer.scores(prompt, row) for prompt, row in zip(self.processed, rows, strict=True)]
        num_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        # Only the first: a prompt's further requests always find it in the cache.
        num_cached = sum(cached_tokens_shown(row[0]) for row in rows)
        usage = {
            "prompt_tokens": num_tokens,
            "completion_tokens": 0,
            "total_tokens": num_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }
        return ScoredItems(self.label_names, self.prompts, scores, usage, self.is_large)


def _item_list(items: Any) -> list[Any]:
    if not isinstance(items, list):
        raise wrong_type("items", items, "a list of texts or of lists of token ids")
    if not items:
        raise ApiError(400, "items must not be empty", "items", "invalid_value")
    return items


def _labels(state: ServerState, given: Any, field: str, num_items: int) -> list[Label]:
    config = state.engine.model_config
    is_text = field == "labels"
    expected = "a list of strings" if is_text else "a list of token ids, or of lists of them"
    if not isinstance(given, list):
        raise wrong_type(field, given, expected)
    wrong = [element for element in given if isinstance(element, str) is not is_text]
    if wrong:
        raise wrong_type(field, wrong[0], expected)
    _check_num_readings(field, len(given), num_items)
    labels = encode_labels(given, state.engine.tokenizer, config.vocab_size, field)
    _check_num_readings(field, sum(len(label.token_ids) for label in labels), num_items)
    longest = max(labels, key=lambda label: len(label.token_ids))
    if len(longest.token_ids) > config.max_model_len:
        num_tokens = len(longest.token_ids)
        message = f"{field}: a label of {num_tokens} tokens is longer than the context's {config.max_model_len}"
        raise ApiError(400, message, field, "context_length_exceeded")
    return labels


def _check_num_readings(field: str, num_tokens: int, num_items: int) -> None:
    if num_tokens * num_items > MAX_READINGS:
        message = (
            f"{field} of {num_tokens} tokens together for {num_items} items are {num_tokens * num_items} readings, "
            f"more than the limit of {MAX_READINGS}"
        )
        raise ApiError(400, message, field, "too_many_readings")


def _check_num_requests(state: ServerState, num_requests: int, field: str) -> None:
    """Refuse, rather than as a full queue, what would never fit in the queue."""
    if num_requests > state.max_sequences:
        message = (
            f"these items with {field} of several tokens take {num_requests} sequences, more than the limit of "
            f"{state.max_sequences} (--max-num-seqs and --max-num-queued-reqs together)"
        )
        raise ApiError(400, message, field, "too_many_sequences")


def _truncated_len(asked: int | None, max_prompt_len: int, max_model_len: int) -> int | None:
    if asked is None:
        return None
    if asked == -1:
        return max_prompt_len
    return min(check_integer("truncate_prompt_tokens", asked, 1, max_model_len), max_prompt_len)


def _name(label: Label, tokenizer: Tokenizer | None) -> str:
    if label.text is not None:
        return label.text
    if tokenizer is None:
        return " ".join(map(id_name, label.token_ids))
    if len(label.token_ids) == 1:
        return tokenizer.decode_tokens(label.token_ids)[0]
    return tokenizer.decode(label.token_ids, skip_special_tokens=False)


def _size(parts: list[Any]) -> int:
    """Number of characters and ids."""
    return sum(len(part) if isinstance(part, (str, list)) else 1 for part in parts)
