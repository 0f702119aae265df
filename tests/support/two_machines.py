"""Two machines for the tests: network namespaces, joined by a link that can be slow, lossy or cut."""

from __future__ import annotations

import fcntl
import heapq
import json
import math
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_MAX_PACKET_BYTES = 65536


class TwoMachines:
    """Machine 0 and machine 1, and the wire between them: a process that passes packets on, and that ends all which
    runs on the machines when this one ends.

    Attributes:
        addresses: by machine.
        folder: a path at which each machine has a folder of its own; all else of the file system is shared.
    """

    def __init__(self) -> None:
        self.names = [f"vllm-{os.getpid()}-{machine}" for machine in range(2)]
        # Sockets are made in it, whose paths must be short.
        self.folder = tempfile.mkdtemp(prefix="vt", dir="/tmp")
        self.addresses = ["10.213.7.1", "10.213.7.2"]
        command = [sys.executable, __file__, *self.names, *self.addresses, self.folder]
        self._wire = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self._wire.stdout is not None
        if self._wire.stdout.readline() != "ready\n":
            self.close()
            pytest.skip("network namespaces cannot be joined here")

    def link(
        self,
        delay_seconds: float = 0.0,
        loss: float = 0.0,
        is_cut: bool = False,
        bytes_a_second: float = math.inf,
    ) -> None:
        """Set what happens to packets from here on, in each direction."""
        assert self._wire.stdin is not None and self._wire.stdout is not None
        self._wire.stdin.write(json.dumps([delay_seconds, loss, is_cut, bytes_a_second]) + "\n")
        self._wire.stdin.flush()
        assert self._wire.stdout.readline() == "ready\n"

    def command(self, machine: int, *arguments: str) -> list[str]:
        """A command that runs on a machine."""
        private = ["sh", "-c", 'mount --bind "$0" "$1" && shift && exec "$@"', f"{self.folder}-{machine}", self.folder]
        return ["ip", "netns", "exec", self.names[machine], *private, *arguments]

    def kill(self, machine: int) -> None:
        """End all processes of a machine at once."""
        _kill_all(self.names[machine])

    def close(self) -> None:
        """End all that runs on the machines, and the machines."""
        assert self._wire.stdin is not None
        with suppress(BrokenPipeError):
            self._wire.stdin.close()
        self._wire.wait(60)


def why_not() -> str:
    """Why there can be no machines here; empty: they can be made."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces are made by root, on Linux"
    if not shutil.which("ip"):
        return "iproute2 is not installed"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    return ""


@contextmanager
def two_machines() -> Iterator[TwoMachines]:
    """Skips the test, with the reason, where they cannot be made."""
    if reason := why_not():
        pytest.skip(reason)
    machines = TwoMachines()
    try:
        yield machines
    finally:
        machines.close()


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def _kill_all(name: str) -> None:
    while pids := _ip("netns", "pids", name).split():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)


def _make(name: str, address: str, peer: str) -> int:
    """Make a machine; returns the descriptor where its packets come and go."""
    _ip("netns", "add", name)
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    # A device stays connected to the descriptor wherever it is moved.
    device = f"vt{os.getpid() % 10**7}-{name[-1]}"
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH", device.encode(), _IFF_TUN | _IFF_NO_PI))
    _ip("link", "set", device, "netns", name)
    _ip("-n", name, "link", "set", "lo", "up")
    _ip("-n", name, "address", "add", address, "peer", peer, "dev", device)
    # Larger packets cost who passes them on less.
    _ip("-n", name, "link", "set", device, "mtu", "9000", "up")
    return descriptor


class _Wire:
    def __init__(self, ends: list[int]) -> None:
        self._other = {ends[0]: ends[1], ends[1]: ends[0]}
        self._delay, self._loss, self._is_cut, self._rate = 0.0, 0.0, False, math.inf
        self._sent_at = dict.fromkeys(ends, 0.0)  # when the last packet for an end has left
        self._random = random.Random(0)
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._count = 0

    def run(self) -> None:
        """Pass packets on until standard input ends."""
        commands = b""
        while True:
            ready = select.select([0, *self._other], [], [], self._deliver())[0]
            for end in ready:
                if end:
                    self._take(end)
                    continue
                received = os.read(0, 4096)
                if not received:
                    return
                *lines, commands = (commands + received).split(b"\n")
                for line in lines:
                    self._delay, self._loss, self._is_cut, self._rate = json.loads(line)
                    print("ready", flush=True)

    def _take(self, end: int) -> None:
        with suppress(BlockingIOError):
            while packet := os.read(end, _MAX_PACKET_BYTES):
                if self._is_cut or self._random.random() < self._loss:
                    continue
                self._count += 1
                other = self._other[end]
                # One after another, each for as long as its bytes take.
                self._sent_at[other] = max(time.monotonic(), self._sent_at[other]) + len(packet) / self._rate
                entry = (self._sent_at[other] + self._delay, self._count, other, packet)
                heapq.heappush(self._under_way, entry)

    def _deliver(self) -> float | None:
        """Deliver what is due; returns the seconds until the next packet is."""
        while self._under_way:
            left = self._under_way[0][0] - time.monotonic()
            if left > 0:
                return left
            _, _, end, packet = heapq.heappop(self._under_way)
            with suppress(OSError):
                os.write(end, packet)
        return None


def _main(names: list[str], addresses: list[str], folder: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folders = [folder, *(f"{folder}-{machine}" for machine in range(2))]
    made: list[str] = []
    try:
        for each in folders[1:]:
            os.mkdir(each)
        ends = []
        for machine, name in enumerate(names):
            made.append(name)
            ends.append(_make(name, addresses[machine], addresses[1 - machine]))
        print("ready", flush=True)
        _Wire(ends).run()
    finally:
        for name in made:
            with suppress(subprocess.CalledProcessError):
                _kill_all(name)
                _ip("netns", "delete", name)
        for each in folders:
            shutil.rmtree(each, ignore_errors=True)


if __name__ == "__main__":
    _main(sys.argv[1:3], sys.argv[3:5], sys.argv[5])
