"""The tests that need a device, in separate pytest processes, with the installed packages."""

from __future__ import annotations

import ast
import re
import sys
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from common import usable_cores

from gpu.supervise import ROOT, Process

_OUTCOME = re.compile(r"^(\S*::.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS)\b")
_TAIL_CHARACTERS = 6000
_MAX_PROCESSES = 8
# All tests passed, or all were deselected.
_SOUND = (0, 5)
# No test needs a plugin, and some take seconds to load.
_ENVIRONMENT = {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def find_tests(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Test files that may have a test for a device, and those of them that cannot be imported, with the missing
    package."""
    files: list[Path] = []
    left_out: dict[str, str] = {}
    for path in sorted(folder.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        module = ast.parse(text)
        if "mark.gpu" not in text and not _asks_for_device(module):
            continue
        missing = next((name for name in _imported_at_once(module) if not _is_here(name, path)), None)
        if missing is None:
            files.append(path)
        else:
            left_out[path.relative_to(folder).as_posix()] = missing
    return files, left_out


def _asks_for_device(module: ast.Module) -> bool:
    """Whether a test or a fixture takes a device or a backend: "cuda" and, on a device, "triton" are marked gpu."""
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    return any(
        (one.name.startswith("test_") or one.decorator_list)
        and any(arg.arg in ("device", "backend") for arg in one.args.args)
        for one in functions
    )


def _imported_at_once(module: ast.Module) -> list[str]:
    """Top-level packages that importing the module imports."""
    names: list[str] = []
    for node in module.body:
        if isinstance(node, ast.Import):
            names += [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module.split(".")[0])
    return names


def _is_here(name: str, path: Path) -> bool:
    helpers = (path.parent, ROOT / "tests" / "support", ROOT)
    if any((folder / name).is_dir() or (folder / f"{name}.py").is_file() for folder in helpers):
        return True
    return find_spec(name) is not None


class Suite:
    """pytest in the background, in a few processes, as they mostly wait for compilers.

    Args:
        folder: for the processes' output.
        has_device: whether there is a device, so that there are tests to run.
    """

    def __init__(self, folder: Path, has_device: bool) -> None:
        files, self._left_out = find_tests(ROOT / "tests")
        self._has_device = has_device
        self._began = time.monotonic()
        options = [
            "-m",
            "gpu",
            "-v",
            "--continue-on-collection-errors",
            "--tb=short",
            "-p",
            "no:cacheprovider",
            "-c",
            str(ROOT / "pyproject.toml"),
        ]
        self._runs: list[tuple[Process, Path]] = []
        for number, share in enumerate(_deal(files, max(1, min(_MAX_PROCESSES, usable_cores() // 2)))):
            log = folder / f"pytest-{number}.log"
            command = [sys.executable, "-u", "-m", "pytest", *options, *map(str, share)]
            with log.open("wb") as output:
                self._runs.append((Process(command, _ENVIRONMENT, output), log))

    def finish(self, deadline: float) -> dict[str, Any]:
        """Wait until `deadline`, kill the rest, and count.

        Returns:
            counts by outcome, the failed tests' names, the end of the output where something failed, the seconds, the
            processes' exit statuses, and "ok": whether all ran to their end and no test failed, and some
            ran where there is a device.
        """
        statuses = [process.wait(deadline) for process, _ in self._runs]
        outcomes: dict[str, str] = {}
        tails: list[str] = []
        for status, (_, log) in zip(statuses, self._runs, strict=True):
            text = log.read_text(encoding="utf-8", errors="replace")
            outcomes.update(match.groups() for match in map(_OUTCOME.match, text.splitlines()) if match)
            if status not in _SOUND:
                tails.append(text[-_TAIL_CHARACTERS:])
        failed = [name for name, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
        return {
            "ok": not tails and (bool(outcomes) or not self._has_device),
            "statuses": statuses,
            "counts": dict(Counter(outcomes.values())),
            "failed": failed,
            "left_out": self._left_out,
            "seconds": time.monotonic() - self._began,
            "output": tails,
        }

    def kill(self) -> None:
        """Kill the processes that still run."""
        for process, _ in self._runs:
            process.kill()


def _deal(files: list[Path], num_shares: int) -> list[list[Path]]:
    """Shares of about equal size in bytes, none empty, by adding each file to the smallest share."""
    shares: list[list[Path]] = [[] for _ in range(min(num_shares, len(files)))]
    sizes = [0] * len(shares)
    for path in sorted(files, key=lambda path: path.stat().st_size, reverse=True):
        smallest = sizes.index(min(sizes))
        shares[smallest].append(path)
        sizes[smallest] += path.stat().st_size
    return shares
