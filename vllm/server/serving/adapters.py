"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 only."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from vllm.lora.request import NOT_ENABLED
from vllm.server.errors import ApiError
from vllm.server.http.routes import post
from vllm.server.protocol.adapters import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from vllm.server.serving.generation.sampling import named_as
from vllm.server.state import ServerState

router = APIRouter()


@post(router, "/v1/load_lora_adapter", LoadLoRAAdapterRequest, str)
async def load_lora_adapter(request: Request, state: ServerState, body: LoadLoRAAdapterRequest) -> Response:
    """Load an adapter, which requests name as their model from then on."""
    _check_enabled(state)
    with named_as({"lora_request": "lora_path"}):
        await state.adapters.load(
            state.engine,
            state.model_names,
            body.lora_name,
            body.lora_path,
            load_inplace=body.load_inplace,
            is_3d_lora_weight=body.is_3d_lora_weight,
        )
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@post(router, "/v1/unload_lora_adapter", UnloadLoRAAdapterRequest, str)
async def unload_lora_adapter(request: Request, state: ServerState, body: UnloadLoRAAdapterRequest) -> Response:
    """Forget an adapter; requests that run finish with it."""
    _check_enabled(state)
    await state.adapters.unload(state.engine, body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _check_enabled(state: ServerState) -> None:
    if state.engine.vllm_config.lora_config is None:
        raise ApiError(400, NOT_ENABLED, "lora_name", "invalid_value")
