"""Responses and conversations that later requests may name, in memory, with a bound."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.server.errors import ApiError
from vllm.server.rendering.written_json import encode_parts

Item = dict[str, Any]


@dataclass
class StoredResponse:
    """A finished response.

    Attributes:
        response: as it was answered.
        items: all that it was made from, what it followed included.
    """

    response: dict[str, Any]
    items: list[Item]

    @property
    def context(self) -> list[Item]:
        """The items that the next response follows."""
        return [*self.items, *self.response["output"]]


@dataclass
class Conversation:
    """Items of several responses and clients.

    Attributes:
        head: id, time and metadata.
    """

    head: dict[str, Any]
    items: list[Item] = field(default_factory=list)

    @property
    def context(self) -> list[Item]:
        return list(self.items)


@dataclass
class RunningResponse:
    """A response on its way: what it is so far, how to end it with what it has, and whether it is kept then."""

    response: dict[str, Any]
    cancel: Callable[[], Awaitable[None]]
    keeps: bool = True


class ResponseStore:
    """A store from which the least recently used goes when the bound is reached.

    Args:
        max_bytes: of all entries as JSON, each with the items that it follows. 0: nothing is kept.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._sizes: dict[str, int] = {}
        self._entries: OrderedDict[str, StoredResponse | Conversation] = OrderedDict()
        self._items: dict[str, dict[str, Item]] = {}  # by id, then by entries that have it
        self.running: dict[str, RunningResponse] = {}

    def put(self, name: str, entry: StoredResponse | Conversation) -> None:
        """Keep an entry, or what has become of one. One that is larger than the bound is not kept."""
        self.remove(name)
        own = entry.response if isinstance(entry, StoredResponse) else entry.head
        size = sum(map(len, encode_parts([own, entry.items])))
        if size > self._max_bytes:
            return
        self._entries[name], self._sizes[name] = entry, size
        self._num_bytes += size
        for item in entry.context:
            self._items.setdefault(item["id"], {})[name] = item
        while self._num_bytes > self._max_bytes:
            self.remove(next(iter(self._entries)))

    def renew(self, name: str, entry: StoredResponse | Conversation) -> None:
        """`put` of one that is kept; what has been removed stays away."""
        if self._entries.get(name) is entry:
            self.put(name, entry)

    def remove(self, name: str) -> bool:
        """Whether it was there."""
        entry = self._entries.pop(name, None)
        if entry is None:
            return False
        self._num_bytes -= self._sizes.pop(name)
        for item in entry.context:
            places = self._items.get(item["id"], {})
            places.pop(name, None)
            if not places:
                self._items.pop(item["id"], None)
        return True

    def response(self, name: str, field: str | None = None) -> StoredResponse:
        """Raises ApiError 404 if there is none of that id; `field` is the body's that has it."""
        entry = self._entries.get(name)
        if not isinstance(entry, StoredResponse):
            raise _missing("response", name, field)
        self._entries.move_to_end(name)
        return entry

    def conversation(self, name: str, field: str | None = None) -> Conversation:
        """As `response`."""
        entry = self._entries.get(name)
        if not isinstance(entry, Conversation):
            raise _missing("conversation", name, field)
        self._entries.move_to_end(name)
        return entry

    def item(self, name: str) -> Item | None:
        """The item of that id."""
        return next(iter(self._items.get(name, {}).values()), None)


def _missing(what: str, name: str, field: str | None) -> ApiError:
    shown = name if len(name) < 80 else f"{name[:80]}..."
    message = (
        f"there is no {what} {shown!r} here: the server keeps as many as --response-store-mib holds, in memory, and no "
        "response with store=false"
    )
    return ApiError(404, message, field, f"{what}_not_found")
