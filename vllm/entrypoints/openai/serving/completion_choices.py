"""The choices of /v1/completions: text, echo, logprobs and readings of each sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.entrypoints.openai.protocol.generation import CompletionRequest
from vllm.entrypoints.openai.rendering.logprobs import (
    ClassicLogprobs,
    classic_logprobs,
    classic_prompt_logprobs,
    prompt_logprobs,
)
from vllm.entrypoints.openai.rendering.readings import ReadingPlan
from vllm.entrypoints.openai.rendering.token_texts import TokenNames, TokenPieces, split_text
from vllm.entrypoints.openai.state import ServerState
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class Shown:
    """What the request's choices show.

    Attributes:
        logprobs: choices have `logprobs`.
        echo: texts begin with the prompt.
        prompt_logprobs: choices have `prompt_logprobs`.
        token_ids: choices have `token_ids` and `prompt_token_ids`.
        given_text: the prompt's text is as the client wrote it, not truncated.
        skip_special_tokens: texts omit special tokens.
    """

    plan: ReadingPlan
    names: TokenNames
    tokenizer: Tokenizer | None
    logprobs: bool
    echo: bool
    prompt_logprobs: bool
    token_ids: bool
    given_text: bool
    skip_special_tokens: bool

    @classmethod
    def of(cls, body: CompletionRequest, state: ServerState, plan: ReadingPlan) -> Shown:
        """
        Raises:
            ApiError: echo without a tokenizer.
        """
        return cls(
            plan=plan,
            names=token_names(body.return_tokens_as_token_ids, state),
            tokenizer=state.tokenizer if body.echo else state.engine.tokenizer,
            logprobs=body.logprobs is not None or bool(plan.engine_ids),
            echo=bool(body.echo),
            prompt_logprobs=body.prompt_logprobs is not None or bool(body.prompt_logprob_token_ids),
            token_ids=bool(body.return_token_ids),
            given_text=body.truncate_prompt_tokens is None,
            skip_special_tokens=body.skip_special_tokens is not False,
        )


def token_names(as_ids: bool | None, state: ServerState) -> TokenNames:
    """How an answer shows tokens: by the request's choice (`as_ids`), or else the server's."""
    return TokenNames(state.engine.tokenizer, state.args.return_tokens_as_token_ids if as_ids is None else as_ids)


class CompletionPrompt:
    """A prompt as its choices show it."""

    def __init__(self, shown: Shown, output: RequestOutput) -> None:
        self._shown = shown
        self.token_ids = output.prompt_token_ids
        self.text = ""
        self._readings = output.prompt_logprobs
        self._classic: ClassicLogprobs | None = None
        self._pieces: list[str] = []
        self._offsets: list[int] = []
        if shown.echo:
            assert shown.tokenizer is not None
            text = output.prompt if shown.given_text else None
            self.text, self._pieces, self._offsets = split_text(shown.tokenizer, text, self.token_ids)

    async def fields(self) -> dict[str, Any]:
        """The prompt's fields in the first chunk of each choice."""
        fields: dict[str, Any] = {}
        if self._shown.token_ids:
            fields["prompt_token_ids"] = self.token_ids
        if self._shown.prompt_logprobs and self._readings is not None:
            fields["prompt_logprobs"] = await prompt_logprobs(self._readings, self._shown.names)
        return fields

    async def classic(self) -> ClassicLogprobs:
        """The echoed tokens' logprobs."""
        if self._classic is None:
            self._classic = await classic_prompt_logprobs(
                self._readings, self._shown.names, self.token_ids, self._pieces, self._offsets
            )
        return self._classic


class CompletionSequence:
    """A choice as it grows."""

    def __init__(self, shown: Shown, prompt: CompletionPrompt, index: int) -> None:
        self._shown = shown
        self._prompt = prompt
        self._index = index
        self._is_first = True
        self._pieces = None
        if shown.tokenizer is not None and shown.logprobs:
            self._pieces = TokenPieces(shown.tokenizer, len(prompt.text), shown.skip_special_tokens)

    async def fields(self, completion: CompletionOutput) -> dict[str, Any]:
        """Fields for what `completion` adds to the choice."""
        shown, is_first = self._shown, self._is_first
        self._is_first = False
        echoed = self._prompt.text if is_first else ""
        fields: dict[str, Any] = {
            "index": self._index,
            "text": echoed + completion.text,
            "logprobs": await self._logprobs(completion, is_first) if shown.logprobs else None,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
        }
        if shown.token_ids:
            fields["token_ids"] = completion.token_ids
        if is_first:
            fields.update(await self._prompt.fields())
        fields.update(await shown.plan.choice_fields(completion.logprobs, shown.names, is_first))
        return fields

    async def _logprobs(self, completion: CompletionOutput, is_first: bool) -> ClassicLogprobs:
        result = ClassicLogprobs()
        if is_first and self._shown.echo:
            result.extend(await self._prompt.classic())
        readings = completion.logprobs
        if readings is not None and readings.has_sampled:
            count = len(completion.token_ids)
            pieces, offsets = [""] * count, [0] * count
            if self._pieces is not None:
                pieces, offsets = self._pieces.add(completion.token_ids)
            result.extend(await classic_logprobs(readings, self._shown.names, pieces, offsets))
        return result
