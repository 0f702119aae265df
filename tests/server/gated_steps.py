"""A logits processor that lets a step end only when the test allows it: what an engine does is known to the step."""

from __future__ import annotations

import array
import asyncio
import fcntl
import os
import termios
from pathlib import Path

from vllm.v1.sample.logits_processor import LogitsProcessor

_PATH_VARIABLE = "GATED_STEPS"


class GatedProcessor(LogitsProcessor):
    """Changes nothing; takes a permit for each step."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self._permits = os.open(os.environ[_PATH_VARIABLE], os.O_RDWR)

    def is_argmax_invariant(self):
        return False

    def update_state(self, batch_update):
        pass

    def apply(self, logits):
        os.read(self._permits, 1)
        return logits


class Gate:
    """The other end. The processor is to be loaded while `path` exists, which the environment names."""

    NAME = f"{__name__}:{GatedProcessor.__name__}"

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        os.environ[_PATH_VARIABLE] = str(path)
        self._permits = os.open(path, os.O_RDWR)

    def permit(self, num_steps: int) -> None:
        """Let so many more steps end."""
        os.write(self._permits, bytes(num_steps))

    @property
    def num_unused(self) -> int:
        """Permits that no step has taken."""
        count = array.array("i", [0])
        fcntl.ioctl(self._permits, termios.FIONREAD, count)
        return count[0]

    async def used(self) -> None:
        """Wait until every permit is taken."""
        while self.num_unused:
            await asyncio.sleep(0.002)

    def withdraw(self) -> None:
        """Take back what is left."""
        if self.num_unused:
            os.read(self._permits, self.num_unused)
