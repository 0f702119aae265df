"""Which part of an answer each read position belongs to."""

from __future__ import annotations

from typing import Any

from vllm.answers.answer import AnswerParser
from vllm.outputs import CompletionOutput
from vllm.server.rendering.token_texts import TokenPieces


class PositionParts:
    """Writes `part` into the positions of a growing choice: reasoning, content or tool_call, where the token begins.
    Positions whose text may still become a marker wait for what comes."""

    def __init__(self, parser: AnswerParser, pieces: TokenPieces) -> None:
        """`pieces`: of the choice's tokens, from its beginning."""
        self._parser, self._pieces = parser, pieces
        self._offsets: list[int] = []
        self._waiting: dict[str, list[dict[str, Any]]] = {}

    def write(self, completion: CompletionOutput, lists: dict[str, list[dict[str, Any]]]) -> None:
        """Mark the positions of `lists`, each of what `completion` adds, in place: those that wait are taken out, and
        stand at the beginning of a later list of that name."""
        if not completion.token_ids or any(len(each) != len(completion.token_ids) for each in lists.values()):
            return
        self._offsets += self._pieces.add(completion.token_ids)[1]
        parts = []
        for offset in self._offsets:
            part = self._parser.part_at(offset)
            if part is None:
                break
            parts.append(part)
        del self._offsets[: len(parts)]
        for name, positions in lists.items():
            known = self._waiting.pop(name, []) + positions
            self._waiting[name] = known[len(parts) :]
            positions[:] = [{**each, "part": part} for each, part in zip(known, parts, strict=False)]
