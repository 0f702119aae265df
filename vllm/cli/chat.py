"""Talk to a model, or ask it one thing.

In a terminal it asks for messages, and shows each answer while it is generated. With --message, or with stdin from a
pipe or file, it answers that one message as plain text. With --url a running server answers; no model is loaded.

example: vllm chat --message "What is the capital of France?" --temperature 0
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm.cli.dialogue import add_message_argument, answer_once, checked_message, converse
from vllm.cli.generation import LocalModel, ServedModel, add_generation_arguments, open_model
from vllm.scoring.files import read_text

NAME = "chat"
HELP = "talk to a model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_message_argument(parser, "--message", "message")
    parser.add_argument("--system-prompt", metavar="TEXT", help="a system message that goes before all others")
    template = "a Jinja template in place of the model's own"
    parser.add_argument("--chat-template", metavar="FILE", type=Path, help=template)
    add_generation_arguments(parser, max_tokens=None)


def run(args: argparse.Namespace) -> int:
    message = checked_message(args)
    template = None if args.chat_template is None else read_text(args.chat_template)
    with open_model(args) as model:
        conversation = Conversation(model, template, args.system_prompt)
        if message is not None:
            return answer_once(conversation.answer, message)
        commands = {"/reset": ("forget the conversation", conversation.reset)}
        return converse(f"chat with {model.model_name}", conversation.answer, commands)


class Conversation:
    """The messages so far; each answer continues them."""

    def __init__(self, model: LocalModel | ServedModel, template: str | None, system_prompt: str | None) -> None:
        self._model, self._template = model, template
        self._beginning = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        self.messages: list[dict[str, Any]] = []
        self.reset()

    def reset(self) -> None:
        self.messages = list(self._beginning)

    def answer(self, text: str) -> Iterator[str]:
        """The answer to a further message, piece by piece. A message that fails is not kept; after Ctrl-C the pieces so
        far count as the answer. For errors see LocalModel and ServedModel."""
        messages = [*self.messages, {"role": "user", "content": text}]
        pieces: list[str] = []
        try:
            for piece in self._model.chat(messages, self._template):
                pieces.append(piece)
                yield piece
        except (KeyboardInterrupt, GeneratorExit):
            self._keep(messages, pieces)
            raise
        self._keep(messages, pieces)

    def _keep(self, messages: list[dict[str, Any]], pieces: list[str]) -> None:
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
