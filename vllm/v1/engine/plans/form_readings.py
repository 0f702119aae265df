"""Readings of what an answer's form lets one choose from: the requests for them, and what they come to."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from vllm.config import ModelConfig
from vllm.outputs import RequestOutput, ValueReadings
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.v1.engine.input_processor import ProcessedPrompt
from vllm.v1.engine.plans.label_scoring import Label, LabelScorer
from vllm.v1.structured_output.fields import finite_fields
from vllm.v1.structured_output.finite_values import json_text
from vllm.v1.structured_output.grammar import schema_of
from vllm.v1.structured_output.matcher import grammars_of
from vllm.v1.structured_output.thinking import num_thinking_tokens

_Requests = list[tuple[ProcessedPrompt, SamplingParams]]


class _Reading:
    """A reading of texts after a prompt: the tokenizer's spelling of each, as labels are read."""

    def __init__(self, config: ModelConfig, prompt: ProcessedPrompt, values: list[Any], texts: list[str]) -> None:
        spell = grammars_of(config).spell
        self._values, self._texts, self._prompt = values, texts, prompt
        self._token_ids = [spell(text) for text in texts]
        labels = [Label(text, ids) for text, ids in zip(texts, self._token_ids, strict=True)]
        self._scorer = LabelScorer(labels, config.max_model_len)
        self._fits = len(prompt.token_ids) <= self._scorer.max_prompt_len
        self.num_requests = self._scorer.num_requests if self._fits else 0

    def requests(self) -> _Requests:
        return self._scorer.requests(self._prompt) if self._fits else []

    def values(self, outputs: Sequence[RequestOutput], chosen: int | None) -> ValueReadings:
        """From the outputs of `requests`."""
        nothing = np.full(len(self._values), np.nan)
        scores = self._scorer.scores(self._prompt, outputs) if self._fits else None
        logprobs, shares = (nothing, nothing) if scores is None else (scores.logprobs, scores.probabilities)
        return ValueReadings(self._values, self._texts, self._token_ids, logprobs, shares, chosen)


class FormReadings:
    """The readings that `choice_readings` and `field_readings` ask for, of the answers to one prompt."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        prompt: ProcessedPrompt,
        params: SamplingParams,
        answers: Sequence[Sequence[int]],
    ) -> None:
        """`answers`: the token ids of each."""
        self._config, self._tokenizer, self._prompt = config, tokenizer, prompt
        # Answers have beginnings in common, whose readings are made once.
        self._readings: dict[tuple[Any, ...], _Reading] = {}
        self._choices: list[tuple[_Reading, int | None] | None] = []
        self._fields: list[dict[str, tuple[_Reading, int | None]]] = []
        form = params.structured_outputs
        assert form is not None
        for token_ids in answers:
            pieces = [tokenizer.token_bytes(each) for each in token_ids]
            start = num_thinking_tokens(form.thinking, pieces)
            if params.field_readings:
                self._fields.append({} if start is None else self._of_fields(schema_of(form), token_ids, pieces, start))
            elif start is None:
                self._choices.append(None)
            else:
                thought, answer = tuple(token_ids[:start]), b"".join(pieces[start:])
                self._choices.append(self._of_choices(form.choice or [], thought, answer))

    def _of_choices(self, choices: list[str], thought: tuple[int, ...], answer: bytes) -> tuple[_Reading, int | None]:
        texts = list(dict.fromkeys(choices))
        chosen = [index for index, each in enumerate(texts) if answer.startswith(each.encode())]
        longest = max(chosen, key=lambda index: len(texts[index]), default=None)
        return self._reading(thought, texts, texts), longest

    def _of_fields(
        self, schema: Any, token_ids: Sequence[int], pieces: list[bytes], first: int
    ) -> dict[str, tuple[_Reading, int | None]]:
        """`first`: the token with which the form begins."""
        ends = list(itertools.accumulate(map(len, pieces[first:])))
        answer, found = b"".join(pieces[first:]), {}
        for field in finite_fields(schema, answer):
            # A token across the value's beginning has a part before it, which begins each text.
            count = sum(end <= field.start for end in ends)
            while (before := _text(answer[ends[count - 1] if count else 0 : field.start])) is None:
                count -= 1
            texts = [before + json_text(each) for each in field.values]
            found[field.path] = self._reading(tuple(token_ids[: first + count]), field.values, texts), field.chosen
        return found

    def _reading(self, generated: tuple[int, ...], values: list[Any], texts: list[str]) -> _Reading:
        key = (generated, *texts)
        if key not in self._readings:
            ids = [*self._prompt.token_ids, *generated]
            prompt = self._prompt.with_ids(ids)
            self._readings[key] = _Reading(self._config, prompt, values, texts)
        return self._readings[key]

    def requests(self) -> _Requests:
        """Requests to queue, in this order; ready for the engine core."""
        return [request for reading in self._readings.values() for request in reading.requests()]

    def results(
        self, outputs: Sequence[RequestOutput]
    ) -> list[tuple[ValueReadings | None, dict[str, ValueReadings] | None]]:
        """Each answer's choice_readings and field_readings, from the outputs of `requests`."""
        rest = iter(outputs)
        parts = {id(each): list(itertools.islice(rest, each.num_requests)) for each in self._readings.values()}

        def values(reading: _Reading, chosen: int | None) -> ValueReadings:
            return reading.values(parts[id(reading)], chosen)

        if self._choices:
            return [(None if each is None else values(*each), None) for each in self._choices]
        return [(None, {path: values(*each) for path, each in fields.items()}) for fields in self._fields]


def _text(data: bytes) -> str | None:
    """None: it begins within a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None
