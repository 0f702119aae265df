"""Scores of late interaction, and the token types of a pair of texts."""

from vllm.pooling.late_interaction import compute_maxsim_score
from vllm.pooling.pairs import compress_token_type_ids

__all__ = ["compress_token_type_ids", "compute_maxsim_score"]
