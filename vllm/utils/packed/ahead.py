"""Packed weights are read from the disk while a program imports what it needs.

A program is known by its command line and folder. What it mapped first the last time is read as soon as it asks for an
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
from typing import TYPE_CHECKING

from vllm import envs

if TYPE_CHECKING:
    from vllm.utils.packed.file import Mapping

_STARTS = "starts.json"
# Programs that are known: those whose weights changed last.
_MOST = 256
# Bytes that are read between two looks whether to end. Imports wait for them, as they map libraries meanwhile.
_STEP = 1 << 23
_program: str | None = None
_reading: tuple[str, threading.Event] | None = None
_is_noted = False


def program() -> str:
    """The name of this program: that of the one that started it, where `act_for` gave it."""
    if _program is not None:
        return _program
    folder = ""
    # It may have been removed.
    with contextlib.suppress(OSError):
        folder = os.getcwd()
    text = json.dumps([sys.orig_argv, folder])
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
    # A wrong setting, or a package that is missing, is told where it is needed.
    with contextlib.suppress(ImportError, OSError, ValueError):
        folder = envs.packed_cache()
        name = None if folder is None else _known(folder).get(program())
        if folder is None or name is None:
            return
        # Not in the thread: torch's own import of NumPy can fail while another thread is at it.
        from vllm.utils.host_memory import available_bytes
        from vllm.utils.packed.file import Mapping

        paths = sorted(path for path in folder.glob("*.packed") if path.name.startswith(f"{name}-"))
        mappings = [Mapping(path) for path in paths]
        if sum(map(len, mappings)) > available_bytes():
            return
        _reading = name, threading.Event()
        threading.Thread(target=_read, args=(mappings, _reading[1]), name="reading-ahead", daemon=True).start()


def end_unless(name: str) -> None:
    """Read nothing more, unless it is of the weights `name`."""
    if _reading is not None and _reading[0] != name:
        _reading[1].set()


def note(folder: Path, name: str) -> None:
    """Remember for the next start that this program maps the weights `name`, if they are its first: others, such as a
    draft model's, are asked for later. OSError is not raised: nothing is lost."""
    global _is_noted
    if _is_noted:
        return
    _is_noted = True
    with contextlib.suppress(OSError):
        known = _known(folder)
        if known.pop(program(), None) == name and len(known) < _MOST:
            return
        known[program()] = name
        temporary = folder / f"{_STARTS}.{os.getpid()}"
        temporary.unlink(missing_ok=True)
        temporary.touch(0o600, exist_ok=False)
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
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}


def _read(mappings: list[Mapping], ended: threading.Event) -> None:
    for mapping in mappings:
        mapping.read_ahead(_STEP, ended.is_set)
