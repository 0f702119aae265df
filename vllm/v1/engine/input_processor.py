"""From what a user passes to what the engine core takes: tokenise, validate, fill in defaults."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from vllm.config import ModelConfig, VllmConfig
from vllm.exceptions import VLLMValidationError, shown
from vllm.inputs.embeds import PromptEmbeds
from vllm.inputs.images import DATA, OPTIONS, UUIDS, GivenImages, PromptImages, ReadMedia, given_images
from vllm.inputs.media import PictureLoader
from vllm.inputs.text_options import DEFAULT_TEXT_OPTIONS, TextOptions
from vllm.logger import init_logger, timed, warn_once
from vllm.lora.request import LoRARequest, check_lora_request
from vllm.pooling_params import PoolingParams, classified_length
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.tokenizers.tokenizer import Tokenizer, get_tokenizer
from vllm.tokenizers.truncation import truncate_ids, truncate_text
from vllm.utils.checks import MAX_INTEGER, check_encodable, check_integer, check_neutral, check_token_id, wrong_type
from vllm.v1.engine.detokenizer import ContentReader
from vllm.v1.messages import EngineCoreRequest
from vllm.v1.sample.logits_processor import validate_params
from vllm.v1.structured_output.finite_values import MAX_VALUES, longest_enum
from vllm.v1.structured_output.grammar import grammar_text, schema_of, wrong_form
from vllm.v1.structured_output.matcher import grammars_of, share_tokenizer

logger = init_logger(__name__)

_PROMPT_KEYS = {
    *("prompt", "prompt_token_ids", "prompt_embeds", "prompt_is_token_ids", "is_token_ids", "cache_salt"),
    *(DATA, UUIDS, OPTIONS),
}
# Keys of upstream's prompts, and what to do instead.
_REFUSED_KEYS = {
    "encoder_prompt": "models are decoders",
    "token_type_ids": "models are decoders",
}


def load_tokenizer(config: ModelConfig) -> Tokenizer | None:
    """The model's tokenizer; None with skip_tokenizer_init."""
    if config.skip_tokenizer_init:
        return None
    with timed(logger, "tokenizer read"):
        tokenizer = get_tokenizer(
            config.tokenizer,
            tokenizer_mode=config.tokenizer_mode,
            trust_remote_code=config.trust_remote_code,
            revision=config.tokenizer_revision,
        )
    share_tokenizer(config, tokenizer)
    return tokenizer


@dataclass(frozen=True)
class ProcessedPrompt:
    """A prompt ready for the engine core. `content_of` makes what says where stop strings are looked for, for each
    sequence; None: everywhere. Ids at positions that have embeddings say nothing."""

    text: str | None
    token_ids: list[int]
    cache_salt: str | None
    lora_request: LoRARequest | None = None
    content_of: Callable[[], ContentReader] | None = None
    embeds: PromptEmbeds | None = None
    images: PromptImages | None = None
    session_id: str | None = None
    kv_hints: Any = None

    @property
    def adapter_id(self) -> int:
        """The number of its adapter; 0: there is none."""
        return 0 if self.lora_request is None else self.lora_request.lora_int_id

    def with_ids(self, token_ids: list[int]) -> ProcessedPrompt:
        """Further tokens for the same model and cache, without a text."""
        return replace(self, text=None, token_ids=token_ids, content_of=None)


@dataclass(frozen=True)
class _Parsed:
    """A prompt as it came; without ids, the text is to be tokenised."""

    text: str | None
    token_ids: list[int] | None = None
    cache_salt: str | None = None
    embeds: PromptEmbeds | None = None
    images: GivenImages | None = None


class InputProcessor:
    """Turns prompts and parameters into valid ones, or raises VLLMValidationError before anything is queued."""

    def __init__(self, config: VllmConfig, tokenizer: Tokenizer | None) -> None:
        self.model_config = config.model_config
        self._policy = config.scheduler_config.policy
        self._forms = config.structured_outputs_config
        self.has_adapters = config.lora_config is not None
        self.tokenizer = tokenizer
        self.eos_token_ids = frozenset(self.model_config.hf_config.eos_token_ids)
        if self.model_config.reads_images and tokenizer is not None:
            # The engine says when it starts which pictures it cannot read.
            _ = self.pictures
        self._generation_config = {"eos_token_id": sorted(self.eos_token_ids)}

    @cached_property
    def picture_loader(self) -> PictureLoader:
        """For what requests describe; see MediaAccess."""
        most = self.model_config.max_media
        config = self.model_config
        return PictureLoader(config.media_access, most["image"], most["video"], config.film_frames)

    @cached_property
    def _why_no_images(self) -> str:
        # It looks for files.
        return self.model_config.why_no_images

    @property
    def read_media(self) -> ReadMedia:
        """The media that texts of prompts may have beside words."""
        if self._why_no_images or self.tokenizer is None:
            return ReadMedia(why_not=self._why_no_images)
        return ReadMedia(self.pictures.words, interleaved=self.model_config.interleave_mm_strings)

    def hf_tokenizer(self) -> Any:
        """The model's tokenizer as transformers has it.

        Raises:
            ValueError: skip_tokenizer_init left it out.
        """
        if self.tokenizer is None:
            raise ValueError("there is no tokenizer: skip_tokenizer_init left it out")
        return self.tokenizer.hf_tokenizer

    @cached_property
    def pictures(self) -> Any:
        """The PictureProcessor of a model that reads pictures, or the LonePictureProcessor."""
        from vllm.models.vision.processor import LonePictureProcessor, PictureProcessor

        kind = LonePictureProcessor if self.model_config.hf_config.pools_itself else PictureProcessor
        return kind(self.model_config, self.hf_tokenizer())

    def process_prompts(
        self,
        prompts: Sequence[Any],
        params: Sequence[SamplingParams] | None = None,
        *,
        options: TextOptions = DEFAULT_TEXT_OPTIONS,
        in_parts: bool = False,
    ) -> list[ProcessedPrompt]:
        """Tokenise texts in one batch, check ids and lengths.

        Args:
            prompts: strings, lists of ids, or TextPrompt / TokensPrompt dicts.
            params: one a prompt, for truncate_prompt_tokens and for whether room for output is needed; None = no
                truncation, room for a token.
            options: of texts; their truncation is in `params` already (`TextOptions.applied`).
            in_parts: texts to embed may be longer than the model reads, where `enable_chunked_processing` says so.
        """
        for own in params or ():
            self.check_params(own)
        parsed = []
        for i, prompt in enumerate(prompts):
            with _naming(i, len(prompts)):
                parsed.append(self._parse(prompt))
        pictures: list[Any] = [None] * len(parsed)
        for i, each in enumerate(parsed):
            if each.images is not None:
                with _naming(i, len(prompts)):
                    if self.tokenizer is None:
                        message = f"{DATA} needs a tokenizer, and skip_tokenizer_init left it out"
                        raise VLLMValidationError(message, DATA)
                    pictures[i] = self.pictures.process(each.images, each.cache_salt)
                    if each.token_ids is None:
                        text, pictures[i] = self.pictures.expand_text(each.text or "", pictures[i])
                        parsed[i] = replace(each, text=text)
                    else:
                        ids, pictures[i] = self.pictures.expand_ids(each.token_ids, pictures[i])
                        parsed[i] = replace(each, token_ids=ids)
        texts = [each.text or "" for each in parsed if each.token_ids is None]
        encoded: Iterator[list[int]] = iter(())
        if texts:
            if self.tokenizer is None:
                message = "a text prompt needs a tokenizer, and skip_tokenizer_init left it out; pass prompt_token_ids"
                raise VLLMValidationError(message, "prompt", texts[0])
            encoded = iter(self.tokenizer.encode_batch(texts, options.add_special_tokens))
        result = []
        for i, each in enumerate(parsed):
            token_ids = next(encoded) if each.token_ids is None else each.token_ids
            with _naming(i, len(prompts)):
                room, longest = 1, self.model_config.max_model_len
                if params is not None:
                    own = params[i]
                    if isinstance(own, PoolingParams):
                        # A part of such a text has no places of its own for pictures.
                        longest, room = self._longest_pooled(own, in_parts and each.images is None), 0
                    else:
                        room = 0 if own.max_tokens == 0 else 1
                    limit = self._limit(own, longest)
                    if limit is not None and len(token_ids) > limit:
                        token_ids = self._truncate(each, token_ids, limit, own, options)
                    _check_embedded(each.embeds, own)
                self._check_length(token_ids, room, longest)
                images = self.pictures.locate(token_ids, pictures[i]) if pictures[i] else None
            result.append(ProcessedPrompt(each.text, token_ids, each.cache_salt, embeds=each.embeds, images=images))
        return result

    def with_adapters(self, prompts: Sequence[ProcessedPrompt], adapters: Sequence[Any]) -> list[ProcessedPrompt]:
        """The prompts with an adapter each, or None.

        Raises:
            VLLMValidationError: something else than a LoRARequest, or adapters are not enabled.
        """
        if all(each is None for each in adapters):
            return list(prompts)
        pairs = zip(prompts, adapters, strict=True)
        return [
            replace(prompt, lora_request=check_lora_request(each, self.has_adapters)) if each is not None else prompt
            for prompt, each in pairs
        ]

    def check_params(self, params: Any) -> None:
        """Raises VLLMValidationError unless they are those of the model's runner."""
        if self.model_config.runner_type == "pooling":
            check_pooling_params(params)
        else:
            check_params_type(params)

    def process_params(self, params: Any, prompt_len: int) -> Any:
        """A validated copy with the engine's defaults filled in and max_tokens set."""
        self.check_params(params)
        config = self.model_config
        if isinstance(params, PoolingParams):
            return params.verified(config)
        params.verify(config.vocab_size, config.max_logprobs, config.max_logprob_token_ids)
        params.verify_prompt(prompt_len)
        if params.stop and self.tokenizer is None:
            message = "stop strings need a tokenizer, and skip_tokenizer_init left it out"
            raise VLLMValidationError(message, "stop", params.stop)
        own = params.clone()
        limit = config.max_model_len
        room = limit - prompt_len
        if own.trace_decode_token_ids is not None:
            _follow_trace(own, own.trace_decode_token_ids[:room])
        least = own.min_tokens
        if own.max_tokens is None and least > room:
            message = f"min_tokens must be at most {room}, what max_model_len={limit} leaves for output, got {least}"
            raise VLLMValidationError(message, "min_tokens", least)
        own.max_tokens = room if own.max_tokens is None else min(own.max_tokens, room)
        if own.logprobs_mode is None:
            own.logprobs_mode = config.logprobs_mode  # type: ignore[assignment]
        own.update_from_generation_config(self._generation_config)
        if own.bad_words:
            own.bad_words_token_ids = spell_bad_words(own.bad_words, self.tokenizer, config.vocab_size)
        if own.structured_outputs is not None:
            own.grammar = self.compile_grammar(own.structured_outputs)
            check_readable(config, own, prompt_len)
        if config.logits_processors:
            validate_params(config.logits_processors, own)
        reads_processed = own.num_logprobs is not None and (own.logprobs_mode or "").startswith("processed")
        if own.trace_decode_token_ids is None and (own.max_tokens != 0 or reads_processed):
            check_a_token_is_left(own, self.eos_token_ids, config.vocab_size)
        return own

    def read_grammars(self) -> None:
        """Read once what all grammars need, which may take seconds; errors as compile_grammar's of the tokenizer."""
        grammars_of(self.model_config)

    def compile_grammar(self, form: StructuredOutputsParams) -> str:
        """The form as a grammar that compiles. It may take seconds the first time; threads may call it.

        Raises:
            VLLMValidationError: it does not compile, or the model's tokenizer cannot be bound to one.
        """
        grammar = grammar_text(self._forms.applied(form))
        try:
            grammars_of(self.model_config).start(grammar)
        except VLLMValidationError:
            raise
        except ValueError as error:
            raise wrong_form(form.kind[0], f" does not compile: {error}") from None
        return grammar

    def check_request(self, request_id: Any, params: Any, priority: Any) -> None:
        """Check the id and the priority, and that `params` describes a single request (no beam search)."""
        if not isinstance(request_id, str) or not request_id:
            message = f"request_id must be a non-empty string, got {request_id!r}"
            raise VLLMValidationError(message, "request_id", request_id)
        if getattr(params, "use_beam_search", False):
            message = (
                "use_beam_search needs many requests, made by LLM.generate and LLM.beam_search; the engine takes one"
            )
            raise VLLMValidationError(message, "use_beam_search", True)
        check_integer("priority", priority, -MAX_INTEGER - 1)
        if priority != 0 and self._policy != "priority":
            warn_once(
                logger,
                "priority changes nothing: it needs scheduling_policy='priority', and this engine's is %r",
                self._policy,
            )

    def core_requests(
        self, children: list[tuple[str, Any]], prompt: ProcessedPrompt, arrival_time: float, priority: int
    ) -> Iterator[EngineCoreRequest]:
        """A request for each (core id, parameters). `arrival_time`: seconds on the monotonic clock."""
        ids, salt, priority = prompt.token_ids, prompt.cache_salt, int(priority)
        for core_id, params in children:
            request = EngineCoreRequest(core_id, ids, params, self.eos_token_ids, arrival_time, priority, salt)
            request.lora_request, request.prompt_embeds = prompt.lora_request, prompt.embeds
            request.images = prompt.images
            request.session_id, request.kv_hints = prompt.session_id, prompt.kv_hints
            if isinstance(params, PoolingParams):
                request.pooling_params, request.sampling_params = params, None  # type: ignore[assignment]
                if params.task == "classify" and self.model_config.attn_type == "decoder":
                    # A decoder's tokens do not see those after them.
                    request.prompt_token_ids = ids[: classified_length(ids, self.model_config.class_padding_id)]
            yield request

    def further_requests(
        self, requests: Iterable[tuple[str, ProcessedPrompt, SamplingParams, int]]
    ) -> Iterator[EngineCoreRequest]:
        """For an output processor that asks for them: the id, prompt, parameters and priority of each."""
        now = time.monotonic()
        for core_id, prompt, params, priority in requests:
            yield from self.core_requests([(core_id, params)], prompt, now, priority)

    def _parse(self, prompt: Any) -> _Parsed:
        if isinstance(prompt, str):
            return _Parsed(_check_text(prompt))
        if not isinstance(prompt, Mapping):
            return _Parsed(None, self._check_ids(prompt))
        for name in _REFUSED_KEYS.keys() & prompt.keys():
            check_neutral(name, prompt[name], _REFUSED_KEYS[name])
        # "type" is the tag of upstream's prompt types.
        unknown = sorted(set(prompt) - _PROMPT_KEYS - _REFUSED_KEYS.keys() - {"type", "arrival_time"})
        if unknown:
            message = f"unknown prompt field {unknown[0]!r}; known: {', '.join(sorted(_PROMPT_KEYS))}"
            raise VLLMValidationError(message, "prompt", unknown[0])
        text, ids, salt = prompt.get("prompt"), prompt.get("prompt_token_ids"), prompt.get("cache_salt")
        if salt is not None and not isinstance(salt, str):
            raise wrong_type("cache_salt", salt, "a string")
        config = self.model_config
        images = given_images(prompt, config.max_media, self._why_no_images, config.enable_mm_embeds)
        if prompt.get("prompt_embeds") is not None:
            if images is not None:
                raise VLLMValidationError(f"prompt_embeds and {DATA} cannot be one prompt's: pass one of them", DATA)
            return self._with_embeds(prompt, text, ids, salt)
        if _is_token(prompt) is not None:
            message = "prompt_is_token_ids says where prompt_embeds are not used: pass it with them"
            raise VLLMValidationError(message, "prompt_is_token_ids")
        if ids is None:
            return _Parsed(_check_text(text), None, salt, images=images)
        return _Parsed(text, self._check_ids(ids), salt, images=images)

    def _with_embeds(self, prompt: Mapping[str, Any], text: str | None, ids: Any, salt: str | None) -> _Parsed:
        """A prompt of embeddings, `text` and ids what they stand for."""
        config, is_token = self.model_config, _is_token(prompt)
        check_embeds_enabled(config)
        if text is not None:
            _check_text(text)
        if ids is None and is_token is not None:
            message = "prompt_is_token_ids needs prompt_token_ids: the ids of the positions without an embedding"
            raise VLLMValidationError(message, "prompt_is_token_ids")
        width = config.input_embedding_size
        embeds = PromptEmbeds.of(prompt["prompt_embeds"], is_token, width, config.max_model_len, config.dtype)
        num_rows = len(embeds.positions) if is_token is None else len(is_token)
        token_ids = [0] * num_rows if ids is None else self._check_ids(ids)
        if len(token_ids) != num_rows:
            message = f"prompt_token_ids must have an id for each of the {num_rows} rows of prompt_embeds, got"
            raise VLLMValidationError(f"{message} {len(token_ids)}", "prompt_token_ids", len(token_ids))
        return _Parsed(text, token_ids, salt, embeds if len(embeds.positions) else None)

    def _check_ids(self, ids: Any) -> list[int]:
        name, vocab_size = "prompt_token_ids", self.model_config.vocab_size
        elements = ids.tolist() if hasattr(ids, "tolist") else ids
        if isinstance(elements, (str, bytes)) or not isinstance(elements, Sequence):
            raise wrong_type(name, ids, "a list of integers")
        # Lists of plain integers, the usual case, are not checked one by one.
        is_plain = set(map(type, elements)) <= {int}
        result = list(elements) if is_plain else [check_token_id(name, element) for element in elements]
        if result and not (min(result) >= 0 and max(result) < vocab_size):
            worst = min(result) if min(result) < 0 else max(result)
            message = f"{name} must be in [0, {vocab_size}): {shown(worst)} is out of vocabulary"
            raise VLLMValidationError(message, name, worst)
        return result

    def _limit(self, params: SamplingParams | PoolingParams, longest: int) -> int | None:
        """The length that truncate_prompt_tokens cuts longer prompts to."""
        limit = params.truncate_prompt_tokens
        if limit is None:
            return None
        if isinstance(params, PoolingParams):
            limit = check_integer("truncate_prompt_tokens", limit, -1, longest)
            return longest if limit == -1 else max(limit, 1)
        if limit > longest:
            message = f"truncate_prompt_tokens must be at most max_model_len={longest}, got {limit}"
            raise VLLMValidationError(message, "truncate_prompt_tokens", limit)
        if limit == -1:
            return max(longest - (1 if params.max_tokens is None else params.max_tokens), 1)
        return limit

    def _truncate(self, parsed: _Parsed, ids: list[int], limit: int, params: Any, options: TextOptions) -> list[int]:
        if parsed.images is not None:
            message = (
                f"truncate_prompt_tokens={limit} would cut a prompt with pictures, {len(ids)} tokens: cut it yourself"
            )
            raise VLLMValidationError(message, "truncate_prompt_tokens", limit)
        if parsed.embeds is not None:
            message = f"truncate_prompt_tokens={limit} would cut prompt_embeds of {len(ids)} rows: cut them yourself"
            raise VLLMValidationError(message, "truncate_prompt_tokens", limit)
        is_pooled, tokenizer = isinstance(params, PoolingParams), self.tokenizer
        side = options.truncation_side or ("right" if is_pooled else "left")
        if parsed.token_ids is None:
            assert parsed.text is not None and tokenizer is not None
            return truncate_text(tokenizer, parsed.text, ids, limit, side, options.add_special_tokens)
        return truncate_ids(ids, limit, side, tokenizer.all_special_ids if is_pooled and tokenizer is not None else ())

    def _longest_pooled(self, params: PoolingParams, in_parts: bool) -> int:
        config = self.model_config
        if (params.task or config.pooling_tasks[0]) != "embed":
            return config.max_model_len
        return config.max_embed_len if in_parts else min(config.max_embed_len, config.max_model_len)

    def _check_length(self, token_ids: list[int], room: int, limit: int) -> None:
        if not token_ids:
            raise VLLMValidationError("a decoder prompt cannot be empty", "prompt", "")
        if len(token_ids) > limit - room:
            problem = "leaves no room for output within" if room else "is more than"
            name = "max_model_len" if limit == self.model_config.max_model_len else "max_embed_len"
            # Clients find a prompt that is too long by the last words.
            message = (
                f"the prompt has {len(token_ids)} tokens, which {problem} {name}={limit}: "
                f"the model's maximum context length is {limit} tokens"
            )
            raise VLLMValidationError(message, "prompt", len(token_ids))


def _follow_trace(params: SamplingParams, trace: list[int]) -> None:
    """Generate exactly these tokens."""
    params.trace_decode_token_ids, params.max_tokens, params.min_tokens = trace, len(trace), 0
    params.stop, params.stop_token_ids, params.ignore_eos = [], [], True


def with_notes(
    prompt: ProcessedPrompt, prompt_text: Any = None, session_id: Any = None, kv_hints: Any = None
) -> ProcessedPrompt:
    """The prompt with what goes with it. `prompt_text` is the text that its ids are of; the others change nothing here.

    Raises:
        VLLMValidationError: a text is something else, or kv_hints cannot be sent to the engine's process.
    """
    for name, text in (("prompt_text", prompt_text), ("session_id", session_id)):
        if text is not None and not isinstance(text, str):
            raise wrong_type(name, text, "a string")
    if kv_hints is not None:
        import msgspec  # a bare checkout has none, and no process to send them to

        try:
            kv_hints = msgspec.msgpack.decode(msgspec.msgpack.encode(kv_hints))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise VLLMValidationError(f"kv_hints must be data: {error}", "kv_hints") from None
    text = prompt.text if prompt_text is None else prompt_text
    return replace(prompt, text=text, session_id=session_id, kv_hints=kv_hints)


def _is_token(prompt: Mapping[str, Any]) -> Any:
    """Where a prompt with embeddings has tokens; EmbedsInput has it under another name than EmbedsPrompt."""
    return prompt.get("prompt_is_token_ids", prompt.get("is_token_ids"))


def check_embeds_enabled(config: ModelConfig) -> None:
    """Raises VLLMValidationError unless prompts may have embeddings."""
    if not config.enable_prompt_embeds:
        message = "prompt_embeds needs an engine that was started with enable_prompt_embeds=True"
        raise VLLMValidationError(f"{message} (--enable-prompt-embeds)", "prompt_embeds")


def _check_embedded(embeds: PromptEmbeds | None, params: SamplingParams | PoolingParams) -> None:
    """Raises VLLMValidationError if prompt positions are read whose token is not there."""
    if embeds is None or isinstance(params, PoolingParams) or params.first_prompt_row is None:
        return
    last = int(embeds.positions[-1])
    if params.first_prompt_row < last:
        message = (
            "prompt readings are those of the prompt's tokens, of which prompt_embeds has none up to position "
            f"{last}; set prompt_logprob_start={last} to read those after it"
        )
        raise VLLMValidationError(message, "prompt_logprobs")


def check_pooling_params(params: Any) -> None:
    """Raises VLLMValidationError unless it is PoolingParams."""
    if not isinstance(params, PoolingParams):
        message = (
            "the model is a pooling model, which takes PoolingParams (LLM.embed, classify, score) and does not "
            f"generate; got {type(params).__name__}"
        )
        raise VLLMValidationError(message, "sampling_params")


def check_params_type(params: Any) -> None:
    """Raises VLLMValidationError unless it is SamplingParams."""
    if not isinstance(params, SamplingParams):
        message = f"sampling_params must be SamplingParams, got {type(params).__name__}"
        if isinstance(params, PoolingParams):
            message = "the model generates and is not served as a pooling model: use LLM.generate or LLM.score_labels"
        raise VLLMValidationError(message, "sampling_params")


def _check_text(text: Any) -> str:
    if not isinstance(text, str):
        raise wrong_type("prompt", text, "a string or a list of token ids")
    check_encodable("prompt", text)
    return text


@contextmanager
def _naming(index: int, count: int) -> Iterator[None]:
    """Adds to an error which of several prompts it is about."""
    try:
        yield
    except VLLMValidationError as error:
        if count == 1:
            raise
        raise VLLMValidationError(f"prompts[{index}]: {error.args[0]}", error.parameter, error.value) from None


def spell_bad_words(words: Sequence[str], tokenizer: Tokenizer | None, vocab_size: int) -> list[list[int]]:
    """The token sequences that write the words: each as at the start of a text, and as after a space, where that has
    another first token and equally many tokens. Spaces in front of a word are ignored. Sequences with an id of
    `vocab_size` or above can never be generated and are left out.

    Raises:
        VLLMValidationError: there is no tokenizer, or it has no token for a word.
    """
    if tokenizer is None:
        raise VLLMValidationError(
            "bad_words need a tokenizer, and skip_tokenizer_init left it out", "bad_words", list(words)
        )
    sequences: list[list[int]] = []
    for word in words:
        text = word.lstrip(" ") or word
        alone = tokenizer.encode(text, add_special_tokens=False)
        if not alone:
            raise VLLMValidationError(f"bad_words holds {word!r}, which has no token", "bad_words", word)
        sequences.append(alone)
        after_space = tokenizer.encode(f" {text}", add_special_tokens=False)
        if len(after_space) == len(alone) and after_space[0] != alone[0]:
            sequences.append(after_space)
    return [sequence for sequence in sequences if max(sequence) < vocab_size]


def check_a_token_is_left(params: SamplingParams, eos_token_ids: Collection[int], vocab_size: int) -> None:
    """Check that the first token can be any. What completes a longer bad word, or what processors do, shows later.

    Args:
        params: from the input processor, with `bad_words_token_ids`.
        eos_token_ids: the model's, which min_tokens forbids beside `stop_token_ids`.

    Raises:
        VLLMValidationError: allowed_token_ids, bad_words and min_tokens together rule out every token.
    """
    bad_words = {word[0] for word in params.bad_words_token_ids or () if len(word) == 1}
    ends = {*eos_token_ids, *(params.stop_token_ids or ())} if params.min_tokens else set()
    ruled_out = bad_words | ends
    allowed: Collection[int] = params.allowed_token_ids or range(vocab_size)
    if len(ruled_out) < len(allowed) or any(each not in ruled_out for each in allowed):
        return
    rules: dict[str, object] = {}
    if params.allowed_token_ids:
        rules["allowed_token_ids"] = params.allowed_token_ids
    if not bad_words.isdisjoint(allowed):
        rules["bad_words"] = params.bad_words
    if any(each not in bad_words for each in allowed):
        rules["min_tokens"] = params.min_tokens
    *others, last = names = list(rules)
    message = f"{', '.join(others)} and {last}" if others else last
    message += " leave no token to generate"
    if "min_tokens" in rules:
        message += f": min_tokens={params.min_tokens} rules out what ends a sequence (stop_token_ids, end of sequence)"
    raise VLLMValidationError(message, names[0], rules[names[0]])


def check_readable(config: ModelConfig, params: SamplingParams, prompt_len: int) -> None:
    """Raises VLLMValidationError where `choice_readings` or `field_readings` of valid parameters cannot be honoured:
    for too many values, and for choices without a token or that the context does not hold."""
    form = params.structured_outputs
    if form is None or not (params.choice_readings or params.field_readings):
        return
    name = "choice_readings" if params.choice_readings else "field_readings"
    choices = form.choice or []
    count = len(choices) if params.choice_readings else longest_enum(schema_of(form))
    if count > MAX_VALUES:
        raise VLLMValidationError(f"{name} are of at most {MAX_VALUES} values, got {count}", name, count)
    spell = grammars_of(config).spell
    for text in choices:
        num_tokens = len(spell(text))
        if not num_tokens:
            raise VLLMValidationError(f"{name}: an empty choice has no token to read", name, text)
        if prompt_len + num_tokens - 1 > config.max_model_len:
            message = (
                f"{name}: the prompt has {prompt_len} tokens and choice {text!r} {num_tokens}; all but its last must "
                f"fit within max_model_len={config.max_model_len}"
            )
            raise VLLMValidationError(message, name, num_tokens)


def distinct(prompts: Sequence[ProcessedPrompt]) -> list[LoRARequest]:
    """The adapters of the prompts, each once.

    Raises:
        VLLMValidationError: two of one id with different paths.
    """
    found: dict[int, LoRARequest] = {}
    for prompt in prompts:
        if (own := prompt.lora_request) is not None:
            other = found.setdefault(own.lora_int_id, own)
            if other.lora_path != own.lora_path:
                raise VLLMValidationError(
                    f"{other.lora_name!r} and {own.lora_name!r} have one lora_int_id, {own.lora_int_id}, and not one "
                    "path",
                    "lora_request",
                    own.lora_int_id,
                )
    return list(found.values())


def once(prompts: Sequence[ProcessedPrompt]) -> list[ProcessedPrompt]:
    """The prompts, whose adapters were loaded in place and are not to be again."""
    return [
        replace(prompt, lora_request=replace(own, load_inplace=False))
        if (own := prompt.lora_request) is not None and own.load_inplace
        else prompt
        for prompt in prompts
    ]


def loaded(prompts: Sequence[ProcessedPrompt], add: Callable[[LoRARequest], object]) -> list[ProcessedPrompt]:
    """The prompts, after `add` was called with each of their adapters; errors as its."""
    for request in distinct(prompts):
        add(request)
    return once(prompts)
