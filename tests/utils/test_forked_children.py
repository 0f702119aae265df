"""Children that another child forks for this process: whose they are, how they end, and what they share."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import is_running

from vllm.utils.forked_children import fork_child
from vllm.v1.engine.core_process.start import CoreProcessHandle, end_core, start_core, with_replicas

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems adopt no processes")

MEBIBYTE = 1 << 10
"""In the units of /proc."""

WAITS = """
import os, sys, threading, time
from vllm.utils.forked_children import wait_and_fork
{first}
told = wait_and_fork()
sys.exit(int(os.read(0, 9)) if told else 77)
"""


def start(first: str = "") -> CoreProcessHandle:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-c", WAITS.format(first=first)]
        return CoreProcessHandle(subprocess.Popen(command, stdin=theirs.fileno()), ours)


def fork(core: CoreProcessHandle) -> CoreProcessHandle:
    child = fork_child(core.channel)
    assert child is not None
    return CoreProcessHandle(*child)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_each_is_a_child_of_this_process_and_ends_as_it_is_told():
    first = start()
    second, third = fork(first), fork(first)
    fourth = fork(third)
    cores = [first, second, third, fourth]
    assert len({each.process.pid for each in cores}) == 4
    assert [parent(each.process.pid) for each in cores] == [os.getpid()] * 4
    for number, each in enumerate(cores):
        assert each.process.poll() is None
        each.channel.sendall(b"b%d" % number)
        assert each.process.wait(60) == number and each.process.poll() == number
        each.process.kill()  # has nothing left to do
        each.channel.close()


def test_each_ends_with_its_own_channel():
    first = start()
    second, third = fork(first), fork(first)
    first.channel.close()
    assert first.process.wait(60) == 77
    with pytest.raises(subprocess.TimeoutExpired):
        second.process.wait(0.01)
    third.channel.close()
    assert third.process.wait(60) == 77
    assert second.process.poll() is None
    os.kill(second.process.pid, signal.SIGTERM)
    assert second.process.wait(60) == -signal.SIGTERM
    second.channel.close()


def test_other_orphans_are_not_adopted_afterwards():
    first = start()
    second = fork(first)
    code = "import os, time\npid = os.fork()\nif not pid: os.closerange(0, 3); time.sleep(60)\nprint(pid)"
    orphan = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert parent(orphan) != os.getpid()
    os.kill(orphan, signal.SIGKILL)
    for each in (first, second):
        end_core(each)


def test_threads_may_ask_at_once():
    firsts = [start(), start("time.sleep(0.5)")]
    with ThreadPoolExecutor(2) as pool:
        forked = list(pool.map(fork, firsts))
    assert [parent(each.process.pid) for each in forked] == [os.getpid()] * 2
    for each in (*firsts, *forked):
        assert each.process.poll() is None
        end_core(each)


def test_a_process_with_threads_is_not_forked():
    first = start("threading.Thread(target=time.sleep, args=(60,), daemon=True).start()")
    assert fork_child(first.channel) is None
    end_core(first)
    assert fork_child(start("sys.exit(3)").channel) is None


def test_cores_share_what_they_have_imported(monkeypatch):
    # The interpreter reads it, so that this one is not forked from the tests' own.
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    cores = with_replicas(start_core(), 3)
    try:
        pids = [each.process.pid for each in cores]
        assert len(set(pids)) == 3
        private = [private_kib(pid) for pid in pids]
        assert max(private) < 16 * MEBIBYTE
        # As much as the three share was the first one's alone.
        for each in cores[1:]:
            end_core(each)
        assert private_kib(pids[0]) > 64 * MEBIBYTE
    finally:
        for each in cores:
            end_core(each)
    assert not any(map(is_running, pids))


def private_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty:"))
