"""current_platform answers for the device that the engine would run on."""

from __future__ import annotations

import os

import pytest
import torch

from vllm.platforms import CpuArchEnum, DeviceCapability, Platform, current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.cuda import CudaPlatform
from vllm.utils.device import cuda_problem


def test_it_is_the_device_that_auto_chooses():
    has_cuda = cuda_problem() is None
    assert isinstance(current_platform, Platform)
    assert current_platform.device_type == ("cuda" if has_cuda else "cpu")
    assert (current_platform.is_cuda(), current_platform.is_cpu()) == (has_cuda, not has_cuda)
    assert not (current_platform.is_rocm() or current_platform.is_tpu() or current_platform.is_xpu())
    assert torch.bfloat16 in current_platform.supported_dtypes


def test_a_cpu():
    cpu = CpuPlatform()
    assert (cpu.device_name, cpu.dist_backend, cpu.dispatch_key) == ("cpu", "gloo", "CPU")
    assert cpu.get_device_name() == "cpu" and cpu.device_count() == 1
    assert cpu.get_device_capability() is None
    assert not cpu.has_device_capability(75) and not cpu.is_device_capability_family(90)
    assert not cpu.is_cuda_alike() and not cpu.is_pin_memory_available() and not cpu.supports_fp8()
    assert cpu.num_compute_units() == os.cpu_count()
    assert 2**24 < cpu.get_current_memory_usage() < cpu.get_device_total_memory()
    assert isinstance(cpu.get_cpu_architecture(), CpuArchEnum)
    with pytest.raises(NotImplementedError):
        cpu.get_device_uuid()
    with pytest.raises(ValueError, match="float64"):
        cpu.check_if_supports_dtype(torch.float64)
    with cpu.inference_mode():
        assert torch.is_inference_mode_enabled()


def test_seeds():
    draws = []
    for _ in range(2):
        current_platform.seed_everything(3)
        draws.append(torch.rand(2).tolist())
    current_platform.manual_seed_all(3)
    draws.append(torch.rand(2).tolist())
    assert draws[0] == draws[1] == draws[2]


def test_a_gpu_is_asked_for_its_capability(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device_id: (9, 0))
    gpu = CudaPlatform()
    assert gpu.is_cuda() and gpu.is_cuda_alike() and not gpu.is_cpu()
    assert gpu.get_device_capability() == DeviceCapability(9, 0)
    assert gpu.has_device_capability(80) and gpu.has_device_capability((9, 0)) and not gpu.has_device_capability(100)
    assert gpu.is_device_capability((9, 0)) and not gpu.is_device_capability(89)
    assert gpu.is_device_capability_family(90)
    assert DeviceCapability(8, 6).as_version_str() == "8.6"
