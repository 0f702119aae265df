"""The engine core's process as its client sees it start."""

import socket
import subprocess
import sys
from typing import cast

import pytest

from vllm.config import VllmConfig
from vllm.v1.engine.core_process.client import CoreClient
from vllm.v1.engine.core_process.start import CoreProcessHandle
from vllm.v1.engine.exceptions import EngineDeadError

DIES_ONCE_READY = """
import pickle, sys
import msgspec, zmq
sys.stdin.buffer.read(1)
start = pickle.load(sys.stdin.buffer)
output = zmq.Context().socket(zmq.PUSH)
output.connect(start.output_address)
output.send_multipart([b"ready", msgspec.msgpack.encode({"num_blocks": 7})])
output.send_multipart([b"dead", b"OSError: the disk is gone"])
output.close()
sys.exit(1)
"""


def test_core_that_dies_before_it_listens_ends_the_wait():
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen([sys.executable, "-c", DIES_ONCE_READY], stdin=theirs.fileno())
    client = CoreClient(cast(VllmConfig, None), CoreProcessHandle(process, ours))  # the process does not read it
    try:
        with pytest.raises(EngineDeadError, match="exit status 1: OSError: the disk is gone"):
            client.wait_until_ready()
    finally:
        client.close()
