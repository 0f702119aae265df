"""Imports point one way and private names stay at home. Sizes are a report (tests/support/sizes.py)."""

from __future__ import annotations

import ast
import graphlib
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# From the top down. A module imports what stands after its entry, and its entry; the longest entry that its path
# begins with is its own.
ORDER = """
    upstream batch
    cli server
    auditing
    selftest scoring
    entrypoints
    pooling decisions
    answers
    engine
    v1.engine v1.metrics v1.executor v1.features v1.worker v1.sample v1.core v1
    lora
    loader models layers quantization
    attention distributed ops
    tokenizers tracing config outputs pooling_outputs inputs pooling_params sampling_params params logprobs
    utils exceptions logger version envs
""".split()
PUBLIC = set(re.findall(r'"(\w+)": "vllm\.', (ROOT / "vllm/__init__.py").read_text(encoding="utf-8")))


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "vllm").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def place(module: str) -> int:
    """The index of the module's entry in ORDER: the longest that it is, or is in."""
    path = module.removeprefix("vllm.")
    own = [entry for entry in ORDER if path == entry or path.startswith(entry + ".")]
    assert own, f"{module}: ORDER does not say where it stands"
    return ORDER.index(max(own, key=len))


def imports(name: str) -> Iterator[tuple[str, str, int]]:
    """(module, imported name, line) of every import of our own modules, those inside functions included."""
    for node in ast.walk(tree(name)):
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
        for target, _, line in imports(name):
            if target != "vllm" and place(target) < place(name):
                wrong.append(f"{name}:{line} ({ORDER[place(name)]}) imports {target} ({ORDER[place(target)]})")
    assert not wrong, "\n".join(wrong)


def test_the_parts_of_a_package_stand_together():
    """A part that is lifted above other packages hides a circle between these and its package."""
    packages = [entry.partition(".")[0] for entry in ORDER]
    assert len(list(itertools.groupby(packages))) == len(set(packages))


def test_the_page_lists_packages_in_this_order():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (`.+?) \|", page.partition("## Packages")[2].partition("\n## ")[0], re.MULTILINE)
    names = [name.removesuffix(".py").replace("/", ".") for cell in cells for name in re.findall(r"`([^`]+)`", cell)]
    places = [place(name) for name in names if name != "vllm.__init__"]
    assert places == sorted(places) and len(set(places)) > 25


def test_nothing_needs_upstreams_names():
    wrong = [
        f"{name}:{line} imports {target}"
        for name in MODULES
        if name != "vllm" and not name.startswith("vllm.upstream")
        for target, _, line in imports(name)
        if target.startswith("vllm.upstream")
    ]
    assert not wrong, "\n".join(wrong)


def test_imported_modules_have_files():
    """A path that only the table of upstream's names has would be found, too, at the cost of reading it."""
    wrong = [
        f"{name}:{line} imports {target}"
        for name in MODULES
        if not name.startswith("vllm.upstream")
        for target, imported, line in imports(name)
        if target not in MODULES or (target == "vllm" and imported not in PUBLIC)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_test_imports_a_conftest():
    """Which of them it would get depends on what else is collected."""
    importing = re.compile(r"^\s*(from conftest|import conftest)", re.MULTILINE)
    tests = (ROOT / "tests").rglob("*.py")
    assert [str(path) for path in tests if importing.search(path.read_text(encoding="utf-8"))] == []


def test_no_module_imports_itself_by_way_of_others():
    targets = {name: {target for target, _, _ in imports(name) if target in MODULES} for name in MODULES}
    sorter = graphlib.TopologicalSorter(
        {name: found - {name, "vllm"} for name, found in targets.items() if name != "vllm"}
    )
    sorter.prepare()  # a CycleError names the circle


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


@pytest.mark.parametrize(
    "module",
    ["vllm.v1.core.sched.scheduler", "vllm.v1.engine", "vllm.config", "vllm.outputs", "vllm.v1.outputs"],
)
def test_the_core_needs_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0
