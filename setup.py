"""Builds the CPU kernels with CMake. Everything else about the package is in pyproject.toml."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.build_ext import build_ext

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # setuptools before 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
FOLDER = ROOT / "build" / "cpu_ops"
LIBRARY = "_cpu_ops.so"
EMULATED = "_cpu_ops_emulated"


class BuildError(Exception):
    """The kernels cannot be built here, for the reason given."""


class CMakeBuild(build_ext):
    """Puts `_cpu_ops.so` beside the package; on failure warns once and leaves it out."""

    def get_ext_filename(self, fullname: str) -> str:
        # Loaded by torch, not imported, so no Python ABI belongs in its name.
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name)).resolve()
        try:
            built = build_library(FOLDER)
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
            if not is_built(FOLDER, source_digest(find_torch()[1])):
                raise BuildError("the kernels were not built from these sources: pip install --editable .")
            # The one that configured the folder, or all would be built again.
            cache = (FOLDER / "CMakeCache.txt").read_text().splitlines()
            cmake = next(line.partition("=")[2] for line in cache if line.startswith("CMAKE_COMMAND:"))
            run([cmake, "--build", str(FOLDER), "--target", EMULATED, "--parallel", str(os.cpu_count() or 1)])
        except BuildError as error:
            raise SystemExit(" ".join(str(error).split())) from error
        print(FOLDER / f"{EMULATED}.so")


class AnyPythonWheel(bdist_wheel):
    """The library depends on the platform, not on the Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


def is_built(folder: Path, digest: str) -> bool:
    stamp = folder / "stamp"
    return (folder / LIBRARY).exists() and stamp.exists() and stamp.read_text() == digest


def build_library(folder: Path) -> Path:
    """Configure and build in `folder` unless its library is of just these sources; the library's path."""
    torch_folder, torch_version = find_torch()
    library, stamp = folder / LIBRARY, folder / "stamp"
    digest = source_digest(torch_version)
    if is_built(folder, digest):
        return library
    cmake = shutil.which("cmake")
    if cmake is None:
        raise BuildError("cmake was not found")
    folder.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    # A cache made with another cmake, ninja or torch (pip's build environments come and go) names lost paths.
    ninja = shutil.which("ninja")
    tools, made_with = f"{cmake} {ninja} {torch_folder}", folder / "made_with"
    if not made_with.exists() or made_with.read_text() != tools:
        (folder / "CMakeCache.txt").unlink(missing_ok=True)
        shutil.rmtree(folder / "CMakeFiles", ignore_errors=True)
        made_with.write_text(tools)
    configure = [cmake, "-S", str(ROOT), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release"]
    configure += [f"-DTORCH_INCLUDE_DIR={torch_folder / 'include'}", f"-DTORCH_LIB_DIR={torch_folder / 'lib'}"]
    if ninja:
        configure += ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
    run(configure)
    run([cmake, "--build", str(folder), "--parallel", str(os.cpu_count() or 1)])
    stamp.write_text(digest)
    return library


def find_torch() -> tuple[Path, str]:
    """Torch's folder and version, without the seconds that importing it takes."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        raise BuildError("torch is not installed where the package is built")
    folder = Path(spec.submodule_search_locations[0])
    version = folder / "version.py"
    return folder, version.read_text() if version.exists() else ""


def source_digest(torch_version: str) -> str:
    """What the library is made of: its sources, the compiler asked for and torch's version."""
    digest = hashlib.sha256(torch_version.encode())
    digest.update(f"{os.environ.get('CXX', '')} {os.environ.get('CXXFLAGS', '')}".encode())
    for path in (ROOT / "CMakeLists.txt", *sorted((ROOT / "csrc" / "cpu").rglob("*.*"))):
        digest.update(str(path.relative_to(ROOT)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def run(command: list[str]) -> None:
    """Run a build step quietly.

    Raises:
        BuildError: it failed; the last lines of its output say why.
    """
    try:
        result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]} does not run: {error}") from error
    if result.returncode:
        raise BuildError(f"{' '.join(command[:2])} failed:\n" + "\n".join(result.stdout.splitlines()[-25:]))


def warn(reason: str) -> None:
    print(
        f"\nWARNING: the CPU kernels were not built: {reason}\n"
        "WARNING: the package works without them, more slowly, on PyTorch's own operators.\n",
        file=sys.stderr,
    )


setup(
    ext_modules=[Extension("vllm._cpu_ops", sources=[], optional=True)],
    cmdclass={"build_ext": CMakeBuild, "build_emulated": BuildEmulated, "bdist_wheel": AnyPythonWheel},
)
