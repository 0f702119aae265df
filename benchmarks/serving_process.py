"""The servers that serving.py compares, each as its users start it, on a free port of 127.0.0.1."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

OURS, UPSTREAM = "ours", "upstream"

_START_SECONDS = 600
_STOP_SECONDS = 60


@dataclass(frozen=True)
class Serving:
    """A server that is ready.

    Attributes:
        name: OURS or UPSTREAM.
        url: where it listens.
        start_seconds: from the start of its process to its first /health.
    """

    name: str
    url: str
    start_seconds: float


@contextmanager
def serve(name: str, model: str | None, upstream: Path | None, dtype: str, threads: int) -> Iterator[Serving]:
    """A server while the context lasts.

    Args:
        name: OURS or UPSTREAM.
        model: folder; None = ours with the embedded model.
        upstream: its environment; for UPSTREAM.
        dtype: of the computation.
        threads: cores that it may use.

    Raises:
        SystemExit: it does not start; shows the end of its log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads)}
    if name == OURS:
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
        environment["PYTHONPATH"] = str(Path(__file__).resolve().parent.parent)
    else:
        assert upstream is not None
        command = [str(upstream.resolve() / "bin" / "vllm"), "serve"]
        environment.pop("PYTHONPATH", None)
        # Its default leaves one core to a process that only waits.
        environment |= {
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_NO_USAGE_STATS": "1",
        }
    command += [] if model is None else [model]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
    with tempfile.TemporaryFile("w+") as log:
        began = time.monotonic()
        # Elsewhere, as upstream's processes would import this checkout's package from its root.
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, cwd=tempfile.gettempdir(), start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            if not _is_ready(process, url, began + _START_SECONDS):
                log.seek(0)
                raise SystemExit(f"{name} does not start:\n{log.read()[-3000:]}")
            yield Serving(name, url, time.monotonic() - began)
        finally:
            _stop(process)


def _is_ready(process: subprocess.Popen[bytes], url: str, deadline: float) -> bool:
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return True
        except (OSError, urllib.error.URLError):
            time.sleep(0.1)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the server and what it started, politely first."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
