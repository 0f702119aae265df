"""A request for a LoRA adapter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.exceptions import VLLMValidationError


@dataclass(eq=False)
class LoRARequest:
    """An adapter that a request is to run with. Two are equal when their names are.

    Attributes:
        lora_name: what identifies the adapter.
        lora_int_id: a number of its own, from 1 on.
        lora_path: its folder or hub name.
        base_model_name: the model that it was made for.
        load_inplace: load it again where it is loaded already.
        is_3d_lora_weight: whether its expert weights are stacked.

    Raises:
        VLLMValidationError: an id below 1, or no path.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        if self.lora_int_id < 1:
            raise VLLMValidationError("lora_int_id must be at least 1", "lora_int_id", self.lora_int_id)
        if not self.lora_path:
            raise VLLMValidationError("lora_path must name a folder", "lora_path", self.lora_path)

    @property
    def adapter_id(self) -> int:
        """`lora_int_id`."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """`lora_name`."""
        return self.lora_name

    @property
    def path(self) -> str:
        """`lora_path`."""
        return self.lora_path

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)


NOT_ENABLED = "LoRA adapters are not enabled: start the engine with enable_lora=True (--enable-lora)"


def check_lora_request(value: Any, is_enabled: bool) -> LoRARequest | None:
    """A request's adapter, or None.

    Raises:
        VLLMValidationError: something else, or adapters are not enabled.
    """
    return None if value is None else given_lora_request(value, is_enabled)


def given_lora_request(value: Any, is_enabled: bool) -> LoRARequest:
    """An adapter; errors as `check_lora_request`'s, also for None."""
    if not isinstance(value, LoRARequest):
        raise VLLMValidationError(
            f"lora_request must be a LoRARequest, got {type(value).__name__}", "lora_request", value
        )
    if not is_enabled:
        raise VLLMValidationError(f"lora_request: {NOT_ENABLED}", "lora_request", value.lora_name)
    return value
