"""How a trainer meets the engines that it sends weights to."""

from __future__ import annotations

from typing import Any, NoReturn

from vllm.distributed.weight_transfer.refusal import refuse_transfer


def trainer_init(init_info: Any, rank: int = 0) -> NoReturn:
    """Join the group of `init_info` (master_address, master_port, world_size) as the trainer.

    Raises:
        NotImplementedError: always.
    """
    refuse_transfer("trainer_init")
