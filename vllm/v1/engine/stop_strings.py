"""Stop strings in a text that grows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class ContentReader(Protocol):
    """Says where the content of a growing answer stands in its text, for answers that have other parts, too.

    Attributes:
        num_read: how many characters of the text belong to a part for sure.
    """

    num_read: int

    def ends_a_part(self, stop: str) -> bool:
        """Whether a stop string is markup that ends a part, so that it counts wherever it stands."""
        ...

    def feed(self, text: str, token_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Take the next piece of the text, which `token_ids` spell; returns where what is known to be content now
        begins and ends, ascending."""
        ...

    def finish(self) -> list[tuple[int, int]]:
        """Take the end of the text; returns as `feed`."""
        ...


def check_stop_strings(
    output_text: str, new_char_count: int, stop: list[str], include_in_output: bool
) -> tuple[str, int] | None:
    """The stop string that ends first within the last `new_char_count` characters; of those that end together, the one
    listed first.

    Returns:
        it and the length to cut the text to, -1 where there is nothing to cut; None if none is found.
    """
    best: tuple[int, str] | None = None
    for each in stop if new_char_count else ():
        where = output_text.find(each, max(len(output_text) - new_char_count - len(each) + 1, 0))
        if where >= 0 and (best is None or where + len(each) < best[0]):
            best = where + len(each), each
    if best is None:
        return None
    end, found = best
    if not include_in_output:
        return found, end - len(found)
    return found, -1 if end == len(output_text) else end
