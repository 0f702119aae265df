"""Builds the CPU kernels with CMake. Everything else about the package is in pyproject.toml."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
FOLDER = ROOT / "build" / "cpu_ops"
LIBRARY = "_cpu_ops.so"
EMULATED = "_cpu_ops_emulated"

# The level that runs on every machine, and those beside it, narrowest first, with what /proc/cpuinfo calls what they
# add: see csrc/cpu/isa.cpp.
PORTABLE = "portable"
LEVELS = {
    "avx2": {"avx2", "fma"},
    "avx512": {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    "avx512_vnni": {"avx512_vnni"},
    "avx512_bf16": {"avx512_bf16", "avx512vbmi"},
    "avx512_fp16": {"avx512_fp16"},
    "amx": {"amx_tile", "amx_bf16", "amx_int8"},
}


class BuildError(Exception):
    """The kernels cannot be built here, for the reason given."""


class CMakeBuild(build_ext):
    """Puts `_cpu_ops.so` beside the package; on failure warns once and leaves it out."""

    def finalize_options(self) -> None:
        super().finalize_options()
        # A library that is built where it lies, as by an editable install, serves this machine; a wheel may serve any.
        self.default_levels = "native" if self.inplace else "all"

    def get_ext_filename(self, fullname: str) -> str:
        # Loaded by torch, not imported, so no Python ABI belongs in its name.
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        try:
            built = build_library(FOLDER, chosen_levels(os.environ.get("VLLM_BUILD_LEVELS") or self.default_levels))
        except BuildError as error:
            warn(str(error))
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        # A process may have the old file mapped: replace it, never write into it.
        fresh = target.with_name(f"{target.name}.{os.getpid()}")
        shutil.copy2(built, fresh)
        os.replace(fresh, target)


class BuildEmulated(Command):
    """Prints the path of a library for tests that emulates instructions (see csrc/cpu/half_lanes.h), made of what is
    built already and the emulated kernels; on failure the reason, with exit code 1."""

    user_options: ClassVar[list[tuple[str, str | None, str | None]]] = []

    def initialize_options(self) -> None: ...

    def finalize_options(self) -> None: ...

    def run(self) -> None:
        try:
            if not is_built(FOLDER, source_digest(find_torch()[1]), {PORTABLE, *LEVELS}):
                raise BuildError(
                    "the kernels were not built from these sources at all levels: "
                    "VLLM_BUILD_LEVELS=all pip install --no-build-isolation --editable ."
                )
            # The one that configured the folder, or all would be built again.
            cache = (FOLDER / "CMakeCache.txt").read_text().splitlines()
            cmake = next(line.partition("=")[2] for line in cache if line.startswith("CMAKE_COMMAND:"))
            run([cmake, "--build", str(FOLDER), "--target", EMULATED, "--parallel", str(num_cores())])
        except BuildError as error:
            raise SystemExit(" ".join(str(error).split())) from error
        print(FOLDER / f"{EMULATED}.so")


class BuildKernels(Command):
    """Compiles what needs no torch, so that it can be downloaded meanwhile: `build_ext` adds the rest."""

    user_options: ClassVar[list[tuple[str, str | None, str | None]]] = []

    def initialize_options(self) -> None: ...

    def finalize_options(self) -> None: ...

    def run(self) -> None:
        levels = chosen_levels(os.environ.get("VLLM_BUILD_LEVELS") or "native")
        # `build_ext` says what is wrong.
        with contextlib.suppress(BuildError):
            build_in(
                FOLDER, levels, Path(sysconfig.get_path("purelib")) / "torch", ["-DVLLM_KERNELS_ONLY=ON"], "kernels"
            )


class Requirements(Command):
    """Prints what the package needs, one a line."""

    user_options: ClassVar[list[tuple[str, str | None, str | None]]] = [("extras=", None, "extras, by commas")]

    def initialize_options(self) -> None:
        self.extras = ""

    def finalize_options(self) -> None: ...

    def run(self) -> None:
        known = self.distribution.extras_require
        extras = [each for name in self.extras.split(",") for each in known.get(name, [])]
        print("\n".join([*self.distribution.install_requires, *extras]))


class BuildPackage(build_py):
    """The package and, for type checkers, the stubs of the modules that it makes when they are imported."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            sys.path.insert(0, str(ROOT))
            from vllm.upstream import stubs

            stubs.write(Path(self.build_lib) / "vllm-stubs")


class AnyPythonWheel(bdist_wheel):
    """The library depends on the platform, not on the Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


def chosen_levels(wanted: str) -> set[str]:
    """The levels to compile: of "all", "native" (and what VLLM_CPU_ISA names) or names with commas between.

    Raises:
        SystemExit: there is no such level.
    """
    every = {PORTABLE, *LEVELS}
    if wanted == "all":
        return every
    if wanted == "native":
        return native_levels(Path("/proc/cpuinfo")) | ({os.environ.get("VLLM_CPU_ISA", "")} & every)
    names = {name.strip() for name in wanted.split(",")}
    if names - every:
        raise SystemExit(f"VLLM_BUILD_LEVELS={wanted}: should be all, native or some of {PORTABLE},{','.join(LEVELS)}")
    return names


def native_levels(cpuinfo: Path) -> set[str]:
    """The widest level that this machine runs, and no other; all if it does not say what it has."""
    try:
        flags = set(re.findall(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)[0].split())
    except (OSError, IndexError):
        return {PORTABLE, *LEVELS}
    widest = {PORTABLE}
    for name, needed in LEVELS.items():
        if not needed <= flags:
            break
        widest = {name}
    return widest


def is_built(folder: Path, digest: str, levels: set[str]) -> bool:
    """Whether the folder's library is of just these sources and has these levels, at least."""
    stamp = folder / "stamp"
    if not (folder / LIBRARY).exists() or not stamp.exists():
        return False
    built_digest, *built_levels = stamp.read_text().split()
    return built_digest == digest and levels <= set(built_levels)


def build_library(folder: Path, levels: set[str]) -> Path:
    """Configure and build in `folder` unless its library is of just these sources; the library's path."""
    torch_folder, torch_version = find_torch()
    library, stamp = folder / LIBRARY, folder / "stamp"
    digest = source_digest(torch_version)
    if is_built(folder, digest, levels):
        return library
    stamp.unlink(missing_ok=True)
    build_in(folder, levels, torch_folder, ["-DVLLM_KERNELS_ONLY=OFF"], "all")
    stamp.write_text("\n".join([digest, *names_of(levels)]))
    return library


def names_of(levels: set[str]) -> list[str]:
    """Narrowest first."""
    return [name for name in (PORTABLE, *LEVELS) if name in levels]


def build_in(folder: Path, levels: set[str], torch_folder: Path, options: list[str], target: str) -> None:
    """Configure `folder`, and build a target there."""
    cmake, began = find_tool("cmake"), time.monotonic()
    if cmake is None:
        raise BuildError("cmake was not found")
    folder.mkdir(parents=True, exist_ok=True)
    # A cache made with another cmake, ninja or torch (pip's build environments come and go) names lost paths.
    ninja = find_tool("ninja")
    tools, made_with = f"{cmake} {ninja} {torch_folder}", folder / "made_with"
    if not made_with.exists() or made_with.read_text() != tools:
        (folder / "CMakeCache.txt").unlink(missing_ok=True)
        shutil.rmtree(folder / "CMakeFiles", ignore_errors=True)
        made_with.write_text(tools)
    configure = [cmake, "-S", str(ROOT), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release", *options]
    configure += [f"-DTORCH_INCLUDE_DIR={torch_folder / 'include'}", f"-DTORCH_LIB_DIR={torch_folder / 'lib'}"]
    configure += [f"-DVLLM_BUILD_LEVELS={';'.join(names_of(levels))}"]
    if ninja:
        configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    print(f"building CPU kernels for {', '.join(names_of(levels))}", flush=True)
    run(configure)
    run([cmake, "--build", str(folder), "--target", target, "--parallel", str(num_cores())], show_progress)
    print(f"{chr(10) if sys.stdout.isatty() else ''}built in {time.monotonic() - began:.0f} s", flush=True)


def find_tool(name: str) -> str | None:
    """The tool's path in the environment that runs this, activated or not, or in the system."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_torch() -> tuple[Path, str]:
    """Torch's folder and version, without the seconds that importing it takes."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("torch is not installed where the package is built")
    folder = Path(spec.submodule_search_locations[0])
    version = folder / "version.py"
    return folder, version.read_text() if version.exists() else ""


def source_digest(torch_version: str) -> str:
    """A digest of what the library is made of: its sources, the compiler asked for and torch's version."""
    digest = hashlib.sha256(torch_version.encode())
    digest.update(f"{os.environ.get('CXX', '')} {os.environ.get('CXXFLAGS', '')}".encode())
    for path in (ROOT / "CMakeLists.txt", *sorted((ROOT / "csrc" / "cpu").rglob("*.*"))):
        digest.update(str(path.relative_to(ROOT)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def run(command: list[str], on_line: Callable[[str], None] = lambda line: None) -> None:
    """Run a build step, calling `on_line` with all lines that it prints.

    Raises:
        BuildError: it failed; the last lines of its output say why.
    """
    last: deque[str] = deque(maxlen=25)
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            for line in process.stdout or ():
                last.append(line.rstrip("\n"))
                on_line(line)
    except OSError as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error
    if process.returncode:
        raise BuildError(f"{' '.join(command[:2])} failed:\n" + "\n".join(last))


def show_progress(line: str) -> None:
    """Show how many files are compiled, by a line of ninja's; where the output is no terminal, at each eighth of
    them."""
    found = re.match(r"\[(\d+)/(\d+)\] (?:Building|Linking)", line)
    if found is None:
        return
    done, total = map(int, found.groups())
    text = f"building CPU kernels, {done} of {total}"
    if sys.stdout.isatty():
        print(f"\r{text}", end="", flush=True)
    elif done * 8 // total > (done - 1) * 8 // total:
        print(text, flush=True)


def warn(reason: str) -> None:
    print(
        f"\nWARNING: the CPU kernels were not built: {reason}\n"
        "WARNING: the package works without them, more slowly, on PyTorch's own operators.\n",
        file=sys.stderr,
    )


if __name__ == "__main__":
    setup(
        ext_modules=[Extension("vllm._cpu_ops", sources=[], optional=True)],
        cmdclass={
            "build_py": BuildPackage,
            "build_ext": CMakeBuild,
            "build_emulated": BuildEmulated,
            "build_kernels": BuildKernels,
            "requirements": Requirements,
            "bdist_wheel": AnyPythonWheel,
        },
    )
