"""Checks of arguments that upstream's calls have beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError, shown
from vllm.pooling_params import PoolingParams
from vllm.utils.checks import check_integer, check_neutral

NO_LORA = "adapters are not implemented; merge the adapter into the checkpoint"
PAUSE_MODES = ("abort", "wait", "keep")
SLEEP_TAGS = ("weights", "kv_cache")


def adds_special_tokens(tokenization_kwargs: Mapping[str, Any] | None) -> bool:
    """What `tokenization_kwargs` says about special tokens around a text; yes, unless it says no.

    Raises:
        VLLMValidationError: it holds something else.
    """
    options = dict(tokenization_kwargs or {})
    result = options.pop("add_special_tokens", True)
    for name, value in options.items():
        if value:
            raise VLLMValidationError(
                f"tokenization_kwargs takes add_special_tokens, got {name}; SamplingParams(truncate_prompt_tokens=N) "
                "cuts prompts",
                "tokenization_kwargs",
                value,
            )
    return bool(result)


def pooling_text_options(tokenization_kwargs: Mapping[str, Any] | None) -> tuple[bool, int | None]:
    """What `tokenization_kwargs` says of texts for pooling models: whether they get special tokens, and their longest
    length in tokens (-1: the model's; None: longer ones are errors), as truncate_prompt_tokens, or as truncation and
    max_length.

    Raises:
        VLLMValidationError: it holds something else.
    """
    options = dict(tokenization_kwargs or {})
    limit = options.pop("truncate_prompt_tokens", None)
    truncation, max_length = options.pop("truncation", False), options.pop("max_length", None)
    if truncation not in (None, False, True, "longest_first", "do_not_truncate"):
        raise VLLMValidationError(
            f"truncation must be true or false, got {shown(truncation)}", "tokenization_kwargs", truncation
        )
    if max_length is not None and truncation in (None, False, "do_not_truncate"):
        message = "tokenization_kwargs: max_length needs truncation=True; without it, nothing is cut"
        raise VLLMValidationError(message, "tokenization_kwargs", max_length)
    if limit is None and truncation and truncation != "do_not_truncate":
        limit = -1 if max_length is None else max_length
    return adds_special_tokens(options), limit


def cut_to(params: PoolingParams, limit: int) -> PoolingParams:
    """Parameters that cut prompts to `limit` tokens unless they say something themselves."""
    if params.truncate_prompt_tokens is not None:
        return params
    own = params.clone()
    own.truncate_prompt_tokens = limit
    return own


def check_executor_class(config: VllmConfig, executor_class: Any) -> None:
    """
    Raises:
        VLLMValidationError: `executor_class` is neither None nor Executor, nor the class that `config` asks for.
    """
    if executor_class is None:
        return
    from vllm.v1.executor.abstract import Executor

    own = Executor.get_class(config)
    if executor_class not in (Executor, own):
        raise VLLMValidationError(
            f"executor_class must be {own.__name__}, which Executor.get_class gives for this configuration; "
            "distributed_executor_backend chooses another",
            "executor_class",
            executor_class,
        )


def check_profile_limits(
    delay_iterations: int | None, max_iterations: int | None, profiler_kwargs: Mapping[str, Any] | None
) -> None:
    """
    Raises:
        VLLMValidationError: one of them asks for something.
    """
    given = {
        "delay_iterations": delay_iterations, "max_iterations": max_iterations, "profiler_kwargs": profiler_kwargs
    }  # fmt: skip
    for name, value in given.items():
        check_neutral(name, value, "profile around the calls of interest")


def check_pause_mode(mode: Any) -> None:
    """
    Raises:
        VLLMValidationError: `mode` is not one of PAUSE_MODES.
    """
    if mode not in PAUSE_MODES:
        raise VLLMValidationError(f"mode must be one of {', '.join(PAUSE_MODES)}, got {mode!r}", "mode", mode)


def check_sleep_level(level: Any) -> None:
    """
    Raises:
        VLLMValidationError: `level` is not 1 or 2.
    """
    check_integer("level", level, 1, 2)


def check_sleep_tags(tags: Any) -> None:
    """
    Raises:
        VLLMValidationError: `tags` is neither None nor a list of SLEEP_TAGS.
    """
    for tag in tags or ():
        if tag not in SLEEP_TAGS:
            raise VLLMValidationError(f"tags must be of {', '.join(SLEEP_TAGS)}, got {tag!r}", "tags", tag)
