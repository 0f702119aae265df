"""The log of what was generated (--enable-log-outputs)."""

from __future__ import annotations

from collections import defaultdict

from vllm.logger import init_logger
from vllm.outputs import RequestOutput
from vllm.server.state import ServerState

logger = init_logger(__name__)


class OutputLog:
    """Logs each sequence of a request when it is finished; of a stream the pieces are put together."""

    def __init__(self, state: ServerState, answer_id: str) -> None:
        self._is_on = state.args.enable_log_outputs
        self._longest = state.args.max_log_len
        self._id = answer_id
        self.note: str | None = None  # what is to be said of the answer
        self._texts: dict[tuple[int, int], str] = defaultdict(str)
        self._token_ids: dict[tuple[int, int], list[int]] = defaultdict(list)

    def add(self, index: int, output: RequestOutput) -> None:
        """Take an output of prompt `index`."""
        if not self._is_on:
            return
        for completion in output.outputs:
            key = index, completion.index
            self._texts[key] += completion.text
            self._token_ids[key] += completion.token_ids
            if completion.finish_reason is None:
                continue
            text, ids = self._texts.pop(key), self._token_ids.pop(key)
            name = f"{self._id}-{index}-{completion.index}"
            shown = text[: self._longest], ids[: self._longest]
            note = f" ({self.note})" if self.note else ""
            logger.info("output %s: %r, ids %s of %d, %s%s", name, *shown, len(ids), completion.finish_reason, note)
