"""The beginning and the end of a self-test's report."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.cli.bench.run import write_json
from vllm.cli.collect_env import cpu_model
from vllm.version import __version__

if TYPE_CHECKING:
    from vllm.config import ModelConfig


def about(name: str, config: ModelConfig, **more: Any) -> dict[str, Any]:
    """The test, the model and the machine."""
    import torch

    from vllm.ops.cpu_kernels import cpu_kernel_isa

    own = {"selftest": name, "version": __version__, "model": Path(config.model).name, **more}
    return {**own, "cpu": cpu_model(), "isa": cpu_kernel_isa(), "threads": torch.get_num_threads()}


def conclude(result: dict[str, Any], passed: bool, started: float, path: Path | None) -> int:
    """Print whether it has passed, and since `started` (monotonic seconds) how long it took; write all of it as JSON to
    `path`, null for what is not finite. The exit code."""
    from vllm.auditing.statistics import as_json

    seconds = time.monotonic() - started
    print(f"{'passed' if passed else 'FAILED'} in {seconds:.0f} s")
    write_json(path, as_json({**result, "passed": passed, "seconds": seconds}))
    return 0 if passed else 1
