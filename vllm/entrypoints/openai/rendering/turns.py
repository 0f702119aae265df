"""How long work shares an event loop: in pieces of a few milliseconds, one piece each time the loop goes round.

Pieces of several requests follow one another instead of adding up, so that whoever only needs a moment gets it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from weakref import WeakKeyDictionary

ENTRIES_A_TURN = 2048
"""So many tokens' entries are made in a piece: one or two milliseconds."""


class _Turnstile:
    """Lets one waiting task pass each time the loop goes round."""

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for the turn."""
        turn = loop.create_future()
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            loop.call_soon(self._admit, loop)
        await turn

    def _admit(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # its task was not cancelled
                turn.set_result(None)
                break
        if self._waiting:
            loop.call_soon(self._admit, loop)


_turnstiles: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turnstile] = WeakKeyDictionary()


async def turn() -> None:
    """Wait until a piece of long work may be done: now, and up to the caller's next wait."""
    loop = asyncio.get_running_loop()
    turnstile = _turnstiles.get(loop)
    if turnstile is None:
        turnstile = _turnstiles[loop] = _Turnstile()
    await turnstile.wait(loop)


class Turns:
    """Takes a turn whenever enough entries have come together for a piece."""

    def __init__(self) -> None:
        self._num_entries = 0

    async def take(self, num_entries: int) -> None:
        """Count entries that are about to be made."""
        self._num_entries += num_entries
        if self._num_entries >= ENTRIES_A_TURN:
            self._num_entries = 0
            await turn()
