"""The fields of choices: those of completions and chat, and /v1/completions' text, echo and logprobs."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from typing import Any

from vllm.outputs import CompletionOutput, RequestOutput, ValueReadings
from vllm.server.protocol.generation import CompletionRequest, GenerationFields, VersionFields
from vllm.server.rendering.logprobs import (
    ClassicLogprobs,
    classic_logprobs,
    classic_prompt_logprobs,
    prompt_logprobs,
)
from vllm.server.rendering.readings import ReadingPlan
from vllm.server.rendering.token_texts import TokenNames, TokenPieces, split_text
from vllm.server.state import ServerState
from vllm.tokenizers.tokenizer import Tokenizer


def form_fields(completion: CompletionOutput) -> dict[str, Any]:
    """The choices that the answer's form allowed, where they were read."""
    fields: dict[str, Any] = {}
    if completion.allowed_mass is not None:
        fields["allowed_mass"] = completion.allowed_mass
        fields["allowed_mass_total"] = _number(completion.allowed_mass_total)
    if completion.choice_readings is not None:
        fields["choice_readings"] = _value_entries(completion.choice_readings)
    if completion.field_readings is not None:
        fields["field_readings"] = {path: _value_entries(each) for path, each in completion.field_readings.items()}
    return fields


def _value_entries(readings: ValueReadings) -> list[dict[str, Any]]:
    columns = readings.values, readings.texts, readings.token_ids, readings.logprobs.tolist(), readings.shares.tolist()
    return [
        {
            "value": value,
            "text": text,
            "token_ids": token_ids,
            "logprob": _number(logprob),
            "share": _number(share),
            "chosen": index == readings.chosen,
        }
        for index, (value, text, token_ids, logprob, share) in enumerate(zip(*columns, strict=True))
    ]


def _number(value: float | None) -> float | None:
    """The logarithm of 0 is none in JSON."""
    return value if value is not None and math.isfinite(value) else None


@dataclass(frozen=True)
class ChoiceWriter:
    """Makes the fields that choices of completions and chat share, as far as the request asks for them."""

    body: GenerationFields
    plan: ReadingPlan
    names: TokenNames
    has_tables: bool = False  # of the prompt's readings, in place of objects

    @classmethod
    def of(cls, body: GenerationFields, state: ServerState, shows_topk: bool, has_tables: bool = False) -> ChoiceWriter:
        """See ReadingPlan.of."""
        as_ids = body.return_tokens_as_token_ids
        names = TokenNames(
            state.engine.input_processor.tokenizer, state.args.return_tokens_as_token_ids if as_ids is None else as_ids
        )
        return cls(body, ReadingPlan.of(body, state, shows_topk), names, has_tables)

    async def fields(self, completion: CompletionOutput, is_first: bool) -> dict[str, Any]:
        """For what `completion` adds to a choice; `is_first`: it begins the choice."""
        fields: dict[str, Any] = {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}
        if self.body.return_token_ids:
            fields["token_ids"] = completion.token_ids
        if isinstance(self.body, VersionFields) and self.body.return_weight_versions:
            fields["weight_versions"] = completion.weight_versions
        fields |= form_fields(completion)
        return {**fields, **await self.plan.choice_fields(completion.logprobs, self.names, is_first)}

    async def prompt_fields(self, output: RequestOutput) -> dict[str, Any]:
        """The prompt's ids and logprobs, as far as requested."""
        fields: dict[str, Any] = {}
        if self.body.return_token_ids:
            fields["prompt_token_ids"] = output.prompt_token_ids
        is_wanted = self.body.prompt_logprobs is not None or self.body.prompt_logprob_token_ids
        if is_wanted and not self.has_tables and output.prompt_logprobs is not None:
            fields["prompt_logprobs"] = await prompt_logprobs(output.prompt_logprobs, self.names)
        return fields


class CompletionPrompt:
    """A prompt as its choices show it."""

    def __init__(
        self, body: CompletionRequest, writer: ChoiceWriter, tokenizer: Tokenizer | None, output: RequestOutput
    ) -> None:
        self.body = body
        self.writer = writer
        self.tokenizer = tokenizer
        self.output = output
        self.text = ""
        self._is_text_of_ids = False
        self._classic: ClassicLogprobs | None = None
        self._pieces: list[str] = []
        self._offsets: list[int] = []
        if body.echo:
            assert tokenizer is not None
            # A truncated prompt's text is made from its ids.
            text = output.prompt if body.truncate_prompt_tokens is None else None
            self._is_text_of_ids = text is None
            self.text, self._pieces, self._offsets = split_text(tokenizer, text, output.prompt_token_ids)

    def new_pieces(self) -> TokenPieces | None:
        """For the tokens that continue it; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        body = self.body
        return TokenPieces(
            self.tokenizer,
            len(self.text),
            body.skip_special_tokens is not False,
            body.spaces_between_special_tokens is not False,
            self.output.prompt_token_ids,
            shows_broken=self._is_text_of_ids,
        )

    async def classic(self) -> ClassicLogprobs:
        """The echoed tokens' logprobs."""
        if self._classic is None:
            readings, token_ids = self.output.prompt_logprobs, self.output.prompt_token_ids
            self._classic = await classic_prompt_logprobs(
                readings, self.writer.names, token_ids, self._pieces, self._offsets
            )
        return self._classic


class CompletionSequence:
    """A choice as it grows."""

    def __init__(self, prompt: CompletionPrompt, index: int) -> None:
        self._prompt = prompt
        self._index = index
        self._is_first = True
        self._length = 0  # of the text so far
        self._waiting = ClassicLogprobs()  # of tokens that begin behind it
        body, plan = prompt.body, prompt.writer.plan
        self._has_logprobs = body.logprobs is not None or bool(plan.engine_ids)
        self._pieces = prompt.new_pieces() if self._has_logprobs or body.echo else None

    async def fields(self, completion: CompletionOutput) -> dict[str, Any]:
        """Fields for what `completion` adds to the choice."""
        prompt, is_first = self._prompt, self._is_first
        self._is_first = False
        count = len(completion.token_ids)
        pieces, offsets, text = [""] * count, [0] * count, completion.text
        if self._pieces is not None:
            shown = self._pieces.broken
            pieces, offsets = self._pieces.add(completion.token_ids)
            text = self._pieces.broken.removeprefix(shown) + text
        if is_first:
            text = prompt.text + text
        self._length += len(text)
        return {
            "index": self._index,
            "text": text,
            "logprobs": await self._logprobs(completion, is_first, pieces, offsets) if self._has_logprobs else None,
            **(await prompt.writer.prompt_fields(prompt.output) if is_first else {}),
            **await prompt.writer.fields(completion, is_first),
        }

    async def _logprobs(
        self, completion: CompletionOutput, is_first: bool, pieces: list[str], offsets: list[int]
    ) -> ClassicLogprobs:
        if is_first and self._prompt.body.echo:
            self._waiting.extend(await self._prompt.classic())
        readings = completion.logprobs
        if readings is not None and readings.has_sampled:
            self._waiting.extend(await classic_logprobs(readings, self._prompt.writer.names, pieces, offsets))
        known = self._waiting.text_offset
        if completion.finish_reason is None:
            # A stop string may still cut the text where it ends now, and with it these offsets.
            return self._waiting.take(bisect_right(known, self._length))
        known[:] = [min(offset, self._length) for offset in known]
        return self._waiting.take(len(known))
