"""Choice of the device, and why a GPU cannot be used."""

from __future__ import annotations

import os
from pathlib import Path

from vllm.logger import init_logger, warn_once

logger = init_logger(__name__)

MIN_CAPABILITY = (7, 5)
"""CUDA 13 and Triton 3.6 do not support older GPUs."""
_BFLOAT16_CAPABILITY = (8, 0)
_GPU_FILES = ("/dev/nvidia0", "/dev/dxg")  # of the driver on Linux, and under WSL


def resolve_device(asked: str, num_devices: int = 1) -> str:
    """ "cpu" or "cuda" for "cpu", "cuda" or "auto", which is a GPU if the first `num_devices` visible ones are usable.

    Raises:
        ValueError: another value, or "cuda" without a usable GPU (with the reason).
    """
    check_device_name(asked)
    if asked == "cpu":
        return "cpu"
    problem = cuda_problem(num_devices)
    if problem is None:
        return "cuda"
    if asked == "cuda":
        raise ValueError(f"device='cuda', but {problem}")
    if _hidden_devices() is None and any(Path(file).exists() for file in _GPU_FILES):
        warn_once(logger, "there is a GPU, but the model runs on the CPU: %s", problem)
    return "cpu"


def check_device_name(asked: str) -> None:
    """ValueError: it is no value of `device`."""
    if asked not in ("auto", "cpu", "cuda"):
        hint = "; which GPU it is, CUDA_VISIBLE_DEVICES says" if str(asked).startswith("cuda:") else ""
        raise ValueError(f"device must be one of auto, cpu, cuda, got {asked!r}{hint}")


def cuda_problem(num_devices: int = 1) -> str | None:
    """Why the first `num_devices` GPUs cannot be used; None if they can."""
    import torch

    if torch.version.cuda is None:
        built_for = "ROCm" if torch.version.hip else "the CPU only"
        return f"the installed torch {torch.__version__} is built for {built_for}: install one that is built for CUDA"
    if not torch.cuda.is_available():
        hidden = _hidden_devices()
        if hidden is not None:
            return f"CUDA_VISIBLE_DEVICES={hidden!r} hides every GPU"
        return f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, finds none it can use: {_init_error()}"
    for index in range(min(num_devices, torch.cuda.device_count())):
        problem = _capability_problem(index)
        if problem is not None:
            return problem
    return None


def cuda_has_bfloat16() -> bool:
    """Whether the first GPU has bfloat16 arithmetic."""
    import torch

    return torch.cuda.get_device_capability(0) >= _BFLOAT16_CAPABILITY


def usable_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def device_bytes() -> int:
    """Memory of the first GPU."""
    import torch

    return torch.cuda.get_device_properties(0).total_memory


def _hidden_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES if it hides every GPU."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return value if value is not None and value.strip() in ("", "-1") else None


def _init_error() -> str:
    """CUDA's error on initialisation: no driver, or one that is too old."""
    import torch

    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return " ".join(str(error).split())
    return "the driver reports no device"


def _capability_problem(index: int) -> str | None:
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    which = f"GPU {index} ({torch.cuda.get_device_name(index)}) has compute capability {major}.{minor}"
    if (major, minor) < MIN_CAPABILITY:
        return f"{which}, and {MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} is the least that is supported"
    archs = torch.cuda.get_arch_list()
    if archs and not any(_runs_on(arch, major, minor) for arch in archs):
        return f"{which}, and the installed torch has code for {', '.join(archs)} only"
    return None


def _runs_on(arch: str, major: int, minor: int) -> bool:
    """Machine code ("sm_90", "sm_90a") runs on its major version from its minor version on; PTX ("compute_90") on all
    versions from its own on."""
    kind, _, version = arch.partition("_")
    own = divmod(int(version.rstrip("af")), 10)
    return own <= (major, minor) and (kind == "compute" or own[0] == major)
