"""Names that trainers import: each says that it does nothing, and what to do instead."""

from __future__ import annotations

import pytest

from vllm.distributed.weight_transfer.nccl_common import trainer_init
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer


def test_each_says_so_when_used() -> None:
    with pytest.raises(NotImplementedError, match="trainer_init: .*the trainer's own process"):
        trainer_init({"master_address": "127.0.0.1", "master_port": 1, "world_size": 2})
    with pytest.raises(NotImplementedError, match="packed_nccl_broadcast_producer: "):
        packed_nccl_broadcast_producer(iter([]), group=None, src=0, post_iter_func=lambda item: item[1])
