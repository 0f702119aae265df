"""The modules on the road of one chat request: those whose functions run between its body and the end of its answer, in
the server's process and in the engine core's.

`python tests/support/request_road.py` prints them. A request goes before, so that what is made at the first use does
not count; the model is a small Llama, and the request reads chosen ids.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

PACKAGE = Path(__file__).parents[2] / "vllm"
BODY = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Is it good?"}],
    "chat_template": "{{ messages[0].content }}",
    "logprobs": True,
    "logprob_token_ids": [5, 6],
    "max_tokens": 4,
}
_FOLDER = "REQUEST_ROAD"
_seen: set[str] = set()
_watching = False


def watch() -> None:
    """In the processes of a server: SIGUSR1 begins to count, SIGUSR2 ends it and writes a file of the modules."""
    threading.setprofile(_called)
    sys.setprofile(_called)
    signal.signal(signal.SIGUSR1, _begin)
    signal.signal(signal.SIGUSR2, _end)


def _called(frame: FrameType, event: str, _: Any) -> None:
    if _watching and event == "call":
        _seen.add(frame.f_code.co_filename)


def _begin(*_: object) -> None:
    global _watching
    _watching = True
    _write("begun", "")


def _end(*_: object) -> None:
    global _watching
    _watching = False
    own = sorted(name[len(str(PACKAGE)) + 1 :] for name in _seen if name.startswith(f"{PACKAGE}{os.sep}"))
    _write("seen", "\n".join(own))


def _write(name: str, text: str) -> None:
    part = Path(os.environ[_FOLDER]) / f"{os.getpid()}.part"
    part.write_text(text)
    part.rename(part.with_name(f"{name}{os.getpid()}"))


def road(folder: Path) -> list[list[str]]:
    """Paths of the modules below the package, of the server's process and of the core's."""
    import httpx
    from live_server import LiveServer
    from tiny_llm import make_tiny_model

    (folder / "sitecustomize.py").write_text("import request_road\nrequest_road.watch()\n")
    path = os.pathsep.join([str(folder), str(Path(__file__).parent)])
    with LiveServer(make_tiny_model(folder / "tiny"), env={"PYTHONPATH": path, _FOLDER: str(folder)}) as server:
        processes = [server.process.pid, *server.core_pids]

        def ask() -> None:
            httpx.post(f"{server.url}/v1/chat/completions", json=BODY, timeout=60).raise_for_status()

        def tell(signum: int, name: str) -> list[Path]:
            """The files that the processes write when they have heard."""
            for pid in processes:
                os.kill(pid, signum)
            written = [folder / f"{name}{pid}" for pid in processes]
            while not all(each.exists() for each in written):
                time.sleep(0.05)
            return written

        ask()
        tell(signal.SIGUSR1, "begun")
        ask()
        return [each.read_text().splitlines() for each in tell(signal.SIGUSR2, "seen")]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        each = road(Path(place))
    for title, names in zip(("server", "core"), each, strict=True):
        print(f"{title} ({len(names)}):", *names, sep="\n  ")
    print(len(set().union(*each)), "modules")
