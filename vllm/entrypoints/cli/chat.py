"""Talk to a model, or ask it one thing.

In a terminal it asks for messages, and shows each answer while it is generated. With --message, or with stdin from a
pipe or file, it answers that one message as plain text.

example: vllm chat --message "What is the capital of France?" --temperature 0
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.entrypoints.cli.dialogue import add_message_argument, answer_once, converse, single_message
from vllm.entrypoints.cli.errors import CliError
from vllm.entrypoints.cli.generation import (
    add_engine_arguments,
    add_sampling_arguments,
    load_engine,
    sampling_params,
    stream,
)
from vllm.entrypoints.cli.score_io import read_text

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

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
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Answer one message, or converse.

    Raises:
        CliError: an argument or the model cannot be used.
        VLLMValidationError: a sampling flag or the single message cannot be honoured.
    """
    sampling_params(args)  # a bad value should be known before the model loads
    template = None if args.chat_template is None else read_text(args.chat_template)
    message = single_message(args)
    engine = load_engine(args)
    if engine.tokenizer is None:
        raise CliError("--skip-tokenizer-init: there is no chat without a tokenizer")
    params = sampling_params(args, engine.model_config.hf_config.default_sampling_params)
    conversation = Conversation(engine, params, args.system_prompt, template)
    if message is not None:
        return answer_once(conversation.answer, message)
    commands = {"/reset": ("forget the conversation", conversation.reset)}
    return converse(f"chat with {Path(engine.model_config.model).name}", conversation.answer, commands)


class Conversation:
    """A conversation so far, which each answer is made from and added to."""

    def __init__(
        self, engine: LLMEngine, params: SamplingParams, system_prompt: str | None, chat_template: str | None
    ) -> None:
        self._engine = engine
        self._params = params
        self._beginning = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
        self._chat_template = chat_template
        self.messages: list[dict[str, Any]] = []
        self.reset()

    def reset(self) -> None:
        """Forget all messages but the system's."""
        self.messages = list(self._beginning)

    def answer(self, text: str) -> Iterator[str]:
        """The answer to a further message, piece by piece. A message that fails leaves no trace.

        Raises:
            VLLMValidationError: the template refuses the conversation, or it is too long.
            RuntimeError: the model failed on it.
            KeyboardInterrupt: Ctrl-C; the answer so far counts as the answer.
        """
        from vllm.entrypoints.chat import render_conversations

        messages = [*self.messages, {"role": "user", "content": text}]
        (prompt,) = render_conversations(messages, self._engine.tokenizer, chat_template=self._chat_template)
        pieces: list[str] = []
        try:
            for piece in stream(self._engine, prompt, self._params):
                pieces.append(piece)
                yield piece
        except KeyboardInterrupt:
            self._keep(messages, pieces)
            raise
        self._keep(messages, pieces)

    def _keep(self, messages: list[dict[str, Any]], pieces: list[str]) -> None:
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
