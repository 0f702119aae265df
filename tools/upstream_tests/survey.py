"""Survey upstream's tests before any is run: their files and functions by area, and the names that they import."""

from __future__ import annotations

import ast
import importlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from marks import reasons

Imported = dict[tuple[str, str], set[str]]
"""(module, name or "" for the module itself) -> the files that import it."""


def num_functions(tests: Path) -> dict[str, int]:
    """Test functions by test file, relative to `tests`; a function with parameters counts once."""
    return {
        str(file.relative_to(tests)): sum(node.name.startswith("test") for node in _functions(file))
        for file in sorted(tests.rglob("test_*.py"))
    }


def _functions(file: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def reason(known: Mapping[str, str], path: str, separator: str) -> str | None:
    """The reason of the longest of its beginnings that `known` has."""
    parts = path.split(separator)
    beginnings = (separator.join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((known[each] for each in beginnings if each in known), None)


def imported(tests: Path) -> Imported:
    """All that the files import of `vllm`, anywhere in them."""
    found: Imported = defaultdict(set)
    for file in sorted(tests.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            for module, name in _imports(node):
                if module.partition(".")[0] == "vllm":
                    found[module, name].add(str(file.relative_to(tests)))
    return found


def _imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import):
        yield from ((alias.name, "") for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
        yield from ((node.module, alias.name) for alias in node.names)


def is_here(module: str, name: str) -> bool:
    """Whether our package has the module, and the name in it."""
    try:
        found = importlib.import_module(module)
    except Exception:  # some of upstream's paths belong to packages that are not installed
        return False
    return name in ("", "*") or hasattr(found, name) or is_here(f"{module}.{name}", "")


def document(tests: Path, run: Iterable[str]) -> list[str]:
    """The page's sections about what is not run. `run`: the files that are."""
    functions, files = num_functions(tests), set(run)
    left = {file: count for file, count in functions.items() if file not in files}
    in_folders, of_imports = reasons("folders"), reasons("imports")
    areas: dict[str, list[int]] = defaultdict(list)
    for file, count in left.items():
        areas[reason(in_folders, file if "/" in file else f"./{file}", "/") or "not looked at yet"].append(count)
    names = imported(tests)
    lacking = {place: where for place, where in names.items() if not is_here(*place)}
    lacks: dict[str, list[set[str]]] = defaultdict(list)
    for place, where in lacking.items():
        lacks[reason(of_imports, ".".join(filter(None, place)), ".") or "no reason yet"].append(where)
    return [
        "",
        "## Files that are not run",
        "",
        f"Of {len(functions)} files with {sum(functions.values()):,} test functions, {len(left)} with "
        f"{sum(left.values()):,} are not run (a function with parameters counts once here):",
        "",
        "| files | functions | because |",
        "|---|---|---|",
        *_rows((len(counts), sum(counts), why) for why, counts in areas.items()),
        "",
        "## Imports",
        "",
        f"All files together import {len(names):,} names of `vllm`, those of GPU kernels among them; "
        f"{len(names) - len(lacking):,} can be imported here. [migration.md](migration.md) says which work and "
        "which refuse. The others:",
        "",
        "| names | files | because |",
        "|---|---|---|",
        *_rows((len(places), len(set().union(*places)), why) for why, places in lacks.items()),
    ]


def _rows(rows: Iterable[tuple[int, int, str]]) -> list[str]:
    return [f"| {first:,} | {second:,} | {why} |" for first, second, why in sorted(rows, key=lambda row: -row[0])]
