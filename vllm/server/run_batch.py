"""Answers a file of requests in OpenAI's batch format, by the server's application without a socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
import urllib.error
import urllib.request
import uuid
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import IO, TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError
from tqdm import tqdm

from vllm import envs
from vllm.exceptions import CliError, EngineDeadError
from vllm.server.server_args import ServerArgs

if TYPE_CHECKING:
    from fastapi import FastAPI

    from vllm.entrypoints.async_llm import AsyncLLM

_SECONDS = 600.0
_UNLIMITED = 2**31 - 1


class BatchRequestInput(BaseModel):
    """A line of the input.

    Attributes:
        custom_id: the caller's name of the request, which no other line has.
        url: the path of an endpoint that takes POST, such as /v1/chat/completions.
        body: what is posted there.
    """

    model_config = ConfigDict(extra="forbid")

    custom_id: str
    method: Literal["POST"]
    url: str
    body: dict[str, Any]


class BatchResponseData(BaseModel):
    """An answer: HTTP status, the answer's id and its JSON."""

    status_code: int = 200
    request_id: str
    body: Any = None


class BatchRequestOutput(BaseModel):
    """A line of the output. `error` is the answer's error object when the request failed, and null otherwise."""

    id: str
    custom_id: str
    response: BatchResponseData | None
    error: Any | None


def is_url(place: str) -> bool:
    return place.startswith(("http://", "https://"))


def check_places(source: str, target: str) -> None:
    """
    Raises:
        CliError: a file that cannot be read or written, or one for both.
    """
    if not is_url(source) and not os.path.isfile(source):
        raise CliError(f"--input-file: there is no file {source}")
    if is_url(target):
        return
    folder = os.path.dirname(os.path.abspath(target))
    if not os.path.isdir(folder) or os.path.isdir(target):
        raise CliError(f"--output-file {target}: there is no folder {folder}, or it is a folder itself")
    if not is_url(source) and os.path.exists(target) and os.path.samefile(source, target):
        raise CliError(f"--output-file {target} is the input file")


@contextlib.contextmanager
def opened_input(source: str) -> Iterator[IO[str]]:
    """The text of a file, or of a URL once it has been downloaded."""
    if not is_url(source):
        with open(source, encoding="utf-8-sig") as file:
            yield file
        return
    with tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        try:
            with urllib.request.urlopen(source, timeout=_SECONDS) as answer:
                file.write(answer.read().decode("utf-8-sig"))
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise CliError(f"--input-file {source}: {error}") from None
        file.seek(0)
        yield file


@contextlib.contextmanager
def opened_output(target: str, folder: str | None = None) -> Iterator[IO[str]]:
    """A file to write, which is uploaded by PUT at the end when `target` is a URL; until then it is in `folder`."""
    if not is_url(target):
        with open(target, "w", encoding="utf-8") as file:
            yield file
        return
    with tempfile.TemporaryFile("w+", encoding="utf-8", dir=folder) as file:
        yield file
        file.seek(0)
        request = urllib.request.Request(target, data=file.read().encode(), method="PUT")
        try:
            urllib.request.urlopen(request, timeout=_SECONDS).close()
        except (urllib.error.URLError, OSError) as error:
            raise CliError(f"--output-file {target}: {error}") from None


def check_lines(file: IO[str]) -> int:
    """Read all lines and return to the beginning; the number of requests.

    Raises:
        CliError: a line that is not a request; all are read before anything is computed.
    """
    seen: dict[str, int] = {}
    for number, line in _numbered(file):
        try:
            custom_id = BatchRequestInput.model_validate_json(line).custom_id
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(map(str, first["loc"]))
            raise CliError(f"line {number}: {f'{field}: ' if field else ''}{first['msg']}") from None
        if custom_id in seen:
            raise CliError(f"line {number}: custom_id {custom_id!r} is that of line {seen[custom_id]}")
        seen[custom_id] = number
    file.seek(0)
    return len(seen)


def _numbered(file: IO[str]) -> Iterator[tuple[int, str]]:
    # iter() by readline: a file that is iterated cannot be sought.
    return ((number, line) for number, line in enumerate(iter(file.readline, ""), 1) if line.strip())


async def run_batch(
    engine: AsyncLLM, args: ServerArgs, chat_template: str | None, source: IO[str], target: IO[str], total: int
) -> int:
    """Answer every line of `source`; answers are written in its order, each as soon as those before it are there.

    Args:
        args: of the server; its limits of bodies and queues do not hold here.
        total: the number of requests, for the progress bar.

    Returns:
        How many requests were answered by an error.

    Raises:
        CliError: an argument that the engine's model has no use for.
        EngineDeadError: the engine died; the answers before that are written.
    """
    from vllm.server.app import build_app
    from vllm.server.state import ServerState

    if args.audit_share:
        raise CliError("--audit-share is of `vllm serve`: `vllm audit` reads a file's rows by two models")
    own = replace(args, max_body_mib=float(_UNLIMITED), max_num_queued_reqs=_UNLIMITED, access_log=False)
    try:
        state = ServerState(engine, own, chat_template)
    except ValueError as error:
        raise CliError(str(error)) from None
    await state.load_adapters()
    app = build_app(state)
    # Enough for full steps at any time, and a bound for what is held.
    most = 2 * engine.vllm_config.scheduler_config.max_num_seqs
    num_failed = 0
    waiting: deque[asyncio.Task[BatchRequestOutput]] = deque()

    async def write_first() -> None:
        nonlocal num_failed
        output = await waiting.popleft()
        num_failed += output.error is not None
        target.write(output.model_dump_json() + "\n")
        target.flush()
        bar.update()
        if engine.errored:
            raise EngineDeadError(str(engine.dead_error))

    with tqdm(total=total, desc="requests", disable=None) as bar:
        try:
            for _, line in _numbered(source):
                waiting.append(asyncio.create_task(_answer(app, args, BatchRequestInput.model_validate_json(line))))
                while len(waiting) >= most:
                    await write_first()
            while waiting:
                await write_first()
        finally:
            for task in waiting:
                task.cancel()
    return num_failed


async def _answer(app: FastAPI, args: ServerArgs, request: BatchRequestInput) -> BatchRequestOutput:
    key = next(iter(args.api_key or envs.api_keys()), None)
    if request.body.get("stream") is True:
        status, body = 400, _error("a batch has no streams: leave `stream` out", "stream")
    else:
        status, body = await _post(app, request.url, json.dumps(request.body).encode(), key)
    error = None
    if status >= 400:
        error = body.get("error", body) if isinstance(body, dict) else body
    response = BatchResponseData(status_code=status, request_id=f"vllm-batch-{uuid.uuid4().hex}", body=body)
    return BatchRequestOutput(
        id=f"vllm-{uuid.uuid4().hex}", custom_id=request.custom_id, response=response, error=error
    )


def _error(message: str, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": "unsupported"}}


async def _post(app: FastAPI, path: str, body: bytes, key: str | None) -> tuple[int, Any]:
    """Status and JSON of the application's answer to a POST."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if key is not None:
        headers.append((b"authorization", f"Bearer {key}".encode()))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": headers,
        "client": None,
        "server": None,
    }
    sent = False
    status = 500
    pieces: list[bytes] = []

    async def receive() -> dict[str, Any]:
        nonlocal sent
        if sent:
            # The client stays until it has its answer.
            await asyncio.Event().wait()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            pieces.append(message.get("body", b""))

    await app(scope, receive, send)
    text = b"".join(pieces)
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text.decode(errors="replace")
