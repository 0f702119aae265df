"""A running server that answers one prompt at a time, for the commands that generate."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any

from vllm.entrypoints.cli.generation import given_sampling
from vllm.utils.server_client import connect, served_model


class ServedModel:
    """A model at --url. A context manager, which disconnects.

    Attributes:
        name: what the server calls it.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        """
        Raises:
            CliError: there is no server, or not that model.
        """
        self._client = connect(args)
        self._fields = {**given_sampling(args), "stream": True}
        if args.seed:
            self._fields["seed"] = args.seed
        self._loop = asyncio.new_event_loop()
        try:
            self.name: str = self._loop.run_until_complete(served_model(self._client, args.model))["id"]
        except BaseException:
            self._loop.close()
            raise

    def __enter__(self) -> ServedModel:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A stream that an exception left open ends here.
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.run_until_complete(self._client.close())
        self._loop.close()

    def stream(self, path: str, fields: dict[str, Any]) -> Iterator[str]:
        """The answer to a request with these fields, piece by piece, as it is generated.

        Raises:
            ServerError: there is none.
            KeyboardInterrupt: Ctrl-C. The server is no longer at it.
        """
        events = self._client.events(path, {"model": self.name, **self._fields, **fields})
        try:
            while (data := self._next(events)) is not None:
                for choice in json.loads(data)["choices"]:
                    if piece := choice["delta"].get("content") if "delta" in choice else choice["text"]:
                        yield piece
        finally:
            if not self._loop.is_closed():
                self._loop.run_until_complete(events.aclose())

    def _next(self, events: AsyncIterator[bytes]) -> bytes | None:
        """The next event; None at the end."""

        async def following() -> bytes | None:
            return await anext(events, None)

        task = self._loop.create_task(following())
        try:
            return self._loop.run_until_complete(task)
        except KeyboardInterrupt:
            # A generator that still waits cannot be closed.
            task.cancel()
            self._loop.run_until_complete(asyncio.gather(task, return_exceptions=True))
            raise
