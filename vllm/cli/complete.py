"""Let a model continue a text.

In a terminal it asks for texts, and shows what follows each while it is generated. With --prompt, or with stdin from a
pipe or file, it continues that one text and prints the continuation as plain text. With --url a running server
continues it; no model is loaded.

example: vllm complete --prompt "The capital of France is" --max-tokens 8
"""

from __future__ import annotations

import argparse

from vllm.cli.dialogue import add_message_argument, answer_once, checked_message, converse
from vllm.cli.generation import add_generation_arguments, open_model

NAME = "complete"
HELP = "let a model continue a text"
_MAX_TOKENS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_message_argument(parser, "--prompt", "prompt")
    add_generation_arguments(parser, max_tokens=_MAX_TOKENS)


def run(args: argparse.Namespace) -> int:
    message = checked_message(args)
    with open_model(args) as model:
        if message is not None:
            return answer_once(model.complete, message)
        return converse(f"texts continued by {model.model_name}", model.complete, {})
