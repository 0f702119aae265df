"""Let a model continue a text.

In a terminal it asks for texts, and shows what follows each while it is generated. With --prompt, or with stdin from a
pipe or file, it continues that one text and prints the continuation as plain text.

example: vllm complete --prompt "The capital of France is" --max-tokens 8
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from vllm.entrypoints.cli.dialogue import add_message_argument, answer_once, converse, single_message
from vllm.entrypoints.cli.errors import CliError
from vllm.entrypoints.cli.generation import (
    add_engine_arguments,
    add_sampling_arguments,
    load_engine,
    sampling_params,
    stream,
)

NAME = "complete"
HELP = "let a model continue a text"
_MAX_TOKENS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `vllm complete`, the engine's among them."""
    add_message_argument(parser, "--prompt", "prompt")
    add_sampling_arguments(parser, max_tokens=_MAX_TOKENS)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Continue one text, or each that is typed.

    Raises:
        CliError: an argument or the model cannot be used.
        VLLMValidationError: a sampling flag or the single text cannot be honoured.
    """
    sampling_params(args)  # a bad value should be known before the model loads
    message = single_message(args)
    engine = load_engine(args)
    if engine.tokenizer is None:
        raise CliError("--skip-tokenizer-init: a text cannot be continued without a tokenizer")
    params = sampling_params(args, engine.model_config.hf_config.default_sampling_params)

    def answer(text: str) -> Iterator[str]:
        return stream(engine, text, params)

    if message is not None:
        return answer_once(answer, message)
    return converse(f"texts continued by {Path(engine.model_config.model).name}", answer, {})
