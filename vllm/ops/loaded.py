"""What the C++ kernels say about themselves, for reports."""

from __future__ import annotations

from vllm import envs
from vllm.ops._dispatch import ISA_LEVELS, cpu_ops


def cpu_kernel_isa() -> str | None:
    """Instruction-set level that the C++ kernels run at, one of ISA_LEVELS; None when they are not loaded, or not used
    (VLLM_OPS=reference).

    Raises:
        ValueError: VLLM_OPS or VLLM_CPU_ISA has a value that it cannot have.
    """
    operators = None if envs.ops_reference() else cpu_ops()
    return None if operators is None else ISA_LEVELS[operators.set_isa(-1)]  # -1 changes nothing
