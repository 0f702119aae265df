"""Short forms of long values."""

from __future__ import annotations


def print_embeddings(embeds: list[float], prefix: str = "Embeddings") -> None:
    """Print an embedding's first numbers and its length."""
    shown = ", ".join(f"{value:.4f}" for value in embeds[:16])
    print(f"{prefix}: [{shown}{', ...' if len(embeds) > 16 else ''}] (size={len(embeds)})")
