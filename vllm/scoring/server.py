"""A running server that is asked about many texts."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from vllm.exceptions import CliError
from vllm.utils.server_client import ServerSession, with_retries

Result = TypeVar("Result")

CONCURRENCY = 16


class Server(ServerSession):
    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__(args)
        self._slots = asyncio.Semaphore(args.concurrency or CONCURRENCY)
        self.max_model_len: int = self.card.get("max_model_len") or 0

    def deciding(self) -> dict[str, Any]:
        """The settings that decide the rows; not the URL, as the same model may be served elsewhere."""
        answer = self.wait(self.client.get("/version"))
        try:
            version = answer["version"]
        except (TypeError, KeyError):
            raise CliError(f"{self.client.url}/version: the answer names no version") from None
        return {"server_version": version, "model": self.model_name, "max_model_len": self.max_model_len}

    async def post(self, path: str, fields: dict[str, Any]) -> dict[str, Any]:
        """The answer to a request about the model, tried again while the server is overloaded or away."""
        body = {"model": self.model_name, **fields}
        async with self._slots:
            answer: dict[str, Any] = await with_retries(lambda: self.client.post(path, body))
        return answer

    def in_order(self, works: Sequence[Coroutine[Any, Any, Result]]) -> Iterator[Result]:
        """The results of all, which run concurrently; leaving the iteration cancels the rest."""
        tasks = [self.loop.create_task(work) for work in works]
        try:
            for task in tasks:
                yield self.wait(task)
        finally:
            for task in tasks:
                task.cancel()
            self.wait(asyncio.gather(*tasks, return_exceptions=True))
