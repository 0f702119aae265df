"""A response as it grows, and the events that say so, in OpenAI's order."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import accumulate
from typing import Any, ClassVar

from vllm.answers.events import CallArguments, CallEnd, CallStart, Content, Reasoning
from vllm.server.serving.generation.chat_steps import Step
from vllm.server.serving.responses.input_items import new_id

Event = dict[str, Any]

_STATUSES = {"stop": "completed", "tool_calls": "completed", "repetition": "completed", "abort": "cancelled"}


class ResponseWriter:
    """Takes an answer's steps. `response` is what is answered, complete after `end`."""

    def __init__(self, head: dict[str, Any]) -> None:
        """`head`: the response's fields, without status and output."""
        self.response: dict[str, Any] = {**head, "status": "in_progress", "output": []}
        self._number = 0
        self._open: dict[str, Any] | None = None  # the item that grows, the last one
        self._new_logprobs: list[dict[str, Any]] = []  # of tokens whose text is still to come
        self._is_followed = False
        self._finish_reason: str | None = None
        self._stop_reason: int | str | None = None

    def begin(self) -> list[Event]:
        """The events before the first step."""
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response={**self.response, "output": []}) for kind in kinds]

    def take(self, step: Step) -> list[Event]:
        """The events of a step."""
        self._new_logprobs += [each for each in step.logprobs or () if each.get("part", "content") == "content"]
        for name, value in step.fields.items():
            known = self.response.get(name)
            if isinstance(known, list) and isinstance(value, list):
                known.extend(value)
            else:
                self.response[name] = value
        events: list[Event] = []
        for index, each in enumerate(step.events):
            # Tokens of a call that is known already are none of the text's.
            self._is_followed = any(isinstance(later, CallStart) for later in step.events[index + 1 :])
            events += self._EVENTS[each.kind](self, each)
        if step.finish_reason is not None:
            self._finish_reason, self._stop_reason = step.finish_reason, step.stop_reason
        return events

    def end(self, usage: dict[str, Any], **fields: Any) -> list[Event]:
        """The events after the last step; `fields` are further ones of the response."""
        events = [] if self.response["output"] else self._opened("message")
        if self._open is not None and self._open["type"] == "message":
            self._part()["logprobs"] += self._new_logprobs
        status = _STATUSES.get(self._finish_reason or "", "incomplete")
        events += self._closed("completed" if status == "completed" else "incomplete")
        self.response |= {**fields, "status": status, "usage": usage}
        if self._stop_reason is not None:
            self.response["stop_reason"] = self._stop_reason
        if status == "completed":
            self.response["completed_at"] = int(time.time())
        elif status == "incomplete":
            reason = "max_output_tokens" if self._finish_reason == "length" else str(self._stop_reason)
            self.response["incomplete_details"] = {"reason": reason}
        kind = "response.completed" if status == "completed" else "response.incomplete"
        return [*events, self._event(kind, response=dict(self.response))]

    def fail(self, message: str) -> list[Event]:
        """The event of an error after the first one."""
        error = {"code": "server_error", "message": message}
        return [self._event("response.failed", response={**self.response, "status": "failed", "error": error})]

    @property
    def reasoning_text(self) -> str:
        """All of it."""
        items = (item for item in self.response["output"] if item["type"] == "reasoning")
        return "".join(part["text"] for item in items for part in item["content"])

    def _content(self, event: Content) -> list[Event]:
        if not event.text:
            return []
        events = self._opened("message")
        part = self._part()
        part["text"] += event.text
        logprobs = self._taken_logprobs(part, event.text)
        delta = self._event("response.output_text.delta", **self._place(), delta=event.text, logprobs=logprobs)
        return [*events, delta]

    def _reasoning(self, event: Reasoning) -> list[Event]:
        if not event.text:
            return []
        events = self._opened("reasoning")
        self._part()["text"] += event.text
        return [*events, self._event("response.reasoning_text.delta", **self._place(), delta=event.text)]

    def _call_start(self, event: CallStart) -> list[Event]:
        events = self._closed("completed")
        item = {"type": "function_call", "id": new_id("fc"), "call_id": event.id, "name": event.name, "arguments": ""}
        return events + self._added(item)

    def _call_arguments(self, event: CallArguments) -> list[Event]:
        if self._open is None:
            return []
        self._open["arguments"] += event.text
        place = self._item_place()
        return [self._event("response.function_call_arguments.delta", **place, delta=event.text)]

    def _call_end(self, event: CallEnd) -> list[Event]:
        # The last one's status follows from how the answer ends.
        return []

    _EVENTS: ClassVar[dict[str, Callable[[ResponseWriter, Any], list[Event]]]] = {
        "content": _content,
        "reasoning": _reasoning,
        "call_start": _call_start,
        "call_arguments": _call_arguments,
        "call_end": _call_end,
    }

    def _opened(self, kind: str) -> list[Event]:
        """Events that end another item and begin one of this kind, if it is not there."""
        if self._open is not None and self._open["type"] == kind:
            return []
        events = self._closed("completed")
        item: dict[str, Any]
        part: dict[str, Any]
        if kind == "message":
            events += self._added({"type": "message", "id": new_id("msg"), "role": "assistant", "content": []})
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"type": "reasoning", "id": new_id("rs"), "summary": [], "content": [], "encrypted_content": None}
            events += self._added(item)
            part = {"type": "reasoning_text", "text": ""}
        assert self._open is not None
        self._open["content"] = [part]
        # Copies: what goes on growing has not been sent yet.
        empty = {**part, "logprobs": []} if kind == "message" else dict(part)
        return [*events, self._event("response.content_part.added", **self._place(), part=empty)]

    def _added(self, item: dict[str, Any]) -> list[Event]:
        self._open = {**item, "status": "in_progress"}
        self.response["output"].append(self._open)
        index = len(self.response["output"]) - 1
        return [self._event("response.output_item.added", output_index=index, item=dict(self._open))]

    def _closed(self, status: str) -> list[Event]:
        """Events that end the open item, if there is one."""
        item = self._open
        if item is None:
            return []
        place = self._item_place()
        events: list[Event] = []
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            events.append(self._event("response.function_call_arguments.done", **place, **done))
        else:
            part = self._part()
            more = {}
            if item["type"] == "message":
                more = {"logprobs": list(part["logprobs"])}
            kind = part["type"]
            events.append(self._event(f"response.{kind}.done", **self._place(), text=part["text"], **more))
            events.append(self._event("response.content_part.done", **self._place(), part=dict(part)))
        item["status"] = status
        done = {"output_index": place["output_index"], "item": dict(item)}
        events.append(self._event("response.output_item.done", **done))
        self._open = None
        return events

    def _taken_logprobs(self, part: dict[str, Any], text: str) -> list[dict[str, Any]]:
        """The logprobs of a piece of a message, without what stands before the message and, if a call follows,
        behind."""
        new, wanted = self._new_logprobs, text.encode()
        ends = list(accumulate(len(each["bytes"] or ()) for each in new))
        joined = b"".join(bytes(each["bytes"] or ()) for each in new)
        # Without parts there are those of reasoning before it.
        start = joined.find(wanted) if new and "part" in new[0] else joined.rfind(wanted)
        first, last = 0, len(new)
        if start >= 0 and len(self.response["output"]) > 1 and not part["logprobs"]:
            first = bisect_right(ends, start)
        if start >= 0 and self._is_followed:
            last = bisect_left(ends, start + len(wanted)) + 1
        taken, self._new_logprobs = new[first:last], new[last:]
        part["logprobs"] += taken
        return taken

    def _part(self) -> dict[str, Any]:
        assert self._open is not None
        return self._open["content"][-1]

    def _item_place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": self._open["id"], "output_index": len(self.response["output"]) - 1}

    def _place(self) -> dict[str, Any]:
        return {**self._item_place(), "content_index": 0}

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event
