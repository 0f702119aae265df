"""argparse types that the scripts share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable


def some_of(known: Iterable[str], what: str) -> Callable[[str], list[str]]:
    """Names of `known` with commas between them; `what` one of them is called in an error."""

    def names(text: str) -> list[str]:
        found = text.split(",")
        unknown = [name for name in found if name not in known]
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown {what} {unknown[0]!r}; known: {', '.join(known)}")
        return found

    return names
