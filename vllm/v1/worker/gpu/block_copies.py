"""Copies between KV blocks of the device, with all that lies in a block."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from vllm.ops.block_copies import block_parts, copy_blocks_
from vllm.v1.worker.gpu.buffer_utils import upload
from vllm.v1.worker.gpu.states import KVCaches


class BlockCopies:
    """
    Attributes:
        caches: the tensors that have a part of a block, [B, size of the part], each once.
        parts: the same, as `copy_blocks_` takes them.
    """

    def __init__(self, tensors: KVCaches) -> None:
        # Layers that share a cache have it once.
        own = {cache.data_ptr(): cache for group in tensors for cache in group}
        # Bytes, where elements are 8-bit floats, which torch does not copy by index everywhere, or of several kinds.
        are_bytes = len({c.dtype for c in own.values()}) > 1 or any(c.element_size() == 1 for c in own.values())
        self.caches = [(c.view(torch.uint8) if are_bytes else c).view(len(c), -1) for c in own.values()]
        if self.caches:
            self.device = self.caches[0].device
            self.parts = block_parts(self.caches)

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        """Copy (block, its copy), the copies distinct. All blocks are read before a copy is written."""
        if not pairs or not self.caches:
            return
        sources, targets = zip(*pairs, strict=True)
        ids = self.ids(list(sources)), self.ids(list(targets))
        if set(sources).isdisjoint(targets):
            copy_blocks_(*ids, self.parts, self.parts)
            return
        for cache in self.caches:
            cache.index_copy_(0, ids[1], cache.index_select(0, ids[0]))

    def ids(self, block_ids: list[int]) -> Tensor:
        """int64 [N], on the device."""
        return upload(np.array(block_ids, dtype=np.int64), self.device)
