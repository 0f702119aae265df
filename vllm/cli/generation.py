"""The model of a command, in this process or served: its flags, and answers to one prompt at a time."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.cli.frame import CommandParser
from vllm.engine.arg_utils import EngineArgs
from vllm.engine.first_checks import check_first
from vllm.exceptions import CliError
from vllm.sampling_params import FIELDS, RequestOutputKind, SamplingParams
from vllm.utils.flag_types import positive
from vllm.utils.server_client import API_KEY, TIMEOUT, ServerSession

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

_SAMPLING = {name: row for name, row in FIELDS.items() if row.flag}
_DEFAULTS = SamplingParams()
_request_ids = map(str, itertools.count())


class _Model(argparse.Action):
    """MODEL: it overrides the --model of a file, and excludes that of the command line."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        given = parser.given if isinstance(parser, CommandParser) else ()
        if any(argument.partition("=")[0] == "--model" for argument in given):
            raise argparse.ArgumentError(self, "not allowed with argument --model")
        setattr(namespace, self.dest, values)


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the engine's flags, and MODEL as the short way to write --model."""
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default=argparse.SUPPRESS, action=_Model, help="the same as --model"
    )
    EngineArgs.add_cli_args(parser)


def add_server_arguments(
    parser: argparse.ArgumentParser, url_flags: Sequence[str] = ("--url",), only: bool = False
) -> argparse._ArgumentGroup:
    """Add --url, by all of its names, --api-key and --timeout; their group. `only`: no model can be in this process."""
    group = parser.add_argument_group("server")
    instead = "" if only else " instead of a model in this process"
    url = f"a running server{instead}, as http://HOST:PORT"
    wait = f"longest wait for anything from the server (default: {TIMEOUT:.0f})"
    group.add_argument(*url_flags, metavar="URL", help=url)
    group.add_argument("--api-key", metavar="KEY", help=f"the server's key (default: that of {API_KEY}, if it is set)")
    group.add_argument("--timeout", metavar="SECONDS", type=positive, help=wait)
    return group


def check_server_arguments(args: argparse.Namespace, *others: str, sent: Sequence[str] = ("model",)) -> None:
    """Refuse flags without effect: of the server (these and `others`, whose default is None) without --url; of the
    engine, but for those `sent` to the server, with it."""
    if args.url is None:
        without_effect = [name for name in ("api_key", "timeout", *others) if getattr(args, name) is not None]
        reason = "says how to talk to a server, and needs --url"
    else:
        engine = [item for item in fields(EngineArgs) if item.name not in sent]
        without_effect = [item.name for item in engine if getattr(args, item.name, item.default) != item.default]
        reason = "is for a model in this process, and has no effect on the one at --url"
    if without_effect:
        raise CliError(f"--{without_effect[0].replace('_', '-')} {reason}")


def add_generation_arguments(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    """Add the flags of sampling, server and engine. `max_tokens` is a default, None: as many as the context holds."""
    add = parser.add_argument_group("sampling").add_argument
    limit = "" if max_tokens is not None else "; left out: as many as the context holds"
    for name, row in _SAMPLING.items():
        kind = float if isinstance(getattr(_DEFAULTS, name), float) else int
        about = f"{row.flag}{limit if name == 'max_tokens' else ''}"
        add("--" + name.replace("_", "-"), metavar=kind.__name__.upper(), type=kind, help=about)
    parser.set_defaults(max_tokens=max_tokens)
    server = add_server_arguments(parser)
    server.add_argument("--model-name", metavar="NAME", help="the same as --model, of a server; left out: its first")
    add_engine_arguments(parser)


def sampling_params(args: argparse.Namespace, defaults: dict[str, Any] | None = None) -> SamplingParams:
    """The parameters that the flags give; `defaults` (the model's own) for those left out."""
    options = {"max_tokens": None, **(defaults or {}), **_given_sampling(args)}
    return SamplingParams(**options, output_kind=RequestOutputKind.DELTA)


def _given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(args, name) for name in _SAMPLING if getattr(args, name) is not None}


def load_engine(args: argparse.Namespace) -> LLMEngine:
    """The engine that the flags describe; a CliError if they cannot be honoured."""
    engine_args = EngineArgs.from_cli_args(args)
    try:
        check_first(engine_args)
        # Needs torch.
        from vllm.v1.engine.llm_engine import LLMEngine

        return LLMEngine.from_engine_args(engine_args)
    except (ValueError, OSError) as error:
        raise CliError(str(error)) from error


def open_model(args: argparse.Namespace) -> AbstractContextManager[LocalModel | ServedModel]:
    """The model at --url, or the one that the engine's flags describe."""
    return nullcontext(LocalModel(args)) if args.url is None else ServedModel(args)


class LocalModel:
    """A model in this process. Iterating an answer raises VLLMValidationError (a prompt that cannot be honoured),
    RuntimeError (the model failed on it) or KeyboardInterrupt; the engine is idle again then."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._engine = load_engine(args)
        config = self._engine.model_config
        if self._engine.tokenizer is None:
            raise CliError("--skip-tokenizer-init: texts cannot be answered without a tokenizer")
        self.model_name = Path(config.model).name
        self._params = sampling_params(args, config.default_sampling_params)

    def complete(self, text: str) -> Iterator[str]:
        """The continuation of a text, piece by piece as it is generated."""
        return stream(self._engine, text, self._params)

    def chat(self, messages: list[dict[str, Any]], template: str | None) -> Iterator[str]:
        """The answer to a conversation, piece by piece; `template` replaces the model's own."""
        from vllm.answers.prompts import render_conversations

        (prompt,) = render_conversations(messages, self._engine.tokenizer, chat_template=template)
        return stream(self._engine, prompt, self._params)


def stream(engine: LLMEngine, prompt: Any, params: SamplingParams) -> Iterator[str]:
    """The answer of an idle engine, piece by piece; `params` have output_kind DELTA. For errors see LocalModel."""
    from vllm.entrypoints.interrupts import InterruptsBetweenSteps

    request_id = next(_request_ids)
    try:
        with InterruptsBetweenSteps() as interrupts:
            engine.add_request(request_id, prompt, params)
            while engine.has_unfinished_requests():
                for output in engine.step():
                    (completion,) = output.outputs
                    if completion.error is not None:
                        raise RuntimeError(completion.error)
                    if completion.text:
                        yield completion.text
                interrupts.check()
    finally:
        engine.abort_request([request_id])


class ServedModel(ServerSession):
    """A model at --url, with LocalModel's methods. Iterating an answer raises ServerError or KeyboardInterrupt; the
    server has stopped working on it then."""

    def __init__(self, args: argparse.Namespace) -> None:
        args.model = args.model or args.model_name
        super().__init__(args)
        self._fields = {**_given_sampling(args), "stream": True}
        if args.seed:
            self._fields["seed"] = args.seed

    def complete(self, text: str) -> Iterator[str]:
        return self._stream("/v1/completions", {"prompt": text})

    def chat(self, messages: list[dict[str, Any]], template: str | None) -> Iterator[str]:
        options = {} if template is None else {"chat_template": template}
        return self._stream("/v1/chat/completions", {"messages": messages, **options})

    def _stream(self, path: str, prompt: dict[str, Any]) -> Iterator[str]:
        events = self.client.events(path, {"model": self.model_name, **self._fields, **prompt})
        try:
            while (data := self._next(events)) is not None:
                for choice in json.loads(data)["choices"]:
                    if piece := choice["delta"].get("content") if "delta" in choice else choice["text"]:
                        yield piece
        finally:
            if not self.loop.is_closed():
                self.wait(events.aclose())

    def _next(self, events: AsyncIterator[bytes]) -> bytes | None:
        async def following() -> bytes | None:
            return await anext(events, None)

        step = following()
        try:
            return self.loop.run_until_complete(step)
        except KeyboardInterrupt:
            # A generator that still waits cannot be closed. The interrupt may have come before the step's task ran.
            tasks = [task for task in asyncio.all_tasks(self.loop) if task.get_coro() is step]
            for task in tasks:
                task.cancel()
                self.wait(asyncio.gather(task, return_exceptions=True))
            step.close()
            raise
