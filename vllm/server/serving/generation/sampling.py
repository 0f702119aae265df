"""A generation request's fields to queued engine requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.inputs.text_options import TextOptions
from vllm.logger import init_logger
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.server.errors import ApiError
from vllm.server.http.routes import session
from vllm.server.protocol.generate import GenerateRequest
from vllm.server.protocol.generation import GenerationFields
from vllm.server.rendering.readings import ReadingPlan
from vllm.server.state import ServerState
from vllm.v1.engine.input_processor import ProcessedPrompt

logger = init_logger(__name__)

_LONGEST_SESSION = 128  # letters of a session's name that are logged

PreparedPrompts = tuple[list[ProcessedPrompt], list[SamplingParams]]
"""The prompts of a request, and the parameters of each."""


def sampling_params(
    request: GenerationFields,
    state: ServerState,
    plan: ReadingPlan,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    **more: Any,
) -> SamplingParams:
    """The parameters of the request's prompts. Fields left out have the model's defaults, or else vLLM's.

    `logprobs` and `prompt_logprobs` are top-k at generated and prompt positions; without the latter, the request's own
    field counts. `more` are further fields in place of the request's.

    Raises:
        VLLMValidationError: a value out of its range.
        ApiError: parameters of a connector, and there is none.
    """
    config = state.engine.vllm_config
    is_for_connector = bool((request.extra_args or {}).get("kv_transfer_params"))
    if is_for_connector and config.kv_transfer_config is None and not config.cache_config.kv_store:
        reason = "without --kv-transfer-config or --kv-store the KV cache stays in this server"
        raise ApiError(400, f"kv_transfer_params: {reason}", "kv_transfer_params", "unsupported_field")
    fields = request.sampling_fields(state.engine.model_config.default_sampling_params)
    if max_tokens is not None:
        fields["max_tokens"] = max_tokens
    if prompt_logprobs is not None:
        fields["prompt_logprobs"] = prompt_logprobs
    fields |= {"logprobs": logprobs, "logprob_token_ids": plan.engine_ids or None}
    with request.named_form():
        return SamplingParams(
            **{"max_tokens": None, **fields, **more},
            detokenize=state.engine.input_processor.tokenizer is not None,
            extra_args=request.extra_args,
            output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
        )


async def prepare_prompts(
    state: ServerState,
    request: GenerationFields | GenerateRequest,
    answer_id: str,
    prompts: list[Any],
    params: SamplingParams,
    *,
    add_special_tokens: bool,
    prompt_field: str = "prompt",
    max_tokens_field: str = "max_tokens",
) -> PreparedPrompts:
    """Tokenise and check all prompts of a request, for `Submission.queue`. Errors name `prompt_field` and
    `max_tokens_field`.

    Raises:
        VLLMValidationError: a prompt or parameter that cannot be honoured.
        ApiError: a prompt with `max_tokens` beyond the context.
        EngineDeadError: the engine is dead.
    """
    if request.cache_salt is not None:
        prompts = [_with_key(prompt, "cache_salt", request.cache_salt) for prompt in prompts]
    prompts = with_picture_options(state, prompts, getattr(request, "mm_processor_kwargs", None))
    longest = state.engine.model_config.max_model_len
    if params.truncate_prompt_tokens is None:
        for prompt in prompts:
            # Before each id of a long prompt is checked.
            ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else prompt
            if isinstance(ids, list) and len(ids) > longest:
                message = f"{prompt_field}: the prompt has {len(ids)} tokens, more than the context's {longest}"
                raise ApiError(400, message, prompt_field, "context_length_exceeded")
    processed = await state.engine.process_prompts(
        prompts, [params] * len(prompts), options=TextOptions(add_special_tokens)
    )
    wanted = getattr(request, max_tokens_field)
    for prompt in processed:
        length = len(prompt.token_ids)
        if wanted is not None and length + wanted > longest:
            message = (
                f"the prompt's {length} tokens and {max_tokens_field}={wanted} are more than the context's {longest} "
                f"tokens; leave {max_tokens_field} out to generate as many as fit"
            )
            raise ApiError(400, message, max_tokens_field, "context_length_exceeded")
    if state.args.enable_log_requests:
        for index, prompt in enumerate(processed):
            _log_request(f"{answer_id}-{index}", prompt, params, state.args.max_log_len)
    with request.named_form() if isinstance(request, GenerationFields) else nullcontext():
        await state.engine.compile_grammar(params)
    check = state.engine.input_processor.process_params
    return processed, [check(params, len(prompt.token_ids)) for prompt in processed]


def _log_request(name: str, prompt: ProcessedPrompt, params: SamplingParams, longest: int | None) -> None:
    text, ids = prompt.text, list(prompt.token_ids)
    if longest is not None:
        text, ids = None if text is None else text[:longest], ids[:longest]
    part_of = "" if (own := session.get()) is None else f" of session {own[:_LONGEST_SESSION]!r}"
    logger.info("request %s%s: prompt %r, ids %s of %d, %s", name, part_of, text, ids, len(prompt.token_ids), params)


@contextmanager
def named_as(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the parameter of errors: `names` maps SamplingParams' names to the request's fields."""
    try:
        yield
    except VLLMValidationError as error:
        name = names.get(error.parameter or "")
        if name is None:
            raise
        message = error.args[0].replace(error.parameter, name, 1)
        raise type(error)(message, name, error.value) from None


def with_picture_options(state: ServerState, prompts: list[Any], options: dict[str, Any] | None) -> list[Any]:
    """The prompts with a request's mm_processor_kwargs.

    Raises:
        ApiError: there are some, and the server takes none from requests.
    """
    if not options:
        return prompts
    if not state.args.trust_request_mm_kwargs:
        message = (
            "mm_processor_kwargs: options may make pictures as large as they like, and this server takes those of "
            "requests only with --trust-request-mm-kwargs; --mm-processor-kwargs are those of all"
        )
        raise ApiError(400, message, "mm_processor_kwargs", "unsupported_field")
    return [_with_key(prompt, "mm_processor_kwargs", options) for prompt in prompts]


def _with_key(prompt: Any, key: str, value: Any) -> Any:
    if isinstance(prompt, dict):
        return {**prompt, key: value}
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, key: value}
