"""Scoring: a request's fields to the scores of its items."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from vllm.answers.prompts.marked_media import MarkedMedia
from vllm.outputs import LabelScores, RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.server.errors import ApiError
from vllm.server.protocol.scoring import ScoringFields
from vllm.server.rendering.token_texts import id_name
from vllm.server.serving.engine_requests import Submission
from vllm.server.serving.generation.sampling import with_picture_options
from vllm.server.serving.labels.scoring_prompts import PromptBuilder
from vllm.server.serving.usage import cached_tokens_shown
from vllm.server.state import ServerState
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.utils.checks import check_integer, wrong_type
from vllm.v1.engine.input_processor import ProcessedPrompt
from vllm.v1.engine.plans.label_scoring import Label, LabelScorer, encode_labels

MAX_READINGS = 2**18
"""Most tokens of labels, over all items, that one request may read."""

MAX_TOKENS = 2**24
"""Most tokens of prompts that one request may make, counting each branch of the labels."""

# More characters, ids or readings than this are processed in a thread, to keep the event loop responsive.
_LARGE = 4096
# An item's cost beside its readings, in readings.
_ITEM_WORK = 16

Result = TypeVar("Result")


async def score_items(state: ServerState, body: ScoringFields, request_id: str) -> ScoredItems:
    """Check everything, queue it and wait for the results. Raises ApiError or VLLMValidationError for a field that
    cannot be honoured, before anything is queued."""
    items = body.items
    if not isinstance(items, list):
        raise wrong_type("items", items, "a list of texts or of lists of token ids")
    if not items:
        raise ApiError(400, "items must not be empty", "items", "invalid_value")
    state.check_count(len(items), "items")
    field = body.given_field()
    labels = getattr(body, field)
    parts = [body.query, *items, *(labels if isinstance(labels, list) else ())]
    is_large = sum(len(part) if isinstance(part, (str, list)) else 1 for part in parts) > _LARGE
    with_picture_options(state, [{}], body.mm_processor_kwargs)
    pictures = MarkedMedia(state.engine.input_processor, body.cache_salt, body.mm_processor_kwargs)
    query = pictures.marked("query", body.query)
    items = [pictures.marked(f"items[{index}]", each) for index, each in enumerate(items)]
    await pictures.load()
    is_large |= pictures.count > 0
    scored = await in_thread_if(is_large, lambda: ScoredItems(state, body, query, items, field, pictures))
    requests = await in_thread_if(scored.is_large, scored.requests)
    prompts, params = zip(*requests, strict=True)
    submission = await Submission.queue(state, request_id, prompts, params, body.priority or 0)
    outputs = await submission.results()
    await in_thread_if(scored.is_large, lambda: scored.finish(outputs))
    return scored


async def in_thread_if(condition: bool, function: Callable[[], Result]) -> Result:
    """The function's result; it runs in a thread if `condition`."""
    return await asyncio.to_thread(function) if condition else function()


class ScoredPrompts:
    """The prompts of a checked request; `scores` of their labels, and `usage`, once it is finished."""

    def __init__(self, scorer: LabelScorer, prompts: Sequence[ProcessedPrompt]) -> None:
        self._scorer, self._processed = scorer, prompts
        self.scores: list[LabelScores] = []
        self.usage: dict[str, Any] = {}

    def requests(self) -> list[tuple[ProcessedPrompt, SamplingParams]]:
        """The engine's requests of all prompts."""
        return [request for prompt in self._processed for request in self._scorer.requests(prompt)]

    def finish(self, outputs: list[RequestOutput]) -> None:
        """Set scores and usage from the outputs of `requests`."""
        count = self._scorer.num_requests
        rows = [outputs[start : start + count] for start in range(0, len(outputs), count)]
        self.scores = [self._scorer.scores(prompt, row) for prompt, row in zip(self._processed, rows, strict=True)]
        num_tokens = sum(len(prompt.token_ids) for prompt in self._processed)
        # Only the first: a prompt's further requests always find it in the cache.
        num_cached = sum(cached_tokens_shown(row[0]) for row in rows)
        self.usage = {
            "prompt_tokens": num_tokens,
            "completion_tokens": 0,
            "total_tokens": num_tokens,
            "prompt_tokens_details": {"cached_tokens": num_cached},
        }


class ScoredItems(ScoredPrompts):
    """The scores of items, in whose order lists are.

    `label_names` are the labels' texts, as given or decoded. With `is_large`, processing this is slow.
    """

    def __init__(
        self,
        state: ServerState,
        body: ScoringFields,
        query: Any,
        items: list[Any],
        field: str,
        pictures: MarkedMedia,
    ) -> None:
        """`field`: the one that holds the labels. `pictures`: for which texts have marks."""
        config, tokenizer = state.engine.model_config, state.engine.input_processor.tokenizer
        labels = _labels(state, getattr(body, field), field, len(items))
        scorer = LabelScorer(labels, config.max_model_len)
        num_requests = scorer.num_requests * len(items)
        # An error of its own: a full queue's error would say that trying again may help.
        if num_requests > state.max_sequences:
            message = (
                f"these items with {field} of several tokens take {num_requests} sequences, more than the limit of "
                f"{state.max_sequences} (--max-num-seqs and --max-num-queued-reqs together)"
            )
            raise ApiError(400, message, field, "too_many_sequences")
        truncate_to = body.truncate_prompt_tokens
        if truncate_to == -1:
            truncate_to = scorer.max_prompt_len
        elif truncate_to is not None:
            check_integer("truncate_prompt_tokens", truncate_to, 1, config.max_model_len)
            truncate_to = min(truncate_to, scorer.max_prompt_len)
        builder = PromptBuilder(
            tokenizer,
            config.vocab_size,
            item_first=body.item_first is True,
            add_special_tokens=body.add_special_tokens is not False,
            max_len=scorer.max_prompt_len,
            max_total=MAX_TOKENS // scorer.num_requests,
            truncate_to=truncate_to,
            media=pictures,
        )
        self.label_names = [_name(label, tokenizer) for label in labels]
        self.prompts = builder.build(query, items)
        processed = [ProcessedPrompt(None, prompt.token_ids, body.cache_salt) for prompt in self.prompts]
        if pictures.count:
            pairs = enumerate(zip(items, processed, strict=True))
            processed = [builder.pictured(pictures, query, index, pair) for index, pair in pairs]
            self.prompts = [
                replace(own, token_ids=made.token_ids) for own, made in zip(self.prompts, processed, strict=True)
            ]
        super().__init__(scorer, processed)
        num_readings = sum(len(label.token_ids) for label in labels)
        self.is_large = len(items) * (_ITEM_WORK + num_readings) > _LARGE


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
    labels = encode_labels(given, state.engine.input_processor.tokenizer, config.vocab_size, field)
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


def _name(label: Label, tokenizer: Tokenizer | None) -> str:
    if label.text is not None:
        return label.text
    if tokenizer is None:
        return " ".join(map(id_name, label.token_ids))
    if len(label.token_ids) == 1:
        return tokenizer.decode_tokens(label.token_ids)[0]
    return tokenizer.decode(label.token_ids, skip_special_tokens=False)
