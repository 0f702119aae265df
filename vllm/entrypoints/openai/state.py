"""What all endpoints of a server share."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import Request

from vllm.entrypoints.openai.errors import ApiError
from vllm.entrypoints.openai.server_args import ServerArgs
from vllm.exceptions import shown
from vllm.tokenizers.tokenizer import Tokenizer
from vllm.v1.engine.async_llm import AsyncLLM

RETRY_SECONDS = 1
STOPPING_RETRY_SECONDS = 10


@dataclass
class ServerState:
    """A running server.

    Attributes:
        engine: the engine.
        args: the server's own arguments.
        created: when it started, in Unix seconds.
        draining: it is about to stop and takes no new work.
        in_flight: tasks of the requests to the engine's endpoints that are being answered.
    """

    engine: AsyncLLM
    args: ServerArgs = field(default_factory=ServerArgs)
    chat_template: str | None = None
    created: int = field(default_factory=lambda: int(time.time()))
    draining: bool = False
    in_flight: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def num_in_flight(self) -> int:
        """Requests to the engine's endpoints that are being answered."""
        return len(self.in_flight)

    @property
    def model_names(self) -> list[str]:
        """What requests may give as `model`; the first stands in answers. Never a path."""
        return self.args.served_model_name or [Path(self.engine.model_config.model).name]

    @property
    def tokenizer(self) -> Tokenizer:
        """
        Raises:
            ApiError: skip_tokenizer_init left it out.
        """
        if self.engine.tokenizer is None:
            raise ApiError(400, "this server runs without a tokenizer: texts cannot be read or written")
        return self.engine.tokenizer

    @property
    def default_sampling_params(self) -> dict[str, Any]:
        """Sampling fields that requests leave out, where the model has values of its own for them."""
        return self.engine.model_config.default_sampling_params

    @property
    def max_sequences(self) -> int:
        """Sequences that it ever holds at once: those that all replicas run, and those that may wait."""
        config = self.engine.vllm_config
        max_running = config.scheduler_config.max_num_seqs * config.parallel_config.data_parallel_size
        return max_running + self.args.max_num_queued_reqs

    def chat_template_of(self, given: str | None) -> str | None:
        """The template in place of the model's own, if there is one: the request's, or the server's.

        Raises:
            ApiError: the request brings one and may not.
        """
        if given is not None and not self.args.trust_request_chat_template:
            raise ApiError(
                400,
                "chat_template: a template is a program, and this server runs those of requests only with "
                "--trust-request-chat-template",
                param="chat_template",
                code="unsupported_field",
            )
        return given or self.chat_template

    def check_model(self, name: str | None) -> str:
        """The model's name as answers show it.

        Raises:
            ApiError: 404, no such model is here.
        """
        if name is not None and name not in self.model_names:
            raise ApiError(
                404,
                f"there is no model {shown(name)} here; there is {', '.join(map(repr, self.model_names))}",
                param="model",
                code="model_not_found",
            )
        return self.model_names[0] if name is None else name

    def stopping_error(self) -> ApiError:
        """What requests are told that come too late, or are cut short."""
        return ApiError(503, "the server is shutting down", code="shutting_down", retry_after=STOPPING_RETRY_SECONDS)

    def check_accepting(self) -> None:
        """
        Raises:
            ApiError: 503, the server takes no new work.
        """
        if self.draining:
            raise self.stopping_error()

    def check_capacity(self, num_sequences: int) -> None:
        """Whether so many further sequences may queue.

        Raises:
            ApiError: 503, the server stops; 429, the queue is full; 400, they are more than it ever holds.
        """
        self.check_accepting()
        limit = self.max_sequences
        if num_sequences > limit:
            raise ApiError(
                400,
                f"the request asks for {num_sequences} sequences (n or best_of of each prompt), and the server holds "
                f"{limit} at once (--max-num-seqs and --max-num-queued-reqs)",
                code="too_many_sequences",
            )
        if num_sequences > limit - self.engine.num_unfinished_sequences:
            raise ApiError(
                429,
                f"too many requests: {num_sequences} more sequences would exceed the queue's limit of "
                f"{self.args.max_num_queued_reqs} (--max-num-queued-reqs)",
                code="overloaded",
                retry_after=RETRY_SECONDS,
            )

    def check_count(self, count: int, field_name: str) -> None:
        """
        Raises:
            ApiError: a request has more prompts (items, conversations) than may come at once.
        """
        limit = self.args.max_prompts_per_request
        if count > limit:
            raise ApiError(
                400,
                f"{field_name} has {count} entries, more than the limit of {limit} (--max-prompts-per-request)",
                param=field_name,
                code="too_many_prompts",
            )


def server_state(request: Request) -> ServerState:
    """The state of the server that got `request`."""
    return request.app.state.server
