"""Arguments of LLM's methods that are one value or many."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

from vllm.exceptions import VLLMValidationError


def as_prompt_list(prompts: Any) -> list[Any]:
    """One prompt or many, as a list. A flat list of integers is one prompt."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if not isinstance(prompts, Sequence):
        raise VLLMValidationError(
            f"prompts must be a prompt or a list of prompts, got {type(prompts).__name__}", "prompts"
        )
    if prompts and isinstance(prompts[0], Integral):
        return [prompts]
    return list(prompts)


def as_input_list(inputs: Any) -> list[Any]:
    """One input of a decision or many, as a list. A flat list of messages is one input."""
    if isinstance(inputs, str) or not isinstance(inputs, Sequence):
        return [inputs]
    return [inputs] if inputs and isinstance(inputs[0], Mapping) else list(inputs)


def one_each(name: str, values: Any, count: int) -> list[Any]:
    """`values`, or the one value for each."""
    if not isinstance(values, Sequence):
        return [values] * count
    if len(values) != count:
        raise VLLMValidationError(f"{name} has {len(values)} entries for {count} prompts", name, len(values))
    return list(values)


def progress_bar(use_tqdm: bool | Callable[..., Any], total: int) -> Any:
    if not use_tqdm:
        return None
    if callable(use_tqdm):
        return use_tqdm(total=total, desc="Processed prompts", unit="req")
    from tqdm import tqdm

    return tqdm(total=total, desc="Processed prompts", unit="req", dynamic_ncols=True)
