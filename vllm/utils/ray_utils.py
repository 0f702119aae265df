"""Ray is an optional dependency: what uses it asks here for it, for a cluster, and for room there."""

from __future__ import annotations

import logging
import os
from typing import Any

_LOCAL = "local"


def import_ray() -> Any:
    """Ray's module.

    Raises:
        ImportError: it is not installed; says how to.
    """
    try:
        import ray
    except ImportError:
        raise ImportError('Ray is not installed: pip install "ray[data]>=2.60,<2.64"') from None
    return ray


def import_ray_for(address: str | None = None) -> Any:
    """Ray's module, before `connect` with the same address: a cluster of this process's own is then reached from this
    machine only, if Ray was not imported before.

    Raises:
        ImportError: as import_ray.
    """
    if _resolve(address) == _LOCAL:
        # Ray reads it when it is imported, and takes 127.0.0.1 for the node's address, as it does on Windows.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    return import_ray()


def connect(address: str | None = None, log_to_driver: bool = False) -> bool:
    """Connect this process to a Ray cluster, unless it is.

    Args:
        address: the cluster's; None = RAY_ADDRESS if it is set, or else a new one on this machine alone.
        log_to_driver: show here what the actors print.

    Returns:
        whether it was not connected before.

    Raises:
        ImportError: Ray is not installed.
        ConnectionError: there is no cluster at the address.
    """
    ray = import_ray_for(address)
    if ray.is_initialized():
        return False
    resolved = _resolve(address)
    own = {"include_dashboard": False} if resolved == _LOCAL else {}
    try:
        ray.init(resolved, logging_level=logging.ERROR, log_to_driver=log_to_driver, **own)
    except ValueError as error:
        raise ConnectionError(str(error)) from None
    return True


def cpus_for_each(actors: int, spare: int = 0) -> int:
    """The most CPUs that each of some actors can have, all of them at once, on the cluster that Ray is connected to.

    Args:
        actors: how many; each lives on one node.
        spare: CPUs of every node that they leave alone.

    Raises:
        ValueError: there is no room for so many actors of one CPU.
    """
    rooms = [int(node["Resources"].get("CPU", 0)) - spare for node in import_ray().nodes() if node["Alive"]]
    for cpus in range(max(rooms), 0, -1):
        if sum(room // cpus for room in rooms if room > 0) >= actors:
            return cpus
    room = sum(room for room in rooms if room > 0)
    raise ValueError(f"this Ray cluster has room for {room} actors of one CPU each, not for {actors}")


def _resolve(address: str | None) -> str:
    return address or os.environ.get("RAY_ADDRESS") or _LOCAL
