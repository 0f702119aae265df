"""The classes of a batch file's lines; `python -m` of this module is `vllm run-batch`."""

from __future__ import annotations

from vllm.cli import main, run_batch
from vllm.server.run_batch import BatchRequestInput, BatchRequestOutput, BatchResponseData

__all__ = ["BatchRequestInput", "BatchRequestOutput", "BatchResponseData"]

if __name__ == "__main__":
    main.run_as("python -m vllm.entrypoints.openai.run_batch", run_batch)
