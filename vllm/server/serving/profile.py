"""POST /start_profile and /stop_profile, where a folder for traces was named."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from vllm import envs
from vllm.entrypoints.async_llm import AsyncLLM
from vllm.server.errors import ApiError
from vllm.server.state import server_state

router = APIRouter(include_in_schema=False)


@router.post("/start_profile")
async def start_profile(request: Request) -> Response:
    """Begin to record operators and kernels on every worker."""
    await _profiled_engine(request).start_profile()
    return Response()


@router.post("/stop_profile")
async def stop_profile(request: Request) -> Response:
    """End it; each worker writes a trace."""
    await _profiled_engine(request).stop_profile()
    return Response()


def _profiled_engine(request: Request) -> AsyncLLM:
    engine = server_state(request).engine
    if not (engine.vllm_config.torch_profiler_dir or envs.profiler_folder()):
        message = "no folder for traces was named: --profiler-config or VLLM_TORCH_PROFILER_DIR does it"
        raise ApiError(404, message, code="not_found")
    return engine
