"""Processes that are forked from one with imports are what fresh ones are."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SERVER = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
CORE = [sys.executable, "-m", "vllm.v1.engine"]
FRESH = {"PYTHONHASHSEED": "0"}
"""The interpreter reads it."""


@pytest.mark.parametrize("more", [{}, FRESH], ids=["forked", "fresh"])
def test_a_command_that_fails(more, tmp_path):
    environment = {**os.environ, **more, "VLLM_LOGGING_LEVEL": "loud"}
    done = subprocess.run(
        [*SERVER, "--model", "./there", "--port", "99999"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    assert "VLLM_LOGGING_LEVEL=LOUD is not a level name" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("error: --port must be in 0..65535, got 99999")


@pytest.mark.parametrize("more", [{}, FRESH], ids=["forked", "fresh"])
@pytest.mark.parametrize("own_group", [False, True])
def test_a_process_that_waits(more, own_group):
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    ours, theirs = socket.socketpair()
    try:
        process = subprocess.Popen(
            CORE, env={**os.environ, **more, "PROBE": "x"}, stdin=theirs.fileno(), start_new_session=own_group
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    # One that was forked waits with all that it needs.
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    assert int(status["PPid"]) == os.getpid()
    assert int(status["SigBlk"], 16) >> signal.SIGUSR1 - 1 & 1
    assert os.getpgid(process.pid) == (process.pid if own_group else os.getpgid(0))
    assert Path(f"/proc/{process.pid}/cwd").resolve() == Path.cwd()
    assert (b"preloaded.py" in Path(f"/proc/{process.pid}/cmdline").read_bytes()) == (not more)
    descriptors = {each.name for each in Path(f"/proc/{process.pid}/fd").iterdir()}
    theirs.close()
    ours.close()
    process.wait()
    # Its parent ended before it was told anything.
    assert process.returncode == 1
    assert {"0", "1", "2"} <= descriptors
