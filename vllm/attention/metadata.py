"""What attention needs to know about a step, built once a step and read by every layer."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class AttentionMetadata:
    """T tokens of R requests, the requests' tokens one after another.

    Request r's queries are the last (query_start_loc[r + 1] - query_start_loc[r]) of its seq_lens[r] tokens.
    """

    slot_mapping: Tensor  # int64 [T], KV cache slot of each token: block id * block size + offset
    block_table: Tensor  # int32 [R, blocks of the longest request], KV block ids
    query_start_loc: Tensor  # int32 [R + 1], first token of each request
    seq_lens: Tensor  # int32 [R], tokens with KV after this step
    max_query_len: int
    max_seq_len: int
    # Tokens whose keys and values another request has at the same positions, and that one's slots, both int64 [S].
    shared: tuple[Tensor, Tensor] | None = None
