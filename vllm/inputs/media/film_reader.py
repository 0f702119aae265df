"""The process that decodes a film for `film_process`.

It is told by a line of JSON, `{"name", "size", "chosen"}`, behind which is the file. It answers by lines, too:
`{"pixels"}`, how many there will be, and goes on when it gets an empty line; then `{"error"}`, or
`{"shape", "metadata"}`, behind which are the frames.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from pathlib import Path
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.inputs.media.films import FilmFrames, film

# For FFmpeg: tables of samples, and frames that others refer to.
_BYTES = 2**30
# A frame is held by itself, and among all frames.
_BYTES_A_PIXEL = 6


def main() -> int:
    """Decode the film on standard input."""
    # Output of other code must not be among the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)

    def say(said: dict[str, Any]) -> None:
        answers.write(f"{json.dumps(said)}\n".encode())
        answers.flush()

    def reserve(count: int) -> None:
        say({"pixels": count})
        if not sys.stdin.buffer.readline():
            sys.exit(1)
        _allow(_BYTES + _BYTES_A_PIXEL * count)

    asked = json.loads(sys.stdin.buffer.readline())
    data = sys.stdin.buffer.read(asked["size"])
    _allow(_BYTES)
    try:
        video = film(asked["name"], data, reserve, FilmFrames(**asked["chosen"]))
    except VLLMValidationError as error:
        say({"error": error.args[0]})
        return 0
    except MemoryError:
        say({"error": f"{asked['name']} takes more than {_BYTES >> 20} MiB to decode: send frames of it"})
        return 0
    say({"shape": video.frames.shape, "metadata": dict(video.metadata)})
    answers.write(video.frames.data)
    answers.flush()
    return 0


def _allow(size: int) -> None:
    """At most so many bytes beside those that the process has."""
    own = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = own + size if most == resource.RLIM_INFINITY else min(own + size, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, most))


if __name__ == "__main__":
    sys.exit(main())
