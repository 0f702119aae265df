"""The progress bar of loading."""

from __future__ import annotations

from typing import Any

# Whoever waits no longer than this needs no bar.
DELAY_SECONDS = 2.0


def progress_bar(description: str, num_tensors: int, use_tqdm: bool) -> Any:
    """A tqdm bar over tensors, as a context manager; it stays hidden for the first DELAY_SECONDS."""
    from tqdm import tqdm

    return tqdm(
        total=num_tensors,
        desc=description,
        unit="tensor",
        disable=not use_tqdm,
        delay=DELAY_SECONDS,
        dynamic_ncols=True,
    )
