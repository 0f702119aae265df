"""Ray is an optional dependency: what uses it asks here for it, and for room on its cluster."""

from __future__ import annotations

from typing import Any

MAX_DEATHS_PER_BATCH = 3
"""Ray restarts actors for ever; a batch that ends its actor more often than this is at fault itself."""


def import_ray() -> Any:
    """Ray's module.

    Raises:
        ImportError: it is not installed; says how to.
    """
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


def gpus_for_each(engine_options: dict[str, Any]) -> int:
    """The GPUs of one engine of these options (fields of EngineArgs) on the cluster that Ray is connected to."""
    has_gpus = import_ray().cluster_resources().get("GPU", 0) > 0 and engine_options.get("device") != "cpu"
    return int(engine_options.get("tensor_parallel_size", 1)) if has_gpus else 0
