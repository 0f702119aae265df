"""`python -m vllm.v1.executor DESCRIPTOR`: a worker's process, which an executor starts."""

from vllm.utils.child_signals import leave_signals_to_parent

if __name__ == "__main__":
    leave_signals_to_parent()
    from vllm.v1.executor.worker_proc import main

    main()
