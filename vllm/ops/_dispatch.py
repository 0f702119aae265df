"""Which implementation of an operation runs.

CPU tensors take the C++ kernels of `_cpu_ops.so`, CUDA tensors the Triton kernels, all others (and all under
`VLLM_OPS=reference`) the PyTorch references, which every operation has.
"""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, lru_cache, wraps
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from vllm import envs
from vllm.logger import init_logger, warn_once

logger = init_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")
Implementation = Literal["cpp", "triton", "reference"]

LIBRARY = Path(__file__).resolve().parent.parent / "_cpu_ops.so"

_IMPLEMENTATIONS = ("cpp", "triton", "reference")
# Narrowest first; the library holds every kernel once for each of them that the compiler could make.
ISA_LEVELS = ("portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx")

_forced: Implementation | None = None


@lru_cache(maxsize=1)
def cpu_ops() -> Any | None:
    """The namespace of C++ operators, loaded on first use; None when the library is missing, does not load or has no
    level that the machine runs.
    ValueError if VLLM_CPU_ISA is not one of ISA_LEVELS."""
    highest = envs.cpu_isa(ISA_LEVELS)  # the library reads the variable itself, and would ignore a bad value
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        reason = "not built" if not LIBRARY.exists() else f"not loadable ({error})"
        warn_once(logger, "CPU kernels are %s; using PyTorch, which is slower", reason)
        return None
    if torch.ops.vllm_cpu.set_isa(-1) < 0:
        text = "CPU kernels were built for another machine (VLLM_BUILD_LEVELS=all builds all levels)"
        warn_once(logger, "%s; using PyTorch, which is slower", text)
        return None
    if highest is not None:
        _warn_unless_compiled(torch.ops.vllm_cpu, highest)
    return torch.ops.vllm_cpu


def _warn_unless_compiled(operators: Any, highest: str) -> None:
    """Where the library lacks the level that VLLM_CPU_ISA names, and a narrower or a wider one runs in its place."""
    used, widest = operators.set_isa(-1), operators.set_isa(len(ISA_LEVELS) - 1)
    operators.set_isa(used)
    if used < ISA_LEVELS.index(highest) < widest or used > ISA_LEVELS.index(highest):
        logger.warning(
            "VLLM_CPU_ISA=%s: kernels were not compiled for this level and run at %s; VLLM_BUILD_LEVELS=all builds all",
            highest,
            ISA_LEVELS[used],
        )


@cache
def of_device(device_type: str) -> Implementation:
    """The implementation that operations on tensors of such a device run, unless another one is forced."""
    # Called hundreds of times a step, so the environment is read once.
    if envs.ops_reference():
        return "reference"
    if device_type == "cpu" and cpu_ops() is not None:
        return "cpp"
    if device_type == "cuda":
        is_wanted = envs.use_triton()
        if is_wanted and find_spec("triton") is not None:
            _check_triton_compiles()
            return "triton"
        warn_once(
            logger,
            "Triton is %s: operations on the GPU run in plain PyTorch, which is slower and holds whole rows of logits "
            "and of attention scores in memory",
            "not installed" if is_wanted else "not used (VLLM_USE_TRITON=0)",
        )
    return "reference"


def _check_triton_compiles() -> None:
    """RuntimeError where Triton could not build a kernel's launcher, which is C code that includes Python.h: otherwise
    that would come out at the first kernel that is not in its cache, while requests wait."""
    compiler = os.environ.get("CC")
    found = shutil.which(compiler.split()[0]) if compiler else shutil.which("gcc") or shutil.which("clang")
    scheme = sysconfig.get_default_scheme()
    # Debian's default is where pip installs, not where its headers are.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    header = Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"
    if found and header.exists():
        return
    lacking = f"Python.h ({header})" if found else f"a C compiler ({compiler or 'gcc or clang'})"
    raise RuntimeError(
        f"Triton compiles the GPU's kernels while it runs, and this machine has not {lacking}. Install "
        f"{'the development files of this Python (python3-dev)' if found else 'one (gcc)'}, or set VLLM_USE_TRITON=0 "
        "to run in plain PyTorch, which is slower"
    )


def implementation(tensor: Tensor) -> Implementation:
    """The implementation that an operation on `tensor` should run. A caller without it runs its reference."""
    return _forced or of_device(tensor.device.type)


def dispatched(reference: Callable[P, R]) -> Callable[P, R]:
    """The operation of a PyTorch reference whose first argument is a tensor on its device. It runs the C++ operator, or
    the function of the Triton module that has the name of the reference's module, with the same name and arguments; the
    reference alone has to have their defaults."""
    name = reference.__name__
    parameters = enumerate(signature(reference).parameters.values())
    defaults = [(at, each.name, each.default) for at, each in parameters if each.default is not Parameter.empty]

    @wraps(reference)
    def operation(*args: Any, **kwargs: Any) -> Any:
        which = implementation(args[0])
        if which == "reference":
            return reference(*args, **kwargs)
        function = getattr(torch.ops.vllm_cpu, name) if which == "cpp" else triton_function(name, reference.__module__)
        for at, each, value in defaults:
            if at >= len(args):
                kwargs.setdefault(each, value)
        return function(*args, **kwargs)

    return operation


def triton_function(name: str, module: str) -> Callable[..., Any]:
    """The Triton implementation of operation `name` of `module`. Imported here: Triton is optional."""
    return getattr(import_module(f"vllm.ops.triton.{module.rpartition('.')[2]}"), name)


@contextmanager
def force(name: Implementation) -> Iterator[None]:
    """Make every operation choose the implementation `name` while the context lasts. ValueError if there is none of
    that name, or it is "cpp" and the library is missing."""
    global _forced
    if name not in _IMPLEMENTATIONS:
        raise ValueError(f"name must be one of {', '.join(_IMPLEMENTATIONS)}, got {name!r}")
    if name == "cpp" and cpu_ops() is None:
        raise ValueError(f"name must not be 'cpp': {LIBRARY} is missing or does not load")
    before, _forced = _forced, name
    try:
        yield
    finally:
        _forced = before
