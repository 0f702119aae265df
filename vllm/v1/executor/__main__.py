"""`python -m vllm.v1.executor DESCRIPTOR`: a worker's process, which an executor starts."""

from vllm.v1.executor.worker_proc import main

if __name__ == "__main__":
    main()
