"""When an engine core counts as hanging: it has requests, and finishes no step."""

from __future__ import annotations

_NUM_LOOKS = 20


class HangClock:
    """Is told at regular times how a core fares, and says when that has got on with nothing for too long.

    It counts looks instead of reading a clock: while this process is stopped or its loop is busy, what the core has
    sent waits to be taken, and only one look goes by.

    Args:
        timeout_seconds: of the core's silence; it may take a tenth more to be noticed.

    Attributes:
        seconds_between_looks: how often to look.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.seconds_between_looks = timeout_seconds / _NUM_LOOKS
        self._num_messages: int | None = None
        self._num_silent_looks = 0

    def look(self, num_messages: int, has_requests: bool) -> bool:
        """Whether the core hangs.

        Args:
            num_messages: that it has sent so far; it sends one after every step, whatever that gave.
            has_requests: it has something to do. One without is never late.
        """
        # From one look with requests to the next: those that came in between had less time than that.
        seen = num_messages if has_requests else None
        is_silent = seen is not None and seen == self._num_messages
        self._num_silent_looks = self._num_silent_looks + 1 if is_silent else 0
        self._num_messages = seen
        return self._num_silent_looks >= _NUM_LOOKS
