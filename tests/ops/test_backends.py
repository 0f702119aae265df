"""The choice of backends, and what may be imported when."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from backends import OPERATIONS, WITHOUT_CPP, backends

from vllm.ops import _dispatch
from vllm.ops._dispatch import force, implementation
from vllm.ops.topk import topk


def test_a_built_library_has_every_operation() -> None:
    for name in OPERATIONS:
        found = [backend for backend in backends(name) if not backend.startswith("cpp-")]
        has_cpp = _dispatch.LIBRARY.exists() and name not in WITHOUT_CPP
        expected = ["reference", "cpp"] if has_cpp else ["reference"]
        assert found == [*expected, "triton"]


def test_force_chooses_and_gives_back() -> None:
    tensor = torch.zeros(1)
    before = implementation(tensor)
    with force("triton"):
        with force("reference"):
            assert implementation(tensor) == "reference"
        assert implementation(tensor) == "triton"
    assert implementation(tensor) == before


def test_force_rejects_what_is_no_implementation() -> None:
    with (
        pytest.raises(ValueError, match="name must be one of cpp, triton, reference, got 'cuda'"),
        force("cuda"),
    ):
        pass


@pytest.fixture
def fresh_choice():
    """The choice of backends is made once a process; here it is made anew, and again afterwards."""
    _dispatch.of_device.cache_clear()
    yield
    _dispatch.of_device.cache_clear()


@pytest.mark.usefixtures("fresh_choice")
def test_the_environment_forces_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_OPS", "reference")
    assert implementation(torch.zeros(1)) == "reference"


@pytest.mark.usefixtures("fresh_choice")
def test_without_a_library_references_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dispatch, "cpu_ops", lambda: None)
    assert implementation(torch.zeros(1)) == "reference"
    assert topk(torch.tensor([[1.0, 3.0, 2.0]]), 2)[1].tolist() == [[1, 2]]
    with pytest.raises(ValueError, match="name must not be 'cpp'"), force("cpp"):
        pass


@pytest.mark.usefixtures("fresh_choice")
class TestTritonsCompiler:
    """Triton builds C code at run time. What it lacks is said when the first operation is chosen: at start."""

    @pytest.fixture(autouse=True)
    def no_compiler(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pytest.importorskip("triton")
        monkeypatch.setattr(_dispatch.shutil, "which", lambda name: None)
        monkeypatch.delenv("CC", raising=False)

    def test_without_one(self) -> None:
        with pytest.raises(RuntimeError, match="a C compiler.*VLLM_USE_TRITON=0"):
            _dispatch.of_device("cuda")

    def test_it_may_be_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CC", "no-such-compiler -O1")
        with pytest.raises(RuntimeError, match="no-such-compiler"):
            _dispatch.of_device("cuda")

    def test_without_pythons_header(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(_dispatch.shutil, "which", lambda name: name)
        monkeypatch.setattr(_dispatch.sysconfig, "get_paths", lambda scheme: {"include": str(tmp_path)})
        with pytest.raises(RuntimeError, match=r"Python\.h.*python3-dev"):
            _dispatch.of_device("cuda")

    def test_pytorch_needs_none(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("VLLM_USE_TRITON", "0")
        assert _dispatch.of_device("cuda") == "reference"


def test_triton_is_imported_only_when_it_runs() -> None:
    program = """
import sys
import vllm.v1.worker.gpu.sample.sampler, vllm.ops.paged_attention, vllm.ops.rms_norm
import vllm.ops.gate_and_mul, vllm.ops.rotary
assert "triton" not in sys.modules
assert not any(name.startswith("vllm.ops.triton") for name in sys.modules)
import vllm.ops.triton.fill_token_ids
assert "triton" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
