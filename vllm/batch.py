"""Data sets, scored through Ray."""

from vllm.scoring.dataset import score_dataset

__all__ = ["score_dataset"]
