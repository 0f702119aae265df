"""A decision as ordinary requests of the engine, which share the input's blocks, and the answers from their outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from vllm.answers.prompts.marked_media import MARK, MarkedMedia
from vllm.config import ModelConfig
from vllm.decisions.answers import answer, diagnose, order_reading
from vllm.decisions.conversation import Turn, parse_input, without_beginning
from vllm.decisions.labels import LabelSpeller
from vllm.decisions.params import DecisionParams
from vllm.decisions.prompts import (
    PREDICATE_LABELS,
    ROOM_FOR_EXAMPLES,
    VALUE_CUE,
    WORD_PREDICATE_LABELS,
    answers_in_words,
    question_text,
)
from vllm.decisions.questions import parse_questions
from vllm.decisions.render import make_frame
from vllm.decisions.types import Decision, DecisionUsage
from vllm.exceptions import VLLMValidationError
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.v1.engine.input_processor import ProcessedPrompt
from vllm.v1.engine.plans.label_scoring import Label, LabelScorer

MAX_READINGS = 2**20
"""Most labels' tokens, over all questions and orders, of one decision."""

MAX_TOKENS = 2**24
"""Most tokens of all its prompts."""


# An input is shortened so often, each time by as much as it was too long.
_MAX_CUTS = 8


@dataclass(frozen=True)
class _Reading:
    """One prompt: a question with its options in one order.

    Attributes:
        index: of the question.
        order: the options' indices, as the prompt lists them.
        labels: as the prompt lists them.
        places: each option's index in `scorer`'s labels.
        read: "labels" or "values".
    """

    index: int
    order: list[int]
    labels: list[Label]
    places: list[int]
    scorer: LabelScorer
    read: str


class DecisionPlan:
    """One input and its questions, checked: the requests to queue, and the decision from their outputs.

    Args:
        tokenizer: the model's; None = it has none here.
        input: a text, or a list of OpenAI's messages and tool calls.
        questions: see `parse_questions`.
        media: pictures and videos that the input has marks for.

    Raises:
        VLLMValidationError: names the field, its value and the limit; nothing was queued.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer | None,
        input: Any,
        questions: Any,
        params: DecisionParams | None = None,
        media: MarkedMedia | None = None,
    ) -> None:
        if tokenizer is None:
            message = "decisions need a tokenizer, and skip_tokenizer_init left it out"
            raise VLLMValidationError(message, "input")
        self.questions = parse_questions(questions)
        self._params = params or DecisionParams()
        self._params.scalings.check(self.questions)
        self._config = config
        self._tokenizer = tokenizer
        self._in_words = self._params.read != "labels" and answers_in_words(config.hf_config.num_weights)
        self._by_value = self._in_words or self._params.read == "values"
        self._scorers: dict[tuple[tuple[int, ...], ...], LabelScorer] = {}
        self._media = media = media if media is not None and media.count else None
        if media is not None and self._params.truncate_prompt_tokens is not None:
            message = "truncate_prompt_tokens cannot cut an input with pictures: leave it out"
            raise VLLMValidationError(message, "truncate_prompt_tokens", self._params.truncate_prompt_tokens)
        self._readings, prompts = self._plan(parse_input(input))
        salt = self._params.cache_salt
        if media is None:
            self._prompts = [ProcessedPrompt(None, ids, salt) for ids in prompts]
        else:
            self._prompts = [media.prompt("input", self._head, ids) for ids in prompts]
            self._check_lengths(self._readings, [prompt.token_ids for prompt in self._prompts])

    def _plan(self, turns: list[Turn]) -> tuple[list[_Reading], list[list[int]]]:
        """All readings and their prompts; with truncate_prompt_tokens the input is cut until every prompt fits."""
        limit = self._params.truncate_prompt_tokens
        if limit is not None and limit > self._config.max_model_len:
            message = f"truncate_prompt_tokens must be at most max_model_len={self._config.max_model_len}, got {limit}"
            raise VLLMValidationError(message, "truncate_prompt_tokens", limit)
        num_cut = 0
        for _ in range(_MAX_CUTS):
            readings, prompts = self._write(without_beginning(turns, num_cut, self._tokenizer) if num_cut else turns)
            pairs = zip(readings, prompts, strict=True)
            excess = max(len(ids) - self._limit(reading, limit) for reading, ids in pairs)
            if excess <= 0 or limit is None:
                break
            # Cutting may change how the tokens beside the cut are spelled: what is left is counted again.
            num_cut += excess
        self._check_lengths(readings, prompts)
        return readings, prompts

    @staticmethod
    def _limit(reading: _Reading, given: int | None) -> int:
        most = reading.scorer.max_prompt_len
        return most if given in (None, -1) else min(given, most)

    def _write(self, turns: list[Turn]) -> tuple[list[_Reading], list[list[int]]]:
        params, tokenizer = self._params, self._tokenizer
        probe = question_text(self.questions[0], (), range(len(self.questions[0].options)))
        template = (params.chat_template, params.chat_template_kwargs)
        cue = VALUE_CUE if self._by_value else ""
        given, longest = params.truncate_prompt_tokens, self._config.max_model_len
        room = longest if given is None or given < 0 else given
        has_examples = self._in_words and room >= ROOM_FOR_EXAMPLES
        frame = make_frame(turns, probe, tokenizer, *template, cue, has_examples)
        if self._media is not None:
            self._head = frame.head
            if len(MARK.findall(frame.head)) != self._media.count:
                raise VLLMValidationError("input: the chat template does not write each picture once", "input")
            words = self._media.words(params.chat_template)
            frame = replace(frame, head=self._media.written("input", frame.head, words))
        predicate_labels = WORD_PREDICATE_LABELS if self._in_words else PREDICATE_LABELS
        readings = list(self._read_all(LabelSpeller(tokenizer, frame.tail, predicate_labels)))
        num_tokens = sum(len(label.token_ids) for each in readings for label in each.labels)
        if num_tokens > MAX_READINGS:
            message = f"the questions' options in all orders are {num_tokens} readings, more than {MAX_READINGS}"
            raise VLLMValidationError(message, "questions", num_tokens)
        texts = [self._text(each) for each in readings]
        return readings, frame.encode(tokenizer, texts)

    def _text(self, reading: _Reading) -> str:
        shown = [label.text or "" for label in reading.labels] if reading.read == "labels" else ()
        return question_text(self.questions[reading.index], shown, reading.order, self._in_words)

    def _read_all(self, speller: LabelSpeller) -> Iterator[_Reading]:
        for index, question in enumerate(self.questions):
            labels, by_value = self._labels(speller, index)
            # Labels that say what they stand for go with their options, the others with the places in the list.
            is_fixed = by_value or (question.type == "predicate" and labels[0].text != "A")
            scorer = self._scorer(labels)
            for order in orders(len(labels), self._params.permutations):
                places = (
                    list(range(len(labels))) if is_fixed else [order.index(option) for option in range(len(labels))]
                )
                listed = [labels[option] for option in order] if is_fixed else labels
                yield _Reading(index, order, listed, places, scorer, "values" if by_value else "labels")

    def _labels(self, speller: LabelSpeller, index: int) -> tuple[list[Label], bool]:
        """A question's labels, and whether they are its options' texts."""
        question, place = self.questions[index], f"questions[{index}]"
        if self._params.read == "values":
            return speller.value_labels(question, place), True
        # A model that knows what to call things still says yes more readily than true.
        if self._in_words and question.type != "predicate":
            with suppress(VLLMValidationError):  # texts that the tokenizer cannot tell apart
                return speller.value_labels(question, place), True
        return speller.labels_for(question), False

    def _scorer(self, labels: Sequence[Label]) -> LabelScorer:
        key = tuple(tuple(label.token_ids) for label in labels)
        if key not in self._scorers:
            self._scorers[key] = LabelScorer(labels, self._config.max_model_len)
        return self._scorers[key]

    def _check_lengths(self, readings: Sequence[_Reading], prompts: Sequence[list[int]]) -> None:
        total = 0
        for reading, ids in zip(readings, prompts, strict=True):
            total += len(ids) * reading.scorer.num_requests
            most = self._limit(reading, self._params.truncate_prompt_tokens)
            if len(ids) > most:
                question, limit = self.questions[reading.index], self._config.max_model_len
                name = f"questions[{reading.index}]" + (f" ({question.name!r})" if question.name else "")
                advice = "; truncate_prompt_tokens lets the input's beginning go"
                if self._params.truncate_prompt_tokens is not None:
                    advice = " even without the input, of which alone truncate_prompt_tokens lets the beginning go"
                message = (
                    f"{name} makes a prompt of {len(ids)} tokens, and {most} is the limit beside the labels{advice}: "
                    f"the model's maximum context length is {limit} tokens"
                )
                raise VLLMValidationError(message, f"questions[{reading.index}]", len(ids))
        if total > MAX_TOKENS:
            message = f"the questions make prompts of {total} tokens together, more than {MAX_TOKENS}; send fewer"
            raise VLLMValidationError(message, "questions", total)

    @property
    def num_requests(self) -> int:
        """Requests of the engine."""
        return sum(reading.scorer.num_requests for reading in self._readings)

    def requests(self) -> list[tuple[ProcessedPrompt, SamplingParams]]:
        """The requests to queue, at once and in this order; ready for the engine core."""
        pairs = zip(self._readings, self._prompts, strict=True)
        return [request for reading, prompt in pairs for request in reading.scorer.requests(prompt)]

    def decision(self, outputs: Sequence[RequestOutput], cached_step: int = 1) -> Decision:
        """The answers from the outputs of `requests`. `cached_step`: counts of cached tokens are rounded down to its
        multiples."""
        found: list[list[Any]] = [[] for _ in self.questions]
        reads = {reading.index: reading.read for reading in self._readings}
        start = num_cached = 0
        error = None
        for reading, prompt in zip(self._readings, self._prompts, strict=True):
            own = outputs[start : (start := start + reading.scorer.num_requests)]
            scores = reading.scorer.scores(prompt, own)
            error = error or scores.error
            # Only the first: a prompt's further requests always find it in the cache.
            num_cached += (own[0].num_cached_tokens or 0) // cached_step * cached_step
            question = self.questions[reading.index]
            found[reading.index].append(order_reading(question, reading.order, scores, reading.places))
        num_input = sum(len(prompt.token_ids) for prompt in self._prompts)
        usage = DecisionUsage(num_input, num_cached, len(self.questions))
        if error is not None:
            return Decision([], usage, error)
        scaling_of = self._params.scalings.scaling_of
        answers = [
            answer(question, diagnose(own, reads[index]), scaling_of(question), self._params.min_label_mass)
            for index, (question, own) in enumerate(zip(self.questions, found, strict=True))
        ]
        return Decision(answers, usage)


def orders(count: int, wanted: int) -> list[list[int]]:
    """Up to `wanted` different orders of `count` options: the given one, its reverse, then rotations of both. An order
    and its reverse give every option the same mean place."""
    plain = list(range(count))
    num_shifts = min((wanted + 1) // 2, count)
    found: list[list[int]] = []
    for step in range(num_shifts):
        shift = step * count // num_shifts
        rotated = plain[shift:] + plain[:shift]
        for order in (rotated, rotated[::-1]):
            if order not in found and len(found) < wanted:
                found.append(order)
    return found
