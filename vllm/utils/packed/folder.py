"""The folder of packed weights: a file an entry, the least recently used ones going first."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm import envs
from vllm.logger import init_logger
from vllm.utils.file_locks import is_locked
from vllm.utils.packed import ahead

logger = init_logger(__name__)

SUFFIX = ".packed"
_LOCK, _TEMPORARY = ".lock", ".part"
# So much of the disk stays free, whatever the bound.
_KEPT_FREE = 0.1
# The default bound, as a part of what is free or ours.
_SHARE = 0.5
_said: set[str] = set()


def say_once(text: str, *values: Any) -> None:
    """A warning, the first time that this process has the reason to give it."""
    if text not in _said:
        _said.add(text)
        logger.warning(text, *values)


@dataclass(frozen=True)
class Entry:
    """A file of packed weights.

    Attributes:
        size: in bytes, on disk.
        used: when an engine last mapped it, in seconds since 1970.
    """

    path: Path
    size: int
    used: float


class PackedFolder:
    """The entries in a folder, which need not exist. `bound_gib`: of all entries together; None: half of the disk that
    is free or theirs. A tenth of the disk always stays free."""

    def __init__(self, path: Path, bound_gib: float | None = None) -> None:
        self.path = path
        self._bound_gib = bound_gib

    def entries(self) -> list[Entry]:
        """From the one that was used last."""
        found = []
        for path in self.path.glob(f"*{SUFFIX}") if self.path.is_dir() else ():
            with contextlib.suppress(OSError):
                stat = path.stat()
                found.append(Entry(path, stat.st_blocks * 512, stat.st_mtime))
        return sorted(found, key=lambda entry: -entry.used)

    @staticmethod
    def name(fingerprint: dict[str, Any]) -> str:
        """The name of the weights of that fingerprint."""
        text = json.dumps(fingerprint, sort_keys=True, default=str).encode()
        return hashlib.sha256(text).hexdigest()[:32]

    def file(self, name: str, part: str) -> Path:
        """Where the weights called so are, if they are there: one of the `part`s that ranks have."""
        return self.path / f"{name}-{part}{SUFFIX}"

    @contextlib.contextmanager
    def locked(self, name: str, wait_seconds: float) -> Iterator[bool]:
        """Keep other processes from packing what is called so. False: another one is at it for longer than that.
        OSError: the folder cannot be written to. What a process that was killed has left is removed."""
        import fcntl

        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(self.path / f"{name}{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            until, is_told = time.monotonic() + wait_seconds, False
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        yield False
                        return
                if not is_told:
                    logger.info("another process packs these weights: waiting for it")
                    is_told = True
                time.sleep(0.05)
            for left in self.path.glob(f"{name}-*{_TEMPORARY}"):
                left.unlink(missing_ok=True)
            yield True
        finally:
            os.close(file)

    def machine(self) -> int:
        """A number below 2**63 that processes have in common which see the same folder on the same machine."""
        parts = [socket.gethostname(), str(self.path.resolve())]
        with contextlib.suppress(OSError):
            parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        return int.from_bytes(hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest(), "big") >> 1

    @staticmethod
    def temporary(path: Path) -> Path:
        """The name of an entry while it is written."""
        return path.with_suffix(_TEMPORARY)

    def check_room(self, path: Path, size: int, written: int) -> None:
        """Make room for an entry of `size` bytes, of which `written` are there, by removing those that were used the
        longest ago. OSError: it is larger than the bound, or the disk too full."""
        usage = shutil.disk_usage(self.path)
        others = [entry for entry in self.entries() if entry.path != path]
        ours = sum(entry.size for entry in others)
        bound = _SHARE * (usage.free + ours + written)
        if self._bound_gib is not None:
            bound = self._bound_gib * 2**30
        if size > bound:
            raise OSError(f"they take more than {bound / 2**30:.2f} GiB, the bound of {self.path}")
        free = usage.free
        while ours + size > bound or free - (size - written) < _KEPT_FREE * usage.total:
            if not others:
                raise OSError(
                    f"the disk of {self.path} has {free / 2**30:.1f} GiB free, of which a tenth of it is kept"
                )
            oldest = others.pop()
            logger.info("removing %s, used the longest ago, to make room", oldest.path.name)
            self.remove(oldest.path)
            ours, free = ours - oldest.size, free + oldest.size

    @staticmethod
    def touch(path: Path) -> None:
        """Note that an entry is used now."""
        with contextlib.suppress(OSError):
            os.utime(path)

    @staticmethod
    def remove(path: Path) -> None:
        """Remove an entry; processes that have mapped it keep its memory."""
        with contextlib.suppress(OSError):
            path.unlink()

    def clear(self) -> list[Entry]:
        """Remove all entries, and what processes that were killed have left."""
        found = self.entries()
        for entry in found:
            self.remove(entry.path)
        for path in self.path.iterdir() if self.path.is_dir() else ():
            if path.suffix in (_LOCK, _TEMPORARY) and not is_locked(path.with_name(_lock_name(path))):
                self.remove(path)
        ahead.forget(self.path)
        return found


def packed_folder(bound_gib: float | None = None) -> PackedFolder | None:
    """The folder that VLLM_PACKED_CACHE names; None: there is to be none."""
    path = envs.packed_cache()
    return None if path is None else PackedFolder(path, bound_gib)


def _lock_name(path: Path) -> str:
    return f"{path.stem.partition('-')[0]}{_LOCK}"
