"""Imports point one way, private names stay at home, files and functions stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# A module may import its own layer and the ones below; first match wins. v1/engine and v1/core/sched/output
# are the borders between layers: dataclasses that both sides of a call know.
LAYERS = (
    ("vllm.v1.core.sched.output", 0), ("vllm.v1.outputs", 0), ("vllm.v1.request", 0),
    ("vllm.transformers_utils", 0), ("vllm.ops", 1), ("vllm.distributed", 1), ("vllm.v1.attention", 2),
    ("vllm.model_executor", 2), ("vllm.v1.worker", 3), ("vllm.v1.sample", 3), ("vllm.v1.executor", 4),
    ("vllm.v1.core", 4), ("vllm.engine", 5), ("vllm.v1.engine", 5), ("vllm.v1.metrics", 5), ("vllm.entrypoints", 6),
    ("vllm.batch", 6),
)  # fmt: skip
BORDERS = {"vllm.v1.engine"}
# Layers of one height that have no business with each other.
STRANGERS = ({"vllm.v1.executor", "vllm.v1.core"}, {"vllm.ops", "vllm.distributed"})
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 60


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "vllm").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def place(module: str) -> tuple[str, int]:
    """The module's layer: its name and height; what stands below all has height 0."""
    for prefix, height in LAYERS:
        if module == prefix or module.startswith(prefix + "."):
            return prefix, height
    return "base", 0


def imports(name: str) -> Iterator[tuple[str, str, int]]:
    """(module, imported name, line) of every import of our own modules, those inside functions included."""
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "", node.lineno) for alias in node.names if alias.name.startswith("vllm"))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}:{node.lineno}: a relative import hides where it points"
            for alias in node.names if (node.module or "").split(".")[0] == "vllm" else ():
                whole = f"{node.module}.{alias.name}"
                yield (whole, "", node.lineno) if whole in MODULES else (node.module, alias.name, node.lineno)


def test_imports_point_one_way():
    wrong = []
    for name in MODULES:
        if name == "vllm":
            continue  # its exports are lazy
        layer, height = place(name)
        for target, _, line in imports(name):
            other, other_height = place(target)
            sideways = any(layer in pair and other in pair and layer != other for pair in STRANGERS)
            if target not in BORDERS and (other_height > height or sideways):
                wrong.append(f"{name}:{line} ({layer}) imports {target} ({other})")
    assert not wrong, "\n".join(wrong)


def test_private_names_stay_in_their_package():
    wrong = []
    for name, path in MODULES.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for target, imported, line in imports(name):
            # A private module belongs to its folder, a private name to its module.
            owner = target.partition("._")[0] if "._" in target else target
            private = imported.startswith("_") and not imported.startswith("__") and target != name
            if private or ("._" in target and not f"{package}.".startswith(f"{owner}.")):
                wrong.append(f"{name}:{line} imports {target} {imported}")
    assert not wrong, "\n".join(wrong)


def test_the_borders_hold_dataclasses_only():
    for name in BORDERS:
        assert all(place(target)[1] == 0 for target, _, _ in imports(name)), name


@pytest.mark.parametrize(
    "module",
    ["vllm.v1.core.sched.scheduler", "vllm.v1.engine", "vllm.config", "vllm.outputs", "vllm.v1.outputs"],
)
def test_the_core_needs_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_files_and_functions_stay_small():
    large = []
    for name, path in MODULES.items():
        if name.startswith("vllm.ops"):
            continue  # kernels are as long as they are
        if (lines := len(path.read_text(encoding="utf-8").splitlines())) > MAX_FILE_LINES:
            large.append(f"{name}: {lines} lines")
        for node in ast.walk(TREES[name]):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    large.append(f"{name}.{node.name}: {lines} lines")
    assert not large, "\n".join(large)
