"""When a core counts as hanging, and what is left of one that did."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
from processes import is_running

from vllm import envs
from vllm.v1.engine.core_process.client import HangClock
from vllm.v1.engine.core_process.start import kill_core

LOOKS = 20
"""As many as the timeout has."""


def test_a_core_with_requests_that_sends_nothing_hangs():
    clock = HangClock(300.0)
    assert clock.seconds_between_looks * LOOKS == 300.0
    assert [clock.look(5, True) for _ in range(LOOKS + 1)] == [False] * LOOKS + [True]


def test_an_idle_core_never_does():
    clock = HangClock(1.0)
    assert not any(clock.look(5, False) for _ in range(10 * LOOKS))
    # The time before its first request does not count.
    assert not any(clock.look(5, True) for _ in range(LOOKS))
    assert clock.look(5, True)


def test_one_message_is_a_sign_of_life():
    """A step may last until shortly before the time is up, whether it gives a token or not."""
    clock = HangClock(1.0)
    for num_messages in range(10):
        assert not any(clock.look(num_messages, True) for _ in range(LOOKS))


def test_requests_that_end_without_a_word_count_as_one():
    """Clients leave, others come, and the core does nothing for any of them."""
    clock = HangClock(1.0)
    assert not any(clock.look(5, True) for _ in range(LOOKS - 1))
    assert not clock.look(5, False)
    assert [clock.look(5, True) for _ in range(LOOKS + 1)] == [False] * LOOKS + [True]


@pytest.mark.parametrize(
    ("text", "expected"), [(None, 300.0), ("", 300.0), ("12.5", 12.5), ("0", None), ("0.0", None), (" 7 ", 7.0)]
)
def test_the_variable(text, expected, monkeypatch):
    monkeypatch.delenv("VLLM_ENGINE_HANG_TIMEOUT_S", raising=False)
    if text is not None:
        monkeypatch.setenv("VLLM_ENGINE_HANG_TIMEOUT_S", text)
    assert envs.engine_hang_timeout_seconds() == expected


@pytest.mark.parametrize("text", ["-1", "soon", "nan", "inf", "5s"])
def test_no_such_time(text, monkeypatch):
    monkeypatch.setenv("VLLM_ENGINE_HANG_TIMEOUT_S", text)
    message = f"VLLM_ENGINE_HANG_TIMEOUT_S must be a positive number of seconds, or 0 for no limit, got '{text}'"
    with pytest.raises(ValueError, match=message):
        envs.engine_hang_timeout_seconds()


def test_what_a_core_started_goes_with_it():
    """A process and its child's child, stopped: none of them can do anything about its own end."""
    code = (
        "import os, signal, subprocess, sys\n"
        "depth = int(sys.argv[2])\n"
        "if depth: subprocess.Popen([sys.executable, '-c', sys.argv[1], sys.argv[1], str(depth - 1)])\n"
        "print(os.getpid(), flush=True)\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, code, "2"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    pids = [int(process.stdout.readline()) for _ in range(3)]
    try:
        kill_core(process)
        assert process.wait(10) == -signal.SIGKILL
        deadline = time.monotonic() + 10
        while any(is_running(pid) for pid in pids):
            assert time.monotonic() < deadline, "one of them is left"
            time.sleep(0.01)
    finally:
        process.stdin.close()
        process.stdout.close()
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)
