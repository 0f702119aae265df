"""Each worker's share of the weights as files of its own."""

from __future__ import annotations

from typing import ClassVar

from vllm.utils.unserved import Unserved


class ShardedStateLoader(Unserved):
    """Reads what save_sharded_state has written."""

    instead: ClassVar[str] = "workers read only their share of a checkpoint; load it with load_format='auto'"

    DEFAULT_PATTERN: ClassVar[str] = "model-rank-{rank}-part-{part}.safetensors"
    TP_ONLY_PATTERN: ClassVar[str] = DEFAULT_PATTERN
    PP_AND_TP_PATTERN: ClassVar[str] = "model-pp-{pp_rank}-tp-{rank}-part-{part}.safetensors"
