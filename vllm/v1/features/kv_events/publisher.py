"""Publishes batches of events over zmq, and repeats those that a subscriber has missed."""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections import deque
from typing import Any

import msgspec
import zmq

from vllm.config.kv_events import KVEventsConfig
from vllm.logger import init_logger, warn_once
from vllm.v1.features.kv_events.messages import KVEventBatch

logger = init_logger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
"""In place of a number, after the last batch that is repeated."""
_POLL_MS = 50
_LINGER_MS = 500


class EventPublisher:
    """A thread with the sockets: a message is [topic, number, batch], its number 8 bytes, big-endian, from 0. Who asks
    the second socket with a number, as [b"", number], gets [b"", number, batch] for each batch from there on that is
    still kept, and at last [b"", END, b""]."""

    def __init__(self, config: KVEventsConfig, rank: int = 0) -> None:
        """`rank`: of a replica; endpoints' ports are that much higher. ValueError: a socket cannot have its address."""
        self._waiting: queue.Queue[KVEventBatch | None] = queue.Queue(config.max_queue_size)
        self._topic = config.topic.encode()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=max(config.buffer_steps, 1))
        self._context = zmq.Context()
        self._publish = self._socket(zmq.PUB, config.endpoint, rank, "endpoint")
        self._publish.set_hwm(config.hwm)
        self._repeat = None
        if config.replay_endpoint:
            self._repeat = self._socket(zmq.ROUTER, config.replay_endpoint, rank, "replay_endpoint")
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._waiting, self._thread)

    def _socket(self, kind: int, endpoint: str, rank: int, field: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        address = of_replica(endpoint, rank)
        # A subscriber that gathers from many engines has the address; others come to this one's.
        binds = "*" in address or "::" in address or address.startswith(("ipc://", "inproc://"))
        try:
            (socket.bind if binds or kind == zmq.ROUTER else socket.connect)(address)
        except zmq.ZMQError as error:
            raise ValueError(f"kv_events_config: {field}={endpoint!r} cannot be used: {error}") from error
        return socket

    def publish(self, batch: KVEventBatch) -> None:
        """Send a batch soon. Beyond max_queue_size it is dropped, and its number with it."""
        try:
            self._waiting.put_nowait(batch)
        except queue.Full:
            warn_once(logger, "kv_events_config: events are dropped, as more wait than max_queue_size")

    def close(self) -> None:
        """Send what waits, and close the sockets."""
        self._end()

    def _run(self) -> None:
        encoder, number = msgspec.msgpack.Encoder(), 0
        while True:
            if self._repeat is not None and self._repeat.poll(0):
                self._answer(self._repeat)
            try:
                batch = self._waiting.get(timeout=_POLL_MS / 1000)
            except queue.Empty:
                continue
            if batch is None:
                break
            data = encoder.encode(batch)
            self._kept.append((number, data))
            self._publish.send_multipart((self._topic, number.to_bytes(8, "big"), data))
            number += 1
        self._context.destroy(linger=_LINGER_MS)

    def _answer(self, socket: zmq.Socket[bytes]) -> None:
        frames: list[Any] = socket.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            warn_once(logger, "kv_events_config: a request for a replay must be an empty frame and 8 bytes")
            return
        client, first = frames[0], int.from_bytes(frames[2], "big")
        with contextlib.suppress(zmq.ZMQError):
            for number, data in self._kept:
                if number >= first:
                    socket.send_multipart((client, b"", number.to_bytes(8, "big"), data))
            socket.send_multipart((client, b"", END, b""))


def of_replica(endpoint: str, rank: int) -> str:
    """The endpoint of a replica: its port is higher by the rank, or its name ends with it."""
    if not rank:
        return endpoint
    head, colon, port = endpoint.rpartition(":")
    if endpoint.startswith("tcp://") and port.isdigit():
        return f"{head}{colon}{int(port) + rank}"
    return f"{endpoint}_dp{rank}"


def _end(waiting: queue.Queue[KVEventBatch | None], thread: threading.Thread) -> None:
    with contextlib.suppress(queue.Full):
        waiting.put(None, timeout=1)
    thread.join(2)
