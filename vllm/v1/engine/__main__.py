"""`python -m vllm.v1.engine`: an engine core's process, which `core_start.start_core` starts."""

from __future__ import annotations

import os
import signal
import sys

if __name__ == "__main__":
    # The terminal's Ctrl-C goes to the whole group; when to stop is the parent's decision.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from vllm.v1.engine import core_proc

    status = core_proc.main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A thread of a library must not keep a dead core alive.
    os._exit(status)
