"""A rest that a message ends."""

from __future__ import annotations

import contextlib
import socket

import zmq

from vllm.v1.core.rest import Rest

_MANY = 4096


class RestWithMessages(Rest):
    """Ends also where `messages` has one, which is not taken."""

    def __init__(self, messages: zmq.Socket[bytes]) -> None:
        self._woken_here, self._waking = socket.socketpair()
        for each in (self._woken_here, self._waking):
            each.setblocking(False)
        self._poller = zmq.Poller()
        for source in (messages, self._woken_here):
            self._poller.register(source, zmq.POLLIN)

    def __call__(self, seconds: float) -> None:
        self._poller.poll(round(seconds * 1000))
        with contextlib.suppress(BlockingIOError):
            self._woken_here.recv(_MANY)

    def wake(self, _: object = None) -> None:
        # Where so many bytes are there that no more fit, the next rest ends at once, too.
        with contextlib.suppress(OSError):
            self._waking.send(b"\0")
