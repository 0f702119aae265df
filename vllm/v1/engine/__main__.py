"""`python -m vllm.v1.engine`: an engine core's process; see `core_start.start_core`."""

import os
import sys

from vllm.utils.child_signals import leave_signals_to_parent

if __name__ == "__main__":
    leave_signals_to_parent()
    from vllm.v1.engine.core_process import loop as core_proc

    status = core_proc.main()
    sys.stdout.flush()
    sys.stderr.flush()
    # A library's thread must not keep a dead core alive.
    os._exit(status)
