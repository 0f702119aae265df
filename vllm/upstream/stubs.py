"""Writes the listed modules as stubs, by which type checkers know them: `python -m vllm.upstream.stubs FOLDER`.

The build puts them into the wheel as the partial stub package `vllm-stubs` (PEP 561).
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from vllm.upstream.table import Row, Table, table

PACKAGE = Path(__file__).parents[1]


def write(folder: Path) -> None:
    """Write the stub package into `folder`, which is named `vllm-stubs`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "py.typed").write_text("partial\n", encoding="utf-8")
    texts = stubs(table())
    packages = {name.rpartition(".")[0] for name in texts}
    for name, text in texts.items():
        path = folder.joinpath(*name.split(".")[1:])
        path = path / "__init__.pyi" if name in packages else path.with_suffix(".pyi")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def stubs(rows: Table) -> dict[str, str]:
    """Module -> text of its stub: of listed modules, and of packages of ours that have listed names beside theirs."""
    aliases = _aliases(rows)
    found = {}
    for module in {*aliases, *rows.names}:
        file, real = _file(module), aliases.get(module)
        lines = [f"from {real} import *"] if real else []
        if file is not None:
            lines = _handed_on(file)
        defined = _defined(file or (_file(real) if real else None))
        listed = [
            line
            for name, row in rows.names.get(module, {}).items()
            if "." not in name and name not in defined
            for line in _lines(name, row)
        ]
        if (lines or listed) if file is None else (lines and listed):
            found[module] = "\n".join(["from typing import Any, NoReturn", *lines, *listed, ""])
    for module in list(found):
        while module := module.rpartition(".")[0]:
            if _file(module) is None:
                found.setdefault(module, "")
    return found


def _aliases(rows: Table) -> dict[str, str]:
    """Every path by which a module of ours is found in a room -> its own."""
    aliases = {}
    for path, rooms in rows.rooms.items():
        for room in rooms:
            for module in (room, *_below(room)):
                name = path + module.removeprefix(room)
                places = [place for place in rows.candidates(name) if _file(place) or place in rows.names]
                if _file(name) is None and places[:1] == [module]:
                    aliases[name] = module
    return aliases


def _lines(name: str, row: Row) -> list[str]:
    if row.place is not None:
        return _import(*row.place, name)
    if row.status != "refused":
        return []
    if row.is_function:
        return [f"def {name}(*args: Any, **kwargs: Any) -> NoReturn: ..."]
    return [f"class {name}:", "    def __init__(self, *args: Any, **kwargs: Any) -> None: ..."]


def _import(module: str, name: str, listed: str) -> list[str]:
    """A stub hands a name on where its import says `as` the same name."""
    if name == listed:
        return [f"from {module} import {name} as {name}"]
    return [f"from {module} import {name} as _{listed}", f"{listed} = _{listed}"]


def _file(module: str) -> Path | None:
    """The file of a module of ours."""
    path = PACKAGE.joinpath(*module.split(".")[1:])
    files = (path / "__init__.py", path.with_suffix(".py"))
    return next((file for file in files if file.exists()), None)


def _below(package: str) -> list[str]:
    """The modules in a package of ours."""
    folder = PACKAGE.joinpath(*package.split(".")[1:])
    parts = (path.relative_to(folder).with_suffix("").parts for path in sorted(folder.rglob("*.py")))
    names = (".".join(part[:-1] if part[-1] == "__init__" else part) for part in parts)
    return [f"{package}.{name}" for name in names if name and not name.endswith("__main__")]


def _handed_on(file: Path) -> list[str]:
    """The names that a module imports, if that is all that it does."""
    lines = []
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module != "__future__":
            for alias in node.names:
                lines += _import(node.module or "", alias.name, alias.asname or alias.name)
        elif not isinstance(node, (ast.Expr, ast.ImportFrom)) and not ast.unparse(node).startswith("__all__"):
            return []
    return lines


def _defined(file: Path | None) -> set[str]:
    """The names that a module defines or imports."""
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body if file else []:
        if isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
    return found


if __name__ == "__main__":
    write(Path(sys.argv[1]))
