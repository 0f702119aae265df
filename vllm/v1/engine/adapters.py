"""Adapters of prompts, loaded before anything is queued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.v1.engine.input_processor import ProcessedPrompt


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
