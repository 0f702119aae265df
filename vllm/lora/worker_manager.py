"""Who keeps a worker's adapters."""

from __future__ import annotations

from typing import ClassVar

from vllm.utils.unserved import Unserved


class WorkerLoRAManager(Unserved):
    """All of them."""

    instead: ClassVar[str] = "adapters are not served: merge them into the weights (peft: merge_and_unload)"


class LRUCacheWorkerLoRAManager(Unserved):
    """Those that were used last."""

    instead: ClassVar[str] = "adapters are not served: merge them into the weights (peft: merge_and_unload)"
