"""Ray is an optional dependency: what uses it asks here for it, and for room on its cluster."""

from __future__ import annotations

import os
from typing import Any


def import_ray(alone: bool = False) -> Any:
    """Ray's module.

    Args:
        alone: for a cluster that this process starts for itself: where Ray was not imported before, its servers are
            then reached from this machine only.

    Raises:
        ImportError: it is not installed; says how to.
    """
    if alone:
        # Ray reads it when it is imported, and then takes 127.0.0.1 for the node's address, as it does on Windows.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise ImportError('Ray is not installed; the extra brings it: pip install "vllm-logprobs[ray]"') from None
    return ray


def cpus_for_each(replicas: int, spare: int = 0) -> int:
    """The most CPUs that each of some actors can have, all of them at once, on the cluster that Ray is connected to.

    Args:
        replicas: the actors; each lives on one node.
        spare: CPUs of every node that they leave alone.

    Raises:
        ValueError: there is no room for so many actors of one CPU.
    """
    rooms = [int(node["Resources"].get("CPU", 0)) - spare for node in import_ray().nodes() if node["Alive"]]
    for cpus in range(max(rooms), 0, -1):
        if sum(room // cpus for room in rooms if room > 0) >= replicas:
            return cpus
    room = sum(room for room in rooms if room > 0)
    raise ValueError(f"replicas must be at most {room} with one CPU each on this Ray cluster, got {replicas}")
