"""From what a user passes to what the engine core takes: tokenise, validate, number."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.exceptions import VLLMValidationError, shown
from vllm.sampling_params import SamplingParams
from vllm.tokenizers.tokenizer import Tokenizer, get_tokenizer
from vllm.utils.checks import check_encodable, check_neutral
from vllm.v1.messages import EngineCoreRequest
from vllm.v1.sample.bad_words import spell_bad_words
from vllm.v1.sample.logits_processor import validate_params

_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}
# Of upstream's prompts, and what to do instead.
_REFUSED_KEYS = {
    "multi_modal_data": "inputs are text only",
    "multi_modal_uuids": "inputs are text only",
    "mm_processor_kwargs": "inputs are text only",
    "prompt_embeds": "pass prompt_token_ids",
    "encoder_prompt": "models are decoders",
    "token_type_ids": "models are decoders",
}


def load_tokenizer(config: ModelConfig) -> Tokenizer | None:
    """The model's tokenizer; None with skip_tokenizer_init."""
    if config.skip_tokenizer_init:
        return None
    return get_tokenizer(
        config.tokenizer,
        tokenizer_mode=config.tokenizer_mode,
        trust_remote_code=config.trust_remote_code,
        revision=config.tokenizer_revision,
    )


@dataclass(frozen=True)
class ProcessedPrompt:
    """A prompt ready for the engine core."""

    text: str | None
    token_ids: list[int]
    cache_salt: str | None


class InputProcessor:
    """Turns prompts and parameters into valid ones, or raises before anything is queued."""

    def __init__(self, config: VllmConfig, tokenizer: Tokenizer | None) -> None:
        self.model_config = config.model_config
        self._policy = config.scheduler_config.policy
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(self.model_config.hf_config.eos_token_ids)

    def process_prompts(
        self,
        prompts: Sequence[Any],
        params: Sequence[SamplingParams] | None = None,
        *,
        add_special_tokens: bool = True,
    ) -> list[ProcessedPrompt]:
        """Tokenise in one batch what is text, check what is ids.

        Args:
            prompts: strings, lists of ids, or TextPrompt / TokensPrompt dicts.
            params: one a prompt, for truncate_prompt_tokens and for whether room for output is needed; None = no
                truncation, room for a token.
            add_special_tokens: tokenise texts with what the tokenizer puts around one, such as <s>.

        Raises:
            VLLMValidationError: a prompt of another shape, an empty one, ids outside the vocabulary, or one
                with no room left for output.
        """
        for own in params or ():
            check_params_type(own)
        parsed = []
        for i, prompt in enumerate(prompts):
            with _naming(i, len(prompts)):
                parsed.append(self._parse(prompt))
        missing = [i for i, prompt in enumerate(parsed) if prompt.token_ids is None]
        encoded: dict[int, list[int]] = {}
        if missing:
            if self.tokenizer is None:
                raise VLLMValidationError(
                    "a text prompt needs a tokenizer, and skip_tokenizer_init left it out; pass prompt_token_ids",
                    parameter="prompt",
                    value=parsed[missing[0]].text,
                )
            texts = [parsed[i].text or "" for i in missing]
            encoded = dict(zip(missing, self.tokenizer.encode_batch(texts, add_special_tokens), strict=True))
        result = []
        for i, prompt in enumerate(parsed):
            token_ids = encoded[i] if prompt.token_ids is None else prompt.token_ids
            with _naming(i, len(prompts)):
                room = 1
                if params is not None:
                    token_ids = self._truncate(token_ids, params[i])
                    room = 0 if params[i].max_tokens == 0 else 1
                self._check_length(token_ids, room)
            result.append(ProcessedPrompt(prompt.text, token_ids, prompt.cache_salt))
        return result

    def process_params(self, params: SamplingParams, prompt_len: int) -> SamplingParams:
        """A validated copy with the engine's defaults filled in and max_tokens set.

        Raises:
            VLLMValidationError: a value that this model or engine cannot honour.
        """
        check_params_type(params)
        config = self.model_config
        params.verify(config.vocab_size, config.max_logprobs, config.max_logprob_token_ids)
        params.verify_prompt(prompt_len)
        if params.stop and self.tokenizer is None:
            raise VLLMValidationError(
                "stop strings need a tokenizer, and skip_tokenizer_init left it out",
                parameter="stop",
                value=params.stop,
            )
        own = params.clone()
        room = config.max_model_len - prompt_len
        if own.max_tokens is None and own.min_tokens > room:
            raise VLLMValidationError(
                f"min_tokens must be at most {room}, what max_model_len={config.max_model_len} leaves for output, "
                f"got {own.min_tokens}",
                parameter="min_tokens",
                value=own.min_tokens,
            )
        own.max_tokens = room if own.max_tokens is None else min(own.max_tokens, room)
        if own.logprobs_mode is None:
            own.logprobs_mode = config.logprobs_mode  # type: ignore[assignment]
        if own.bad_words:
            own.bad_words_token_ids = spell_bad_words(own.bad_words, self.tokenizer, config.vocab_size)
        validate_params(config.logits_processors, own)
        return own

    def check_request(self, request_id: Any, params: SamplingParams, priority: Any) -> None:
        """Check what is neither a prompt's matter nor a parameter's.

        Raises:
            VLLMValidationError: `request_id` is no text; `priority` is no integer, or the scheduling policy would
                ignore it; or `params` asks for a beam search, which is many requests.
        """
        if not isinstance(request_id, str) or not request_id:
            raise VLLMValidationError(
                f"request_id must be a non-empty string, got {request_id!r}", parameter="request_id", value=request_id
            )
        if params.use_beam_search:
            raise VLLMValidationError(
                "use_beam_search is a search over many requests, which LLM.generate and LLM.beam_search drive; "
                "the engine takes single requests",
                parameter="use_beam_search",
                value=True,
            )
        if isinstance(priority, bool) or not isinstance(priority, Integral):
            raise VLLMValidationError(
                f"priority must be an integer, got {type(priority).__name__}",
                parameter="priority",
                value=priority,
            )
        if priority != 0 and self._policy != "priority":
            raise VLLMValidationError(
                f"priority {priority} needs scheduling_policy='priority', and this engine's is {self._policy!r}",
                parameter="priority",
                value=priority,
            )

    def core_request(
        self, request_id: str, prompt: ProcessedPrompt, params: SamplingParams, arrival_time: float, priority: int
    ) -> EngineCoreRequest:
        """What the engine core takes for one sequence. `arrival_time`: seconds on the monotonic clock."""
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=prompt.token_ids,
            sampling_params=params,
            eos_token_ids=self.eos_token_ids,
            arrival_time=arrival_time,
            priority=priority,
            cache_salt=prompt.cache_salt,
        )

    def _parse(self, prompt: Any) -> _ParsedPrompt:
        if isinstance(prompt, str):
            return _ParsedPrompt(self._check_text(prompt), None, None)
        if isinstance(prompt, Mapping):
            for name in _REFUSED_KEYS.keys() & prompt.keys():
                check_neutral(name, prompt[name], _REFUSED_KEYS[name])
            # "type" is the tag of upstream's own prompt types.
            unknown = sorted(set(prompt) - _PROMPT_KEYS - _REFUSED_KEYS.keys() - {"type", "arrival_time"})
            if unknown:
                raise VLLMValidationError(
                    f"unknown prompt field {unknown[0]!r}; known: {', '.join(sorted(_PROMPT_KEYS))}",
                    parameter="prompt",
                    value=unknown[0],
                )
            text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
            if salt is not None and not isinstance(salt, str):
                raise VLLMValidationError(
                    f"cache_salt must be a string, got {type(salt).__name__}",
                    parameter="cache_salt",
                    value=salt,
                )
            if ids is None:
                return _ParsedPrompt(self._check_text(text), None, salt)
            return _ParsedPrompt(text, self._check_ids(ids), salt)
        return _ParsedPrompt(None, self._check_ids(prompt), None)

    @staticmethod
    def _check_text(text: Any) -> str:
        if not isinstance(text, str):
            raise VLLMValidationError(
                f"prompt must be a string or a list of token ids, got {type(text).__name__}",
                parameter="prompt",
                value=text,
            )
        check_encodable("prompt", text)
        return text

    def _check_ids(self, ids: Any) -> list[int]:
        elements = ids.tolist() if hasattr(ids, "tolist") else ids
        if isinstance(elements, (str, bytes)) or not isinstance(elements, Sequence):
            raise VLLMValidationError(
                f"prompt_token_ids must be a list of integers, got {type(ids).__name__}",
                parameter="prompt_token_ids",
                value=ids,
            )
        result: list[int] = []
        # Plain integers, as they mostly are, are not looked at one by one.
        only_ints = set(map(type, elements)) <= {int}
        if only_ints:
            result = list(elements)
        for element in () if only_ints else elements:
            if isinstance(element, bool):
                raise VLLMValidationError(
                    "prompt_token_ids must hold integers, got bool",
                    parameter="prompt_token_ids",
                    value=element,
                )
            try:
                result.append(operator.index(element))
            except TypeError:
                raise VLLMValidationError(
                    f"prompt_token_ids must hold integers, got {type(element).__name__} {shown(element)}",
                    parameter="prompt_token_ids",
                    value=element,
                ) from None
        if result and not (min(result) >= 0 and max(result) < self.model_config.vocab_size):
            worst = min(result) if min(result) < 0 else max(result)
            raise VLLMValidationError(
                f"prompt_token_ids must be in [0, {self.model_config.vocab_size}), the model's vocabulary; "
                f"got {shown(worst)}",
                parameter="prompt_token_ids",
                value=worst,
            )
        return result

    def _truncate(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        limit = params.truncate_prompt_tokens
        if limit is None:
            return token_ids
        longest = self.model_config.max_model_len
        if limit > longest:
            raise VLLMValidationError(
                f"truncate_prompt_tokens must be at most max_model_len={longest}, got {limit}",
                parameter="truncate_prompt_tokens",
                value=limit,
            )
        if limit == -1:
            max_tokens = 1 if params.max_tokens is None else params.max_tokens
            limit = max(longest - max_tokens, 1)
        return token_ids[-limit:]

    def _check_length(self, token_ids: list[int], room: int) -> None:
        if not token_ids:
            raise VLLMValidationError("the prompt is empty", parameter="prompt", value="")
        limit = self.model_config.max_model_len
        if len(token_ids) > limit - room:
            problem = "leaves no room for output within" if room else "is more than"
            raise VLLMValidationError(
                f"the prompt has {len(token_ids)} tokens, which {problem} max_model_len={limit}",
                parameter="prompt",
                value=len(token_ids),
            )


def check_params_type(params: Any) -> None:
    """
    Raises:
        VLLMValidationError: it is no SamplingParams.
    """
    if not isinstance(params, SamplingParams):
        raise VLLMValidationError(
            f"sampling_params must be SamplingParams, got {type(params).__name__}", parameter="sampling_params"
        )


@contextmanager
def _naming(index: int, count: int) -> Iterator[None]:
    """Say which of several prompts an error is about."""
    try:
        yield
    except VLLMValidationError as error:
        if count == 1:
            raise
        raise VLLMValidationError(
            f"prompts[{index}]: {error.args[0]}", parameter=error.parameter, value=error.value
        ) from None


@dataclass(frozen=True)
class _ParsedPrompt:
    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None
