"""The application over a tiny engine, called without a socket."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from vllm import AsyncEngineArgs, AsyncLLM
from vllm.server.app import build_app
from vllm.server.server_args import ServerArgs
from vllm.server.state import ServerState


def make_engine(model: Path, **fields: Any) -> AsyncLLM:
    """AsyncLLM on a folder of make_tiny_model, as make_tiny_llm's LLM."""
    options = {"dtype": "float32", "max_model_len": 128, "max_logprobs": -1, **fields}
    return AsyncLLM.from_engine_args(AsyncEngineArgs(str(model), **options))


def server_args(**fields: Any) -> ServerArgs:
    """Arguments of a server for tests: its model is "tiny", and requests may bring the template that the model
    lacks."""
    return ServerArgs(**{"served_model_name": ["tiny"], "trust_request_chat_template": True, **fields})


@asynccontextmanager
async def client_of(engine: AsyncLLM, **args: Any) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of a server over `engine`; `args` are ServerArgs."""
    app = build_app(ServerState(engine, server_args(**args)))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        yield client


class AppThread:
    """A server whose event loop runs in a thread of its own, for tests without one. Closes its engine.

    Args:
        beside: a server whose engine and thread it shares, and does not close.
        args: ServerArgs.
    """

    def __init__(self, engine: AsyncLLM, beside: AppThread | None = None, **args: Any) -> None:
        self.engine = engine
        self.state = ServerState(engine, server_args(**args))
        transport = httpx.ASGITransport(build_app(self.state), raise_app_exceptions=False)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60)
        self._is_guest = beside is not None
        if beside is not None:
            self._loop = beside._loop
            return
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def __enter__(self) -> AppThread:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_guest:
            self.run(self._client.aclose())
            return
        self.run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        await self._client.aclose()
        self.engine.shutdown()
        # The tasks that it cancelled end.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of a coroutine in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=120)

    def request(self, method: str, url: str, **options: Any) -> httpx.Response:
        """Send one request; options are httpx's."""
        return self.begin(method, url, **options).result(timeout=120)

    def begin(self, method: str, url: str, **options: Any) -> concurrent.futures.Future[httpx.Response]:
        """Send one request without waiting for its answer."""
        return asyncio.run_coroutine_threadsafe(self._client.request(method, url, **options), self._loop)

    def post(self, url: str, **body: Any) -> Any:
        """The JSON answer to a request for the served model, which must succeed."""
        response = self.request("POST", url, json={"model": "tiny", **body})
        assert response.status_code == 200, response.text
        return response.json()

    def stream(self, url: str, **body: Any) -> list[Any]:
        """The chunks of a stream, which must end as it should."""
        response = self.request("POST", url, json={"model": "tiny", "stream": True, **body})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
        *events, done, rest = response.text.split("\n\n")
        assert (done, rest) == ("data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


Serve = Callable[..., AppThread]
"""The fixture `serve`: see Servers.start of conftest.py."""
