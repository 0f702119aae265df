"""A logits processor that makes every step of an engine take a while, for tests that end a server at work."""

from __future__ import annotations

import time

from vllm.v1.sample.logits_processor import LogitsProcessor

STEP_SECONDS = 0.02


class SlowProcessor(LogitsProcessor):
    """Changes nothing, slowly."""

    def is_argmax_invariant(self):
        """No: greedy requests would go without it."""
        return False

    def update_state(self, batch_update):
        """Nothing to learn."""

    def apply(self, logits):
        """Wait."""
        time.sleep(STEP_SECONDS)
        return logits
