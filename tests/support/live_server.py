"""A server in a process of its own, as users start it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

import httpx
from processes import children, end_with_parent

ROOT = Path(__file__).parents[2]
TINY_FLAGS = (
    "--dtype", "float32", "--max-logprobs", "-1", "--served-model-name", "tiny", "--trust-request-chat-template",
)  # fmt: skip
"""For folders of make_tiny_model, as asgi.make_engine's engine but with the model's whole context."""

_READY_SECONDS = 180.0


class LiveServer:
    """`vllm serve` on a free port of 127.0.0.1, until the context is left.

    Args:
        model: a folder of make_tiny_model, served as "tiny" in float32; None = the embedded model.
        flags: further ones of `vllm serve`.
        env: further environment variables.
        wait: come back when the server is ready; False = at once.
        api_server: start it by `python -m vllm.entrypoints.openai.api_server --model MODEL` instead.
        group: in a process group of its own, whose number is the process's id.

    Attributes:
        url: where it listens, such as http://127.0.0.1:43210.
        process: of the server; its engine core is a child of it.
    """

    def __init__(
        self,
        model: Path | None = None,
        *flags: str,
        env: dict[str, str] | None = None,
        wait: bool = True,
        api_server: bool = False,
        group: bool = False,
    ) -> None:
        arguments = [str(model), *TINY_FLAGS, *flags] if model is not None else list(flags)
        start = ["vllm.entrypoints.openai.api_server", "--model"] if api_server else ["vllm.cli.main", "serve"]
        command = [sys.executable, "-m", *start, *arguments, "--port", "0"]
        path = os.pathsep.join(part for part in (str(ROOT), (env or {}).get("PYTHONPATH", "")) if part)
        # Files, not pipes: nobody reads along, and a full pipe would stop the server.
        self._stdout, self._stderr = os.memfd_create("stdout"), os.memfd_create("stderr")
        self.process = subprocess.Popen(
            command,
            stdout=self._stdout,
            stderr=self._stderr,
            env={**os.environ, **(env or {}), "PYTHONPATH": path},
            start_new_session=group,
            preexec_fn=end_with_parent,
        )
        self.url = ""
        if wait:
            try:
                self.wait_until_ready()
            except BaseException:
                self.close()
                raise

    def __enter__(self) -> LiveServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def wait_until_ready(self) -> None:
        """Wait until /health answers 200."""
        deadline = time.monotonic() + _READY_SECONDS
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the server ended with {self.process.returncode}:\n{self.log()}")
            found = re.search(r"(https?://127\.0\.0\.1:\d+)", self.log())
            if found is not None:
                self.url = found[1]
                # A certificate made for a test is nobody's friend.
                if httpx.get(f"{self.url}/health", verify=False, timeout=10).status_code == 200:
                    return
            time.sleep(0.05)
        raise RuntimeError(f"the server is not ready after {_READY_SECONDS} s:\n{self.log()}")

    def log(self) -> str:
        """All that the server and its core have written to stderr."""
        return _content(self._stderr)

    def access_log(self) -> str:
        """All that the server has written to stdout."""
        return _content(self._stdout)

    @property
    def core_pids(self) -> list[int]:
        """Process ids of the server's children, of which the engine core is the only one."""
        return children(self.process.pid)

    def stop(self, signum: int = signal.SIGTERM, timeout: float = 30.0) -> int:
        """Send a signal, wait for the end; the exit code, negative when a signal was what ended it."""
        self.process.send_signal(signum)
        return self.process.wait(timeout)

    def close(self) -> None:
        """End the server, if it runs."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        os.close(self._stdout)
        os.close(self._stderr)


def _content(descriptor: int) -> str:
    """The file's text, without moving the position that its writer shares."""
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")
