"""`python -m vllm.v1.engine`: an engine core's process; see `core_start.start_core`."""

import os
import signal
import sys

if __name__ == "__main__":
    # Ctrl-C goes to the whole process group; the parent decides when to stop.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from vllm.v1.engine.core_process import loop as core_proc

    status = core_proc.main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A library's thread must not keep a dead core alive.
    os._exit(status)
