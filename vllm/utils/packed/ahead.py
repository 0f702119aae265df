"""Packed weights are read from the disk while a program imports what it needs.

A program is known by its command line and folder. What it mapped the last time is read as soon as it asks for an
engine, seconds before its configuration says which weights these will be; if they are others, reading ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
from pathlib import Path

from vllm import envs

_STARTS = "starts.json"
# Programs that are known: those that started last.
_MOST = 256
# Bytes that are read between two looks whether to end. Imports wait for them, as they map libraries meanwhile.
_STEP = 1 << 23
_program: str | None = None
_reading: tuple[str, threading.Event] | None = None


def program() -> str:
    """The name of this program: that of the one that started it, where `act_for` gave it."""
    if _program is not None:
        return _program
    text = json.dumps([sys.orig_argv, os.getcwd()])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def act_for(name: str) -> None:
    """Note starts of this process as those of the program `name`, which read ahead for it."""
    global _program
    _program = name


def begin() -> None:
    """Read what this program mapped the last time, in a thread. The first call alone has an effect."""
    global _reading
    if _reading is not None:
        return
    with contextlib.suppress(OSError, ValueError):
        folder = envs.packed_cache()
        name = None if folder is None else _known(folder).get(program())
        if folder is None or name is None:
            return
        paths = sorted(folder.glob(f"{name}-*.packed"))
        _reading = name, threading.Event()
        threading.Thread(target=_read, args=(paths, _reading[1]), name="reading-ahead", daemon=True).start()


def end_unless(name: str) -> None:
    """Read nothing more, unless it is of the weights `name`."""
    if _reading is not None and _reading[0] != name:
        _reading[1].set()


def note(folder: Path, name: str) -> None:
    """Remember for the next start that this program maps the weights `name`. OSError is not raised: nothing is lost."""
    with contextlib.suppress(OSError):
        known = _known(folder)
        if known.pop(program(), None) == name and len(known) < _MOST:
            return
        known[program()] = name
        temporary = folder / f"{_STARTS}.{os.getpid()}"
        temporary.touch(0o600)
        temporary.write_text(json.dumps(dict(list(known.items())[-_MOST:])))
        os.replace(temporary, folder / _STARTS)


def forget(folder: Path) -> None:
    """Forget all programs."""
    for path in folder.glob(f"{_STARTS}*"):
        with contextlib.suppress(OSError):
            path.unlink()


def _known(folder: Path) -> dict[str, str]:
    """Names of weights by program, the one that changed last at the end."""
    try:
        known = json.loads((folder / _STARTS).read_text())
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def _read(paths: list[Path], ended: threading.Event) -> None:
    from vllm.utils.host_memory import available_bytes
    from vllm.utils.packed.file import Mapping

    with contextlib.suppress(OSError, ValueError):
        if sum(path.stat().st_size for path in paths) > available_bytes():
            return
        for path in paths:
            Mapping(path).read_ahead(_STEP, ended.is_set)
