"""The largest files, functions and folders of the package, and comments without a subject: questions, as nothing fails
by them.

`python tests/support/sizes.py` prints them, as `make lint` does.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "vllm"
SHOWN = 10
# Beyond these a reader asks whether the thing is two things.
FILE_LINES, FUNCTION_LINES, FOLDER_FILES = 500, 60, 20
# A kernel is as long as it is, and a folder that is a list has a file a row.
KERNELS = "ops"
LISTS = {"answers/tool_parsers", "models/mixtures", "models/dense"}

# A sentence has a subject: these begin none.
_HEADLESS = re.compile(r'(?:"""|# |// )(?:Of|What|Those) ')
_WRITTEN = {".py", ".h", ".cpp", ".js"}

Sizes = list[tuple[int, str]]


def sources() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] != KERNELS]


def files() -> Sizes:
    return [(len(path.read_text(encoding="utf-8").splitlines()), _name(path)) for path in sources()]


def functions() -> Sizes:
    return [
        (lines, f"{_name(path)}:{start} {name}")
        for path in sources()
        for name, start, lines in _functions(ast.parse(path.read_text(encoding="utf-8")))
    ]


def folders() -> Sizes:
    counts = Counter(path.parent for path in sources() if path.name != "__init__.py")
    return [(count, name) for folder, count in counts.items() if (name := _name(folder)) not in LISTS]


def headless() -> list[str]:
    """Comments and docstrings that begin with a word that is no subject, in the package, its kernels and the tests."""
    root = PACKAGE.parent
    return [
        f"{path.relative_to(root).as_posix()}:{number}"
        for folder in ("vllm", "csrc", "tests")
        for path in sorted((root / folder).rglob("*"))
        if path.suffix in _WRITTEN and path.is_file()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if _HEADLESS.search(line)
    ]


def _name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def _functions(node: ast.AST, inside: str = "") -> Iterator[tuple[str, int, int]]:
    for child in ast.iter_child_nodes(node):
        name = f"{inside}{getattr(child, 'name', '')}"
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield name, child.lineno, (child.end_lineno or child.lineno) - child.lineno + 1
        yield from _functions(child, f"{name}." if isinstance(child, ast.ClassDef) else inside)


def report() -> str:
    lines = []
    for title, guide, sizes in (
        ("files, in lines", FILE_LINES, files()),
        ("functions, in lines", FUNCTION_LINES, functions()),
        ("folders, in files", FOLDER_FILES, folders()),
    ):
        beyond = sum(size > guide for size, _ in sizes)
        lines.append(f"largest {title} ({beyond} beyond {guide}):")
        lines += [f"  {size:5d} {name}" for size, name in sorted(sizes, key=lambda each: (-each[0], each[1]))[:SHOWN]]
    found = headless()
    lines += [f"comments that begin with Of, What or Those ({len(found)}):", *(f"  {each}" for each in found[:SHOWN])]
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
