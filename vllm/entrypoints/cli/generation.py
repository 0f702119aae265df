"""A model in this process that answers one prompt at a time, for the commands that generate."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.cli.frame import CommandParser
from vllm.exceptions import CliError
from vllm.sampling_params import RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from vllm.v1.engine.llm_engine import LLMEngine

_SAMPLING = ("temperature", "top_p", "max_tokens")
_request_ids = map(str, itertools.count())


class _Model(argparse.Action):
    """MODEL: it overrules the --model of a file, and excludes that of the command line."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
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


def add_sampling_arguments(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    """Add the sampling flags. --seed is the engine's.

    Args:
        parser: the command's.
        max_tokens: default of --max-tokens; None = as many as the context holds.
    """
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", metavar="FLOAT", type=float, help="0 = greedy; left out: the model's own, or 1")
    group.add_argument(
        "--top-p", metavar="FLOAT", type=float, help="draw from the most likely tokens that hold this much probability"
    )
    limit = "" if max_tokens is not None else "; left out: as many as the context holds"
    group.add_argument(
        "--max-tokens", metavar="INT", type=int, default=max_tokens, help=f"longest answer, in tokens{limit}"
    )


def sampling_params(args: argparse.Namespace, defaults: dict[str, Any] | None = None) -> SamplingParams:
    """What the flags say, and `defaults` (the model's own) where they say nothing.

    Raises:
        VLLMValidationError: a value that is out of range.
    """
    options = {"max_tokens": None, **(defaults or {}), **given_sampling(args)}
    return SamplingParams(**options, output_kind=RequestOutputKind.DELTA)


def given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling flags that were given or have a default of their own, by SamplingParams' names."""
    return {name: getattr(args, name) for name in _SAMPLING if getattr(args, name) is not None}


def load_engine(args: argparse.Namespace) -> LLMEngine:
    """The engine that the flags describe.

    Raises:
        CliError: the model is not there, or a flag cannot be honoured.
    """
    from vllm.v1.engine.llm_engine import LLMEngine

    try:
        return LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    except (ValueError, OSError) as error:
        raise CliError(str(error)) from error


def stream(engine: LLMEngine, prompt: Any, params: SamplingParams) -> Iterator[str]:
    """The answer to a prompt, piece by piece, as it is generated.

    Args:
        engine: idle.
        prompt: as LLMEngine.add_request takes it.
        params: with output_kind DELTA.

    Raises:
        VLLMValidationError: a prompt that cannot be honoured.
        RuntimeError: the model failed on it.
        KeyboardInterrupt: Ctrl-C, after the piece that was being made. The engine is idle again.
    """
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
