"""Beam search by transformers, as sequences without their padding."""

from __future__ import annotations

from typing import Any

import torch


def transformers_search(model: Any, prompts: list[list[int]], width: int, eos: list[int] | None, **options: Any) -> Any:
    """(generated ids, score) of the best `width` sequences of each prompt.

    Args:
        prompts: ids, all of one length.
        width: number of beams, at least 2.
        eos: ids that end a sequence.
        options: further arguments of generate.
    """
    out = model.generate(
        torch.tensor(prompts),
        attention_mask=torch.ones(len(prompts), len(prompts[0]), dtype=torch.long),
        num_beams=width,
        num_return_sequences=width,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    found = []
    for row, score in zip(out.sequences[:, len(prompts[0]) :].tolist(), out.sequences_scores.tolist(), strict=True):
        end = next((i for i, token_id in enumerate(row) if token_id in (eos or ())), len(row) - 1)
        found.append((row[: end + 1], score))
    return [found[i : i + width] for i in range(0, len(found), width)]
