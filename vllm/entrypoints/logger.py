"""Requests in the log, for programs that take them themselves."""

from __future__ import annotations

from typing import Any

from vllm.logger import init_logger

logger = init_logger(__name__)


class RequestLogger:
    """Logs what is asked. `vllm serve --enable-log-requests` does it for the server's own."""

    def __init__(self, *, max_log_len: int | None = None) -> None:
        """`max_log_len`: characters of a prompt, or its ids, that are shown; None: all."""
        self.max_log_len = max_log_len

    def log_inputs(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int] | None,
        prompt_embeds: Any,
        params: Any,
        lora_request: Any,
    ) -> None:
        """A line for a request."""
        shown = prompt if prompt is None else prompt[: self.max_log_len]
        ids = prompt_token_ids if prompt_token_ids is None else prompt_token_ids[: self.max_log_len]
        logger.info("request %s: prompt %r, ids %s, %s", request_id, shown, ids, params)

    def log_outputs(
        self,
        request_id: str,
        outputs: str,
        output_token_ids: list[int] | None,
        finish_reason: str | None = None,
        is_streaming: bool = False,
        delta: bool = False,
    ) -> None:
        """A line for an answer, or for a part of one."""
        shown = outputs[: self.max_log_len]
        logger.info("answer %s: %r, finish reason %s", request_id, shown, finish_reason)
