"""Everything in `vllm/` is there for a program: each module can be reached from what users start or import. Names that
only upstream's callers know are in `vllm/upstream`."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOM = "vllm.upstream"
# Beside the exports of `vllm`, the commands of pyproject.toml and the programs (`__main__`): what users import.
PUBLIC = ["vllm.batch", "vllm.v1.sample.logits_capturing_sampler"]


def modules() -> dict[str, Path]:
    """Name -> file, without upstream's room."""
    found = {}
    for path in sorted((ROOT / "vllm").rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if not f"{name}.".startswith(f"{ROOM}."):
            found[name] = path
    return found


def starts(names: dict[str, Path]) -> set[str]:
    """Where programs begin."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    scripts = re.findall(r'^\w+ = "(vllm[\w.]*):\w+"$', text, re.MULTILINE)
    assert scripts
    return {"vllm", *scripts, *PUBLIC, *(name for name in names if name.endswith(".__main__"))}


def reached_by(text: str, names: dict[str, Path], module: str) -> set[str]:
    """The modules that the text of `module` imports or, as strings, names: a whole path, `PATH:NAME` or `PATH.NAME`;
    where it imports by name, also the end of a path, or what all that is imported begins with. A Registry imports all
    of its package."""
    found: set[str] = set()
    by_name = "import_module(" in text
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            path = node.value.partition(":")[0]
            found |= {path, path.rpartition(".")[0]}
            if by_name and re.fullmatch(r"[\w.]+", path):
                found |= {name for name in names if name.endswith(f".{path}")}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "Registry":
            found |= {name for name in names if name.startswith(f"{ast.literal_eval(node.args[0])}.")}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            beginning = (
                ast.unparse(node.args[0]).replace("{__name__}", module).partition("{")[0].removeprefix("f").strip("\"'")
            )
            if beginning.startswith("vllm."):
                found |= {name for name in names if name.startswith(beginning)}
    return found & set(names)


def with_parents(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts) + 1)}


def test_every_module_can_be_reached():
    names = modules()
    seen: set[str] = set()
    waiting = starts(names)
    assert waiting <= set(names)
    while waiting:
        new = set().union(*map(with_parents, waiting)) - seen
        seen |= new
        waiting = set()
        for name in new:
            waiting |= reached_by(names[name].read_text(encoding="utf-8"), names, name)
    lost = sorted(set(names) - seen)
    assert not lost, "nothing needs these: they go, or belong in vllm/upstream:\n" + "\n".join(lost)


def test_the_search_finds_what_nothing_imports():
    names = {"vllm.a": Path(), "vllm.b": Path(), "vllm.c.d": Path(), "vllm.e": Path()}
    text = "from vllm import a\nimport os\nname = 'vllm.b:Class'\nother = 'c.d:Class'\ndef f():\n    import vllm.e\n"
    assert reached_by(text, names, "vllm.f") == {"vllm.a", "vllm.b", "vllm.e"}
    assert reached_by(f"{text}\nimport_module(f'{{other}}')", names, "vllm.f") == set(names)
    assert reached_by("import_module(f'{__name__}.{name}')", names, "vllm.c") == {"vllm.c.d"}
    assert reached_by("_found = Registry('vllm.c', 'Base', 'what')", names, "vllm.f") == {"vllm.c.d"}
