"""Upstream's names: read from vllm/upstream/names.toml, looked up, and written into docs/migration.md.

`python tests/support/names_table.py` writes the document anew.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable, Iterable
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: E402
from vllm.server.server_args import ServerArgs  # noqa: E402
from vllm.upstream.table import table  # noqa: E402

DOCUMENT = ROOT / "docs" / "migration.md"
BEGIN, END = "<!-- made by tests/support/names_table.py -->", "<!-- made: end -->"
STATUSES = ("done", "refused", "partly", "absent")


@dataclass(frozen=True)
class Name:
    """A name that upstream has.

    Attributes:
        module: upstream's path of the module.
        name: of a function, a class or a value in it; with a dot, of a method.
        parameters: what it takes, in order, or after a "*" by name; None where that is not compared.
        status: one of STATUSES.
        why: what to do instead, or why it is as it is.
    """

    module: str
    name: str
    parameters: tuple[str, ...] | None
    status: str
    why: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def load() -> tuple[str, list[Name]]:
    """(upstream's version, its names)."""
    rows = table()
    names = [
        Name(module, name, row.takes, row.status, row.why)
        for module, listed in rows.names.items()
        for name, row in listed.items()
    ]
    return rows.version, names


def find(name: Name) -> Any:
    """The object that the name stands for here.

    Raises:
        ImportError, AttributeError: there is no such name.
    """
    found = importlib.import_module(name.module)
    for part in name.name.split("."):
        found = getattr(found, part)
    return found


def problem(name: Name) -> str | None:
    """A description of what is lacking here; None when nothing is."""
    try:
        found = find(name)
    except (ImportError, AttributeError):
        return "is not there"
    if name.parameters is None:
        return None
    wanted = tuple(each for each in name.parameters if each != "*")
    own = list(inspect.signature(found).parameters.values())
    if any(each.kind is each.VAR_KEYWORD for each in own):
        return None
    lacking = [each for each in wanted if each not in {parameter.name for parameter in own}]
    if lacking:
        return f"lacks {', '.join(f'`{each}`' for each in lacking)}"
    order = tuple(parameter.name for parameter in own if parameter.name in wanted)
    return None if order == wanted or "*" in name.parameters else f"has another order of arguments: {', '.join(order)}"


def names_section() -> str:
    """The names that work differently, by what to do instead; names.toml lists the others."""
    version, names = load()
    problems = {name: problem(name) for name in names if name.status == "partly"}
    partly = [name for name, found in problems.items() if found is not None]
    done = [name for name in names if name.status == "done" or (name in problems and name not in partly)]
    refused, absent = ([name for name in names if name.status == status] for status in ("refused", "absent"))
    lines = [
        "## Names",
        "",
        f"Paths, names and arguments follow upstream's version {version}. Of {len(names)} that callers use, "
        f"{len(done)} are there, {len(refused)} can be imported and say what to do instead when they are used, "
        f"{len(partly)} lack something, and {len(absent)} are not there. `vllm/upstream/names.toml` lists them "
        "by module.",
        "",
        "### Lacking something",
        "",
        *_table(("what", "names"), _grouped(partly, lambda name: f"{problems[name]}{_because(name)}")),
        "### Not there",
        "",
        *_table(("why, and what to do instead", "names"), _grouped(absent, lambda name: name.why)),
        "### Refused when used",
        "",
        *_table(("why, and what to do instead", "names, for example"), _grouped(refused, lambda name: name.why, 2)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def arguments_section() -> str:
    """The engine's arguments, by what becomes of a value that is not neutral."""
    about = (
        "Of `LLM(...)`, `EngineArgs`, `AsyncEngineArgs` and, with hyphens, of `vllm serve`. Every argument takes "
        'its default and what asks for nothing: None, False, 0, "auto", an empty text or container.'
    )
    return _arguments("## Engine arguments", about, fields(AsyncEngineArgs))


def flags_section() -> str:
    """The server's flags, as the engine's arguments."""
    about = (
        "Of `vllm serve` and `python -m vllm.entrypoints.openai.api_server`, beside those of the engine; underscores "
        "are hyphens, --disable-x is --no-enable-x, and `--config FILE` reads them from a YAML file."
    )
    return _arguments("## Server flags", about, fields(ServerArgs), lambda name: "--" + name.replace("_", "-"))


def _arguments(
    title: str, about: str, items: Iterable[Field[Any]], shown: Callable[[str], str] = lambda name: name
) -> str:
    items = list(items)
    done = [item.name for item in items if "why" not in item.metadata]
    refused, unused = (
        _by_reason((item for item in items if item.metadata.get("refused") is is_refused), shown)
        for is_refused in (True, False)
    )
    return "\n".join(
        [
            title,
            "",
            about,
            "",
            f"There: {', '.join(f'`{shown(name)}`' for name in done)}.",
            "",
            "### Refused at another value",
            "",
            *_table(("arguments", "why, and what to do instead"), refused),
            "### Without effect, and a warning, at another value",
            "",
            *_table(("arguments", "why"), unused),
        ]
    )


SECTIONS: list[Callable[[], str]] = [arguments_section, flags_section, names_section]
"""Sections that are made of code and put between the marks of the document, in this order."""


def document() -> str:
    """The document with its sections made anew."""
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    assert found, f"{DOCUMENT.name} has no marks"
    return "\n".join([f"{before}{BEGIN}", "", *(section() for section in SECTIONS), f"{END}{after}"])


def _because(name: Name) -> str:
    return f": {name.why}" if name.why else ""


def _grouped(names: Iterable[Name], key: Callable[[Name], str], most: int | None = None) -> list[tuple[str, str]]:
    """Names by their keys, largest group first; beyond `most` of a group they are counted."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(key(name), []).append(f"`{name}`")
    rows = []
    for group, members in sorted(groups.items(), key=lambda each: -len(each[1])):
        more = [f"{len(members) - most} more"] if most is not None and len(members) > most else []
        rows.append((group, ", ".join(members[:most] + more)))
    return rows


def _by_reason(items: Iterable[Field[Any]], shown: Callable[[str], str]) -> list[tuple[str, str]]:
    groups: dict[str, list[str]] = {}
    for item in items:
        groups.setdefault(item.metadata["why"], []).append(f"`{shown(item.name)}`")
    return [(", ".join(names), why) for why, names in groups.items()]


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> list[str]:
    return [f"| {head[0]} | {head[1]} |", "|---|---|", *(f"| {first} | {second} |" for first, second in rows), ""]


if __name__ == "__main__":
    DOCUMENT.write_text(document(), encoding="utf-8")
