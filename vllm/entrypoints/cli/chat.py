"""Talk to a model, or ask it one thing.

In a terminal it asks for messages, and shows each answer while it is generated. With --message, or with stdin from a
pipe or file, it answers that one message as plain text. With --url a running server answers; no model is loaded.

example: vllm chat --message "What is the capital of France?" --temperature 0
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.cli.dialogue import add_message_argument, answer_once, converse, single_message
from vllm.entrypoints.cli.generation import (
    add_engine_arguments,
    add_sampling_arguments,
    load_engine,
    sampling_params,
    stream,
)
from vllm.entrypoints.cli.server_flags import add_server_arguments, check_server_arguments
from vllm.exceptions import CliError
from vllm.scoring.files import read_text

if TYPE_CHECKING:
    from vllm.entrypoints.cli.generation_server import ServedModel

Messages = list[dict[str, Any]]
Reply = Callable[[Messages], Iterator[str]]
"""The answer to the messages so far, piece by piece."""

NAME = "chat"
HELP = "talk to a model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `vllm chat`, the engine's among them."""
    add_message_argument(parser, "--message", "message")
    parser.add_argument("--system-prompt", metavar="TEXT", help="a system message that goes before all others")
    parser.add_argument(
        "--chat-template", metavar="FILE", type=Path, help="a Jinja template in place of the model's own"
    )
    add_sampling_arguments(parser, max_tokens=None)
    add_server_arguments(parser)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Answer one message, or converse.

    Raises:
        CliError: an argument, the model or the server cannot be used.
        VLLMValidationError: a sampling flag or the single message cannot be honoured.
    """
    check_server_arguments(args, sent=("model", "seed"))
    sampling_params(args)  # a bad value should be known before the model loads
    template = None if args.chat_template is None else read_text(args.chat_template)
    message = single_message(args)
    if args.url is None:
        return _talk(args, message, *_local_model(args, template))
    from vllm.entrypoints.cli.generation_server import ServedModel

    with ServedModel(args) as model:
        return _talk(args, message, model.name, _served_model(model, template))


def _talk(args: argparse.Namespace, message: str | None, name: str, reply: Reply) -> int:
    conversation = Conversation(reply, args.system_prompt)
    if message is not None:
        return answer_once(conversation.answer, message)
    commands = {"/reset": ("forget the conversation", conversation.reset)}
    return converse(f"chat with {name}", conversation.answer, commands)


def _local_model(args: argparse.Namespace, template: str | None) -> tuple[str, Reply]:
    """Name and replies of the model that the flags describe."""
    engine = load_engine(args)
    if engine.tokenizer is None:
        raise CliError("--skip-tokenizer-init: there is no chat without a tokenizer")
    params = sampling_params(args, engine.model_config.default_sampling_params)

    def reply(messages: Messages) -> Iterator[str]:
        from vllm.entrypoints.chat import render_conversations

        (prompt,) = render_conversations(messages, engine.tokenizer, chat_template=template)
        return stream(engine, prompt, params)

    return Path(engine.model_config.model).name, reply


def _served_model(model: ServedModel, template: str | None) -> Reply:
    options = {} if template is None else {"chat_template": template}
    return lambda messages: model.stream("/v1/chat/completions", {"messages": messages, **options})


class Conversation:
    """A conversation so far, which each answer is made from and added to."""

    def __init__(self, reply: Reply, system_prompt: str | None) -> None:
        self._reply = reply
        self._beginning = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        self.messages: Messages = []
        self.reset()

    def reset(self) -> None:
        """Forget all messages but the system's."""
        self.messages = list(self._beginning)

    def answer(self, text: str) -> Iterator[str]:
        """The answer to a further message, piece by piece. A message that fails leaves no trace.

        Raises:
            VLLMValidationError: the template refuses the conversation, or it is too long.
            RuntimeError: the model failed on it.
            CliError: a server refuses it, or is away.
            KeyboardInterrupt: Ctrl-C; the answer so far counts as the answer.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        pieces: list[str] = []
        try:
            for piece in self._reply(messages):
                pieces.append(piece)
                yield piece
        except (KeyboardInterrupt, GeneratorExit):
            self._keep(messages, pieces)
            raise
        self._keep(messages, pieces)

    def _keep(self, messages: Messages, pieces: list[str]) -> None:
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
