"""The draw itself."""

from __future__ import annotations

import torch

from vllm.ops.gumbel_sample import gumbel_sample


def draw(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, first_id: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token a row. The noise is a function of (seed, position, token id) alone, so a request draws the
    same token whatever shares its batch, however its prompt was chunked and however often it was preempted.

    Args:
        logits: float32 [R, V]; -inf = ruled out.
        temperature: float32 [R]; 0 = the most likely token, the lowest id among equals.
        seeds: int64 [R].
        positions: int64 [R], the number of tokens before the one that is drawn.
        first_id: token id of column 0.

    Returns:
        Token ids int32 [R], and their scores float32 [R]: of several slices the greatest one's token counts.
    """
    rows = torch.arange(len(logits), dtype=torch.int32, device=logits.device)
    return gumbel_sample(logits, temperature, seeds, positions, rows, first_id)
