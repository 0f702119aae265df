"""The device that the engine would run on. Importing it looks for a GPU, and so imports torch."""

from __future__ import annotations

import enum
import os
import platform
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.config.quantization import QUANTIZATIONS
from vllm.utils.device import cuda_problem

if TYPE_CHECKING:
    import torch


class PlatformEnum(enum.Enum):
    """Kinds of devices. The engine runs on CUDA and CPU."""

    CUDA = enum.auto()
    ROCM = enum.auto()
    TPU = enum.auto()
    XPU = enum.auto()
    CPU = enum.auto()
    OOT = enum.auto()
    UNSPECIFIED = enum.auto()


class CpuArchEnum(enum.Enum):
    """Kinds of CPUs."""

    X86 = enum.auto()
    ARM = enum.auto()
    POWERPC = enum.auto()
    S390X = enum.auto()
    RISCV = enum.auto()
    OTHER = enum.auto()
    UNKNOWN = enum.auto()


_CPU_ARCHS = {
    "x86_64": CpuArchEnum.X86,
    "amd64": CpuArchEnum.X86,
    "aarch64": CpuArchEnum.ARM,
    "arm64": CpuArchEnum.ARM,
    "ppc64le": CpuArchEnum.POWERPC,
    "s390x": CpuArchEnum.S390X,
    "riscv64": CpuArchEnum.RISCV,
}


class DeviceCapability(NamedTuple):
    """A GPU's compute capability."""

    major: int
    minor: int

    def as_version_str(self) -> str:
        """Such as "9.0"."""
        return f"{self.major}.{self.minor}"

    def to_int(self) -> int:
        """Such as 90."""
        return self.major * 10 + self.minor


class Platform:
    """A device, as callers ask of it; see CpuPlatform and CudaPlatform for the answers that differ.

    Attributes:
        device_type: torch's name of the device: "cpu" or "cuda".
        device_name: the same.
        dispatch_key: torch's dispatch key.
        dist_backend: torch.distributed's backend for such devices.
        device_control_env_var: the environment variable that says which devices there are.
    """

    _enum = PlatformEnum.UNSPECIFIED
    device_name = ""
    device_type = ""
    dispatch_key = "CPU"
    ray_device_key = ""
    dist_backend = ""
    device_control_env_var = "VLLM_DEVICE_CONTROL_ENV_VAR_PLACEHOLDER"
    simple_compile_backend = "eager"
    supported_quantization: tuple[str, ...] = tuple(name for name in QUANTIZATIONS if name is not None)

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """The dtypes that models may have, the preferred one first."""
        import torch

        return [torch.bfloat16, torch.float16, torch.float32]

    def is_cuda(self) -> bool:
        """Whether it is an NVIDIA GPU."""
        return self._enum is PlatformEnum.CUDA

    def is_cpu(self) -> bool:
        """Whether it is a CPU."""
        return self._enum is PlatformEnum.CPU

    def is_rocm(self) -> bool:
        """Whether it is an AMD GPU: the engine runs on none."""
        return self._enum is PlatformEnum.ROCM

    def is_tpu(self) -> bool:
        """Whether it is a TPU: the engine runs on none."""
        return self._enum is PlatformEnum.TPU

    def is_xpu(self) -> bool:
        """Whether it is an Intel GPU: the engine runs on none."""
        return self._enum is PlatformEnum.XPU

    def is_out_of_tree(self) -> bool:
        """Whether a plug-in brought it: none does."""
        return self._enum is PlatformEnum.OOT

    def is_unspecified(self) -> bool:
        """Whether there is none."""
        return self._enum is PlatformEnum.UNSPECIFIED

    def is_zen_cpu(self) -> bool:
        """Whether it is a CPU with kernels of its vendor: none has them here."""
        return False

    def is_cuda_alike(self) -> bool:
        """Whether it is a GPU of NVIDIA or AMD."""
        return self._enum in (PlatformEnum.CUDA, PlatformEnum.ROCM)

    def is_sleep_mode_available(self) -> bool:
        """Whether an engine can give its memory back and take it again."""
        return True

    @classmethod
    def get_cpu_architecture(cls) -> CpuArchEnum:
        """The host's CPU."""
        machine = platform.machine().lower()
        return _CPU_ARCHS.get(machine, CpuArchEnum.OTHER if machine else CpuArchEnum.UNKNOWN)

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        """A GPU's capability; None for a CPU."""
        return None

    @classmethod
    def has_device_capability(cls, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        """Whether a GPU has at least this capability, a pair or a number such as 90."""
        own = cls.get_device_capability(device_id)
        return own is not None and own.to_int() >= _as_int(capability)

    @classmethod
    def is_device_capability(cls, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        """Whether it has exactly this one."""
        own = cls.get_device_capability(device_id)
        return own is not None and own.to_int() == _as_int(capability)

    @classmethod
    def is_device_capability_family(cls, capability: int, device_id: int = 0) -> bool:
        """Whether its major version is that of the number."""
        own = cls.get_device_capability(device_id)
        return own is not None and own.major == capability // 10

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """The maker's name of it."""
        return cls.device_name

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        """A name that no other device has.

        Raises:
            NotImplementedError: a CPU has none.
        """
        raise NotImplementedError(f"a {cls.device_type or 'missing'} device has no UUID")

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Its memory in bytes; of a CPU, that which the process may use."""
        raise NotImplementedError

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        """Bytes that this process has of it."""
        raise NotImplementedError

    @classmethod
    def device_count(cls) -> int:
        """How many this process may use."""
        return 1

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Make it the current one."""

    @classmethod
    def synchronize(cls) -> None:
        """Wait for what is queued on it."""

    @classmethod
    def empty_cache(cls) -> None:
        """Give memory back that torch keeps for later."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Seed torch's generators, of every device."""
        import torch

        torch.manual_seed(seed)

    @classmethod
    def seed_everything(cls, seed: int | None = None) -> None:
        """Seed Python's, numpy's and torch's generators; None leaves them as they are."""
        from vllm.upstream.utils.torch_utils import set_random_seed

        set_random_seed(seed)

    @classmethod
    def inference_mode(cls) -> Any:
        """torch.inference_mode(), to be entered."""
        import torch

        return torch.inference_mode()

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """Whether host memory can be pinned for it."""
        return False

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        """Multiprocessors of a GPU, cores of a CPU."""
        return os.cpu_count() or 1

    @classmethod
    def supports_fp8(cls) -> bool:
        """Whether 8-bit floats are multiplied: there are no kernels for it."""
        return False

    @classmethod
    def supports_mx(cls) -> bool:
        """Whether microscaling formats are multiplied: there are no kernels for it."""
        return False

    @classmethod
    def is_fp8_fnuz(cls) -> bool:
        """Whether its 8-bit floats are those of older AMD GPUs."""
        return False

    @classmethod
    def fp8_dtype(cls) -> torch.dtype:
        """torch's 8-bit float."""
        import torch

        return torch.float8_e4m3fn

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        """Whether steps are replayed from CUDA graphs."""
        return False

    @classmethod
    def use_custom_allreduce(cls) -> bool:
        """Whether ranks of one machine add up through shared memory."""
        return False

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """
        Raises:
            ValueError: models cannot have this dtype here.
        """
        import torch

        if dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"models are float32, float16 or bfloat16 here, not {dtype}")


class CpuPlatform(Platform):
    """A CPU."""

    _enum = PlatformEnum.CPU
    device_name = "cpu"
    device_type = "cpu"
    dist_backend = "gloo"
    device_control_env_var = "CPU_VISIBLE_MEMORY_NODES"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """See Platform."""
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        """See Platform."""
        with open("/proc/self/statm", encoding="ascii") as file:
            return float(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))

    @classmethod
    def use_custom_allreduce(cls) -> bool:
        """See Platform."""
        return True


class CudaPlatform(Platform):
    """An NVIDIA GPU."""

    _enum = PlatformEnum.CUDA
    device_name = "cuda"
    device_type = "cuda"
    dispatch_key = "CUDA"
    ray_device_key = "GPU"
    dist_backend = "nccl"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        """See Platform."""
        import torch

        return DeviceCapability(*torch.cuda.get_device_capability(device_id))

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """See Platform."""
        import torch

        return torch.cuda.get_device_name(device_id)

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        """See Platform."""
        import torch

        return f"GPU-{torch.cuda.get_device_properties(device_id).uuid}"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """See Platform."""
        import torch

        return torch.cuda.get_device_properties(device_id).total_memory

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        """See Platform."""
        import torch

        return float(torch.cuda.max_memory_allocated(device))

    @classmethod
    def device_count(cls) -> int:
        """See Platform."""
        import torch

        return torch.cuda.device_count()

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """See Platform."""
        import torch

        torch.cuda.set_device(device)

    @classmethod
    def synchronize(cls) -> None:
        """See Platform."""
        import torch

        torch.cuda.synchronize()

    @classmethod
    def empty_cache(cls) -> None:
        """See Platform."""
        import torch

        torch.cuda.empty_cache()

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """See Platform."""
        return True

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        """See Platform."""
        import torch

        return torch.cuda.get_device_properties(device_id).multi_processor_count

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        """See Platform."""
        return True


def _as_int(capability: tuple[int, int] | int) -> int:
    return capability if isinstance(capability, int) else DeviceCapability(*capability).to_int()


current_platform: Platform = CudaPlatform() if cuda_problem() is None else CpuPlatform()


IS_AITER_FOUND = False
"""Whether the library of AMD's kernels is installed that upstream uses on AMD's GPUs."""


def is_aiter_found() -> bool:
    """See IS_AITER_FOUND."""
    return IS_AITER_FOUND


def is_aiter_found_and_supported() -> bool:
    """See IS_AITER_FOUND."""
    return IS_AITER_FOUND
