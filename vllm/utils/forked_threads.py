"""Engines in a fork of a process that has computed on several threads: OpenMP waits for threads that exist there no
more, so the first of PyTorch's operations would never end."""

from __future__ import annotations

import os

import torch

_has_computed = False
_is_forked = False


def check_threads() -> None:
    """Call it before an engine computes in this process.

    Raises:
        RuntimeError: the process is a fork of one in which an engine had computed on several threads, and computes on
            several, too.
    """
    global _has_computed
    if _is_forked and torch.get_num_threads() > 1:
        raise RuntimeError(
            "this process was forked from one in which an engine has computed on several threads, which do not exist "
            "here: start it with multiprocessing's 'spawn', or call torch.set_num_threads(1) in it first"
        )
    if not _has_computed and torch.get_num_threads() > 1:
        _has_computed = True
        os.register_at_fork(after_in_child=_note_fork)


def _note_fork() -> None:
    global _is_forked
    _is_forked = True
