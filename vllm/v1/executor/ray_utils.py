"""Ray for callers that connect before the engine does."""

from __future__ import annotations

from typing import Any

from vllm.utils.ray_utils import connect, import_ray_for


def initialize_ray_cluster(parallel_config: Any, ray_address: str | None = None) -> None:
    """Connect this process to Ray, where it is not connected; the engine places its workers by itself.

    Args:
        ray_address: the cluster's; None: RAY_ADDRESS, or a new cluster on this machine.

    Raises:
        ImportError: Ray is not installed.
    """
    import_ray_for(ray_address)
    connect(ray_address)
