"""A message as it grows, and the events that say so, in Anthropic's order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from vllm.answers.events import CallArguments, CallEnd, CallStart, Content, Reasoning
from vllm.answers.syntax.typed_values import loaded
from vllm.server.serving.generation.chat_steps import Step

Event = dict[str, Any]

_STOP_REASONS = {"length": "max_tokens", "tool_calls": "tool_use"}


class MessageWriter:
    """Takes an answer's steps. `message` is what is answered, complete after `end`."""

    def __init__(self, name: str, model: str) -> None:
        self.message: dict[str, Any] = {
            "id": name,
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._fields: dict[str, Any] = {}  # of our own
        self._open: dict[str, Any] | None = None
        self._arguments = ""
        self._last: Step | None = None

    def begin(self, usage: dict[str, Any]) -> list[Event]:
        """The events before those of the first step, which has the counts of the prompt."""
        start = {"type": "message_start", "message": {**self.message, "content": [], "usage": usage}}
        return [start, {"type": "ping"}]

    def take(self, step: Step) -> list[Event]:
        """The events of a step."""
        for name, value in step.fields.items():
            known = self._fields.get(name)
            if isinstance(known, list) and isinstance(value, list):
                known.extend(value)
            else:
                self._fields[name] = value
        if step.logprobs is not None:
            content = self._fields.setdefault("logprobs", {"content": [], "refusal": None})["content"]
            content.extend(step.logprobs)
        self._last = step
        events: list[Event] = []
        for each in step.events:
            events += self._EVENTS[each.kind](self, each)
        return events

    def end(self, usage: dict[str, Any], is_cut_by_context: bool, **fields: Any) -> list[Event]:
        """The events after the last step.

        Args:
            is_cut_by_context: the context has no room for as many tokens as were asked for.
            fields: further ones of the message.
        """
        events = self._closed()
        assert self._last is not None
        reason, stop = _STOP_REASONS.get(self._last.finish_reason or "", "end_turn"), None
        if reason == "end_turn" and isinstance(self._last.stop_reason, str) and self._last.finish_reason == "stop":
            reason, stop = "stop_sequence", self._last.stop_reason
        elif reason == "max_tokens" and is_cut_by_context:
            reason = "model_context_window_exceeded"
        ended = {"stop_reason": reason, "stop_sequence": stop}
        own = {**self._fields, **fields}
        self.message |= {**ended, "usage": usage, **own}
        return [*events, {"type": "message_delta", "delta": ended, "usage": usage, **own}, {"type": "message_stop"}]

    def _content(self, event: Content) -> list[Event]:
        return self._text("text", "text", event.text) if event.text else []

    def _reasoning(self, event: Reasoning) -> list[Event]:
        return self._text("thinking", "thinking", event.text) if event.text else []

    def _text(self, kind: str, name: str, text: str) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open["type"] != kind:
            signature = {"signature": ""} if kind == "thinking" else {}
            events = [*self._closed(), *self._opened({"type": kind, name: "", **signature})]
        assert self._open is not None
        self._open[name] += text
        return [*events, self._delta({"type": f"{kind}_delta", name: text})]

    def _call_start(self, event: CallStart) -> list[Event]:
        self._arguments = ""
        return [*self._closed(), *self._opened({"type": "tool_use", "id": event.id, "name": event.name, "input": {}})]

    def _call_arguments(self, event: CallArguments) -> list[Event]:
        self._arguments += event.text
        return [self._delta({"type": "input_json_delta", "partial_json": event.text})]

    def _call_end(self, event: CallEnd) -> list[Event]:
        return self._closed()

    _EVENTS: ClassVar[dict[str, Callable[[MessageWriter, Any], list[Event]]]] = {
        "content": _content,
        "reasoning": _reasoning,
        "call_start": _call_start,
        "call_arguments": _call_arguments,
        "call_end": _call_end,
    }

    def _opened(self, block: dict[str, Any]) -> list[Event]:
        self._open = block
        self.message["content"].append(block)
        return [{"type": "content_block_start", "index": self._index, "content_block": dict(block)}]

    def _closed(self) -> list[Event]:
        """The end of the open block, if there is one."""
        block, self._open = self._open, None
        if block is None:
            return []
        if block["type"] == "tool_use":
            block["input"] = _object(self._arguments)
        return [{"type": "content_block_stop", "index": self._index}]

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    @property
    def _index(self) -> int:
        return len(self.message["content"]) - 1


def _object(arguments: str) -> dict[str, Any]:
    """The arguments of a call; those that were cut short are kept as a text, if there is any."""
    if not arguments:
        return {}
    try:
        found = loaded(arguments)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": arguments}
