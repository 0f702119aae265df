"""`python -m vllm.v1.executor DESCRIPTOR`: a worker's process, which an executor starts."""

from vllm.utils.child_signals import leave_signals_to_parent
from vllm.utils.garbage import not_collected

if __name__ == "__main__":
    leave_signals_to_parent()
    with not_collected():
        from vllm.v1.executor.worker_proc import main

    main()
