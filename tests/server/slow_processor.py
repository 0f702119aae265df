"""A logits processor that makes every step of an engine take a while, and not end at all with a certain request, for
tests that end a server at work."""

from __future__ import annotations

import time

from vllm.v1.sample.logits_processor import LogitsProcessor

STEP_SECONDS = 0.02
HANG = {"vllm_xargs": {"hang": 1}}
"""A field of the request's body."""


class SlowProcessor(LogitsProcessor):
    """Changes nothing, slowly."""

    def __init__(self, vllm_config, device, is_pin_memory):
        self._hangs = False

    def is_argmax_invariant(self):
        """No: greedy requests would go without it."""
        return False

    def update_state(self, batch_update):
        """Look for the request."""
        for _, params, *_ in batch_update.added if batch_update is not None else ():
            self._hangs |= "hang" in (params.extra_args or {})

    def apply(self, logits):
        """Wait."""
        time.sleep(3600 if self._hangs else STEP_SECONDS)
        return logits
