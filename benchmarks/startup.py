"""A fresh process, from its start to its first score. Run as a script, this file is that process.

It prints one line when it has the score; the time is taken outside, by the process that started it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple


class Startup(NamedTuple):
    """One start: seconds to the first score, the engine's version, the label logprobs."""

    seconds: float
    version: str
    score: list[float]


def time_startup(engine: str, model: str | None, dtype: str, threads: int, quantization: str | None = None) -> Startup:
    """Start a process of this interpreter and wait for its first score.

    Raises:
        RuntimeError: the process ended without a score; the message has the end of its error output.
    """
    command = [sys.executable, str(Path(__file__).resolve()), engine, model or "", dtype, str(threads)]
    command.append(quantization or "")
    with tempfile.TemporaryFile("w+") as errors:
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith('{"version"'):
                    seconds = time.perf_counter() - began
                    process.communicate()
                    return Startup(seconds, **json.loads(line))
        errors.seek(0)
        raise RuntimeError(f"no score from {command}, exit status {process.returncode}:\n{errors.read()[-2000:]}")


def main() -> None:
    """Load the engine, score one text, say so."""
    from adapters import make_adapter, prepare_process

    engine, model, dtype, threads, quantization = sys.argv[1:]
    prepare_process(engine, int(threads))
    adapter = make_adapter(engine, model or None, dtype, quantization or None)
    print(json.dumps({"version": adapter.version, "score": adapter.score_text()}), flush=True)


if __name__ == "__main__":
    main()
