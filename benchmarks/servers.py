"""`vllm serve` processes on a free port of 127.0.0.1, for the scripts that measure them."""

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
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from common import ROOT, status_kib

OURS, UPSTREAM = "ours", "upstream"

_START_SECONDS = 600
_STOP_SECONDS = 60


@dataclass(frozen=True)
class Serving:
    """A server that is ready; `start_seconds` is from the start of its process to its first /health."""

    name: str
    url: str
    start_seconds: float
    pid: int

    def rss_mib(self) -> dict[str, float]:
        """Resident memory of our "server" and "core" processes. Linux only."""
        (core,) = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        return {name: status_kib(pid)["VmRSS"] / 1024 for name, pid in (("server", self.pid), ("core", int(core)))}


def serve_for_probes(model: str | None, *flags: str) -> AbstractContextManager[Serving]:
    """Our server, of a model named "model", with unlimited logprobs and without an access log."""
    common = ("--served-model-name", "model", "--max-logprobs", "-1", "--no-access-log")
    # The server runs in another folder.
    if model is not None and Path(model).exists():
        model = str(Path(model).resolve())
    return serve(OURS, model, *common, *flags)


@contextmanager
def serve(
    name: str, model: str | None, *flags: str, upstream: Path | None = None, threads: int | None = None
) -> Iterator[Serving]:
    """A server while the context lasts.

    Args:
        name: OURS or UPSTREAM.
        model: absolute folder, or a name; None = ours with the embedded model.
        flags: further ones of `vllm serve`.
        upstream: the environment of UPSTREAM.
        threads: cores to use; None = our default.

    Raises:
        SystemExit: it does not start; with the end of its log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = dict(os.environ)
    if model is None or Path(model).is_absolute():
        environment["HF_HUB_OFFLINE"] = "1"
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    if name == OURS:
        command = [sys.executable, "-m", "vllm.cli.main", "serve"]
        environment["PYTHONPATH"] = str(ROOT)
    else:
        assert upstream is not None and threads is not None
        command = [str(upstream.resolve() / "bin" / "vllm"), "serve"]
        environment.pop("PYTHONPATH", None)
        # Its default leaves one core unused.
        environment["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1"}
    command += [] if model is None else [model]
    command += ["--host", "127.0.0.1", "--port", str(port), *flags]
    with tempfile.TemporaryFile("w+") as log:
        began = time.monotonic()
        # In another folder, as upstream's processes would import this checkout's package from its root.
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, cwd=tempfile.gettempdir(), start_new_session=True
        )
        try:
            url = f"http://127.0.0.1:{port}"
            if not _is_ready(process, url, began + _START_SECONDS):
                log.seek(0)
                raise SystemExit(f"{name} does not start:\n{log.read()[-3000:]}")
            yield Serving(name, url, time.monotonic() - began, process.pid)
        finally:
            _stop(process)


def _is_ready(process: subprocess.Popen[bytes], url: str, deadline: float) -> bool:
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return True
        except (OSError, urllib.error.URLError):
            time.sleep(0.02)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate the server, then kill its process group."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
