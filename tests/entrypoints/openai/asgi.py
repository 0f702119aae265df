"""The application over a tiny engine, called without a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from vllm import AsyncEngineArgs, AsyncLLM
from vllm.entrypoints.openai.api_server import build_app
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.entrypoints.openai.state import ServerState


def make_engine(model: Path, **fields: Any) -> AsyncLLM:
    """AsyncLLM on a folder of make_tiny_model, as make_tiny_llm's LLM."""
    options = {"dtype": "float32", "max_model_len": 128, "max_logprobs": -1, **fields}
    return AsyncLLM.from_engine_args(AsyncEngineArgs(str(model), **options))


@asynccontextmanager
async def client_of(engine: AsyncLLM, **args: Any) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of a server over `engine`; `args` are ServerArgs."""
    app = build_app(ServerState(engine, ServerArgs(**{"served_model_name": ["tiny"], **args})))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client
