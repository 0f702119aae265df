"""Readers of audits that start no process, which would import torch anew for each model."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from types import SimpleNamespace

import pytest

from vllm.auditing import reader, readings


def read_here(patch: pytest.MonkeyPatch) -> None:
    """Have audits read their models in this process."""

    def run(command: list[str], input: bytes, **_: object) -> subprocess.CompletedProcess[bytes]:
        with contextlib.redirect_stdout(io.StringIO()) as said, pytest.MonkeyPatch.context() as own:
            own.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(input)))
            code = reader.main()
        return subprocess.CompletedProcess(command, code, said.getvalue().encode())

    patch.setattr(reader, "_end_with", lambda parent: None)
    patch.setattr(readings.subprocess, "run", run)
