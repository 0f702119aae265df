"""`vllm serve` of this checkout in a process of its own, for the scripts that measure it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parent.parent


class ServerProcess:
    """A server on a free port of 127.0.0.1 that serves "model" with any number of logprobs, until the context is left.

    Attributes:
        url: where it listens.
        pids: process ids by name: "server" and "core".
        start_seconds: from the start of its process until it was ready.
    """

    def __init__(self, model: str | None, *flags: str) -> None:
        """Start it and wait until it is ready.

        Args:
            model: folder or name; None = the embedded model.
            flags: further ones of `vllm serve`.

        Raises:
            RuntimeError: it ended instead; the message has its log.
        """
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", *([model] if model else []), *flags]
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        began = time.perf_counter()
        self._process = subprocess.Popen(
            [*command, "--port", "0", "--served-model-name", "model", "--max-logprobs", "-1", "--no-access-log"],
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.url = self._wait()
        self.start_seconds = time.perf_counter() - began
        pid = self._process.pid
        (core,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        self.pids = {"server": pid, "core": int(core)}

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        self._process.wait()
        self._log.close()

    def rss_mib(self) -> dict[str, float]:
        """Resident memory of each process."""
        return {name: _status_kib(pid, "VmRSS") / 1024 for name, pid in self.pids.items()}

    def _wait(self) -> str:
        while True:
            self._log.seek(0)
            text = self._log.read()
            found = re.search(r"ready: (http://\S+)", text)
            if found is not None:
                return found[1]
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode}:\n{text}")
            time.sleep(0.01)


def _status_kib(pid: int, field: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))
