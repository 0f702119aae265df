"""The packages openai and @anthropic-ai/sdk of npm over the server."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from live_server import LiveServer

FOLDER = Path(__file__).with_name("node")


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
@pytest.mark.skipif(not (FOLDER / "node_modules").is_dir(), reason="npm ci in tests/callers/node")
def test_clients_of_node(server: LiveServer) -> None:
    command = [str(shutil.which("node")), str(FOLDER / "clients.mjs"), server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["text"] and found["streamed"] == found["text"]
    for name in ("responses", "chat", "messages"):
        assert found[name]["city"] in ("Oslo", "Rome")
    assert (found["reason"], found["stop"]) == ("tool_calls", "tool_use")
    assert found["refused"] == [400, "background"]
