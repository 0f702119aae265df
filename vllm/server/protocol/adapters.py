"""Bodies that load and unload LoRA adapters."""

from __future__ import annotations

from pydantic import Field

from vllm.server.protocol.base import RequestModel


class LoadLoRAAdapterRequest(RequestModel):
    """The body of /v1/load_lora_adapter."""

    lora_name: str = Field(min_length=1, description="What requests give as `model`.")
    lora_path: str = Field(min_length=1, description="A folder with adapter_config.json, on the server's machine.")
    load_inplace: bool = Field(False, description="Load it again if there is one of that name.")
    is_3d_lora_weight: bool = False


class UnloadLoRAAdapterRequest(RequestModel):
    """The body of /v1/unload_lora_adapter."""

    lora_name: str = Field(min_length=1)
    lora_int_id: int | None = Field(None, description="Changes nothing: names are unique.")
