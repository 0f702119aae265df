"""Let a model continue a text.

In a terminal it asks for texts, and shows what follows each while it is generated. With --prompt, or with stdin from a
pipe or file, it continues that one text and prints the continuation as plain text. With --url a running server
continues it; no model is loaded.

example: vllm complete --prompt "The capital of France is" --max-tokens 8
"""

from __future__ import annotations

import argparse
from pathlib import Path

from vllm.entrypoints.cli.dialogue import Answer, add_message_argument, answer_once, converse, single_message
from vllm.entrypoints.cli.generation import (
    add_engine_arguments,
    add_sampling_arguments,
    load_engine,
    sampling_params,
    stream,
)
from vllm.entrypoints.cli.server_flags import add_server_arguments, check_server_arguments
from vllm.exceptions import CliError

NAME = "complete"
HELP = "let a model continue a text"
_MAX_TOKENS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `vllm complete`, the engine's among them."""
    add_message_argument(parser, "--prompt", "prompt")
    add_sampling_arguments(parser, max_tokens=_MAX_TOKENS)
    add_server_arguments(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Continue one text, or each that is typed.

    Raises:
        CliError: an argument, the model or the server cannot be used.
        VLLMValidationError: a sampling flag or the single text cannot be honoured.
    """
    check_server_arguments(args, sent=("model", "seed"))
    sampling_params(args)  # a bad value should be known before the model loads
    message = single_message(args)
    if args.url is None:
        return _continue(message, *_local_model(args))
    from vllm.entrypoints.cli.generation_server import ServedModel

    with ServedModel(args) as model:
        return _continue(message, model.name, lambda text: model.stream("/v1/completions", {"prompt": text}))


def _continue(message: str | None, name: str, answer: Answer) -> int:
    if message is not None:
        return answer_once(answer, message)
    return converse(f"texts continued by {name}", answer, {})


def _local_model(args: argparse.Namespace) -> tuple[str, Answer]:
    """Name and answers of the model that the flags describe."""
    engine = load_engine(args)
    if engine.tokenizer is None:
        raise CliError("--skip-tokenizer-init: a text cannot be continued without a tokenizer")
    params = sampling_params(args, engine.model_config.default_sampling_params)
    return Path(engine.model_config.model).name, lambda text: stream(engine, text, params)
