"""Which of upstream's tests run, what stands in for their models, and why a test is left out: marks.toml."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MARKS: dict[str, Any] = tomllib.loads((Path(__file__).parent / "marks.toml").read_text(encoding="utf-8"))


def reasons(kind: str) -> dict[str, str]:
    """The reason by mark, of one kind: "tests", "names", "folders" or "imports". Longer marks come first."""
    found = {mark: why for why, marks in MARKS["because"].items() for mark in marks.get(kind, ())}
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))
