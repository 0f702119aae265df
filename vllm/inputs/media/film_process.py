"""Films are decoded by a process of their own: a crafted file may make FFmpeg take any amount of memory, or crash."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from vllm.exceptions import VLLMValidationError
from vllm.inputs.media.films import MAX_SECONDS, FilmFrames
from vllm.inputs.videos import GivenVideo

_READER = "vllm.inputs.media.film_reader"


def film_apart(name: str, data: bytes, reserve: Callable[[int], None], chosen: FilmFrames) -> GivenVideo:
    """See `films.film`: the same, from a process whose memory and time are bounded."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    try:
        with subprocess.Popen(
            [sys.executable, "-m", _READER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        ) as process:
            timer = threading.Timer(2 * MAX_SECONDS, process.kill)
            timer.start()
            try:
                return _asked(process, name, data, reserve, chosen)
            finally:
                timer.cancel()
                process.kill()
    except (BrokenPipeError, EOFError):
        message = f"{name} is a damaged film, or takes more time or memory to read than it may"
        raise VLLMValidationError(message, name) from None


def _asked(process: Any, name: str, data: bytes, reserve: Callable[[int], None], chosen: FilmFrames) -> GivenVideo:
    """Raises BrokenPipeError or EOFError where the process has ended."""
    question = {"name": name, "size": len(data), "chosen": dataclasses.asdict(chosen)}
    process.stdin.write(f"{json.dumps(question)}\n".encode() + data)
    process.stdin.flush()
    while True:
        line = process.stdout.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        said = json.loads(line)
        if "error" in said:
            raise VLLMValidationError(said["error"], name)
        if "shape" in said:
            break
        reserve(said["pixels"])
        process.stdin.write(b"\n")
        process.stdin.flush()
    frames = np.empty(said["shape"], np.uint8)
    if process.stdout.readinto(frames.data) != frames.nbytes:
        raise EOFError
    return GivenVideo(frames, said["metadata"])
