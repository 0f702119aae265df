"""Which instruction-set levels of the CPU kernels setup.py compiles, and what a library that lacks some does."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from layouts import compiled_levels, needs_kernels

from vllm.ops import _dispatch
from vllm.ops._dispatch import ISA_LEVELS

SETUP = Path(__file__).parents[1] / "setup.py"

ZEN_4 = "avx2 fma f16c avx512f avx512bw avx512vl avx512dq avx512_bf16 avx512_vnni avx512vbmi"


@pytest.fixture(scope="module")
def build() -> ModuleType:
    pytest.importorskip("setuptools")
    spec = importlib.util.spec_from_file_location("build_of_kernels", SETUP)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_levels_are_those_of_the_library(build: ModuleType) -> None:
    assert (build.PORTABLE, *build.LEVELS) == ISA_LEVELS


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        ("sse sse2", "portable"),
        ("avx2 fma f16c", "avx2"),
        ("avx2", "portable"),
        ("avx2 fma avx512f avx512bw avx512vl", "avx2"),
        ("avx2 fma avx512f avx512bw avx512vl avx512dq", "avx512"),
        ("avx2 fma avx512f avx512bw avx512vl avx512dq avx512_vnni avx512vbmi", "avx512_vnni"),
        (ZEN_4, "avx512_bf16"),
        (ZEN_4 + " amx_bf16 avx512_fp16", "avx512_fp16"),
        (ZEN_4 + " avx512_fp16 amx_tile amx_bf16 amx_int8", "amx"),
        (ZEN_4.replace("avx512_vnni", "avx512_fp16"), "avx512"),
    ],
)
def test_the_native_level_is_the_widest_whose_flags_are_there(
    build: ModuleType, tmp_path: Path, flags: str, level: str
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nflags\t\t: fpu {flags}\nbugs\t\t: none\n\nprocessor\t: 1\n")
    assert build.native_levels(cpuinfo) == {level}


def test_a_machine_that_does_not_say_gets_all_levels(build: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nFeatures\t: fp asimd\n")
    assert build.native_levels(tmp_path / "cpuinfo") == build.native_levels(tmp_path / "none") == set(ISA_LEVELS)


def test_chosen_levels(build: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    native = build.native_levels(Path("/proc/cpuinfo"))
    monkeypatch.delenv("VLLM_CPU_ISA", raising=False)
    assert build.chosen_levels("all") == set(ISA_LEVELS)
    assert build.chosen_levels("native") == native
    assert build.chosen_levels("portable") == {"portable"}
    assert build.chosen_levels("avx2, portable,avx512") == {"portable", "avx2", "avx512"}
    with pytest.raises(SystemExit, match="VLLM_BUILD_LEVELS=avx2,mmx: should be all, native or some of portable,avx2,"):
        build.chosen_levels("avx2,mmx")
    # Levels asked for at run time are there.
    monkeypatch.setenv("VLLM_CPU_ISA", "portable")
    assert build.chosen_levels("native") == native | {"portable"}
    monkeypatch.setenv("VLLM_CPU_ISA", "mmx")
    assert build.chosen_levels("native") == native


def test_a_library_with_more_levels_is_kept(build: ModuleType, tmp_path: Path) -> None:
    assert not build.is_built(tmp_path, "digest", set())
    (tmp_path / "stamp").write_text("digest\nportable\navx2\navx512_bf16")
    assert not build.is_built(tmp_path, "digest", set())
    (tmp_path / build.LIBRARY).touch()
    assert build.is_built(tmp_path, "digest", set())
    assert build.is_built(tmp_path, "digest", {"avx512_bf16"})
    assert not build.is_built(tmp_path, "digest", {"avx512_bf16", "avx512"})
    assert not build.is_built(tmp_path, "another", {"avx512_bf16"})


def test_progress_of_a_build_in_a_log(build: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    build.show_progress("[0/2] Re-checking globbed directories...\n")
    for done in range(1, 62):
        build.show_progress(f"[{done}/61] Building CXX object linear.cpp.o\n")
        build.show_progress("linear.cpp:3: warning: [1/2]\n")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8
    assert (lines[0], lines[-1]) == ("building CPU kernels, 8 of 61", "building CPU kernels, 61 of 61")


@needs_kernels
def test_the_library_has_the_level_of_this_machine(build: ModuleType, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--emulated"):
        pytest.skip("the emulated library runs wider levels than the machine")
    native = build.native_levels(Path("/proc/cpuinfo"))
    assert set(compiled_levels()[-1:]) == native


@pytest.mark.parametrize(
    ("compiled", "highest", "used"),
    [
        ((0, 4), "avx2", "portable"),
        ((0, 4), "avx512_vnni", "portable"),
        ((0, 4), "avx512_bf16", None),
        ((4,), "portable", "avx512_bf16"),
        ((4,), "avx512_vnni", "avx512_bf16"),
        ((4,), "avx512_bf16", None),
        ((4,), "amx", None),
    ],
)
def test_a_level_that_was_not_compiled_is_a_warning(
    compiled: tuple[int, ...], highest: str, used: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU whose widest level is avx512_bf16."""
    names, level = ISA_LEVELS, 0

    def set_isa(wanted: int) -> int:
        nonlocal level
        if wanted >= 0:
            level = max((i for i in compiled if i <= wanted), default=compiled[0])
        return level

    before = set_isa(names.index(highest))
    found: list[str] = []
    monkeypatch.setattr(_dispatch.logger, "warning", lambda text, *values: found.append(text % values))
    _dispatch._warn_unless_compiled(SimpleNamespace(set_isa=set_isa), highest)
    assert set_isa(-1) == before
    text = f"VLLM_CPU_ISA={highest}: kernels were not compiled for this level and run at {used};"
    assert [line.startswith(text) for line in found] == ([True] if used else [])


def test_a_library_for_another_machine_is_not_used(vllm_log: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_ISA", raising=False)
    library = SimpleNamespace(load_library=lambda path: None, vllm_cpu=SimpleNamespace(set_isa=lambda level: -1))
    monkeypatch.setattr(_dispatch.torch, "ops", library)
    monkeypatch.setattr(_dispatch, "warn_once", lambda logger, text, *values: logger.warning(text, *values))
    assert _dispatch.cpu_ops.__wrapped__() is None
    assert "CPU kernels were built for another machine" in vllm_log.text and "using PyTorch" in vllm_log.text
