"""Ray, an optional dependency: its import, the connection to a cluster, and the CPUs available there."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_LOCAL = "local"


def import_ray() -> Any:
    """Ray's module.

    Raises:
        ImportError: not installed.
    """
    try:
        import ray
    except ImportError:
        raise ImportError('Ray is not installed: pip install "ray[data]>=2.60,<2.64"') from None
    return ray


def import_ray_for(address: str | None = None) -> Any:
    """`import_ray` before `connect` with the same address: restricts a new local cluster to 127.0.0.1, unless Ray was
    imported before."""
    if _resolve(address) == _LOCAL:
        # Read by Ray on import: 127.0.0.1 becomes the node's address, as on Windows.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    return import_ray()


def connect(address: str | None = None, log_to_driver: bool = False) -> bool:
    """Connect this process to a Ray cluster; False if it is connected already.

    Args:
        address: the cluster's; None = RAY_ADDRESS, or a new cluster on this machine if that is unset.
        log_to_driver: show the actors' output here.

    Raises:
        ImportError: Ray is not installed.
        ConnectionError: no cluster at the address.
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


def cluster_address() -> str | None:
    """The address of the cluster that this process is connected to; None: of none. Ray is not imported for it."""
    return sys.modules["ray"].get_runtime_context().gcs_address if _is_connected() else None


def current_placement_group() -> Any:
    """The one that this process's actor or task runs in; None: in none. Ray is not imported for it."""
    if not _is_connected():
        return None
    from ray.util.placement_group import get_current_placement_group

    return get_current_placement_group()


def _is_connected() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and hasattr(ray, "is_initialized") and ray.is_initialized()


def call_within(seconds: float, call: Callable[..., Any], *args: Any) -> None:
    """Call Ray to end something, and wait for that so long at most: without a way to the cluster's head it takes
    minutes. Its errors are passed over: what cannot be ended so ends with the connection."""

    def run() -> None:
        with suppress(Exception):
            call(*args)

    if import_ray().is_initialized():
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(seconds)


def node_address() -> str:
    """The address under which the cluster knows this process's node. (Ray's `get_node_ip_address` may name the head's
    on a machine without a way to the internet.)"""
    ray = import_ray()
    own = ray.get_runtime_context().get_node_id()
    return next(node["NodeManagerAddress"] for node in ray.nodes() if node["NodeID"] == own)


def node_memory() -> dict[str, float]:
    """Bytes of memory that each node of the cluster has for its work, by the node's id: what `ray start --memory` said,
    or Ray has found."""
    nodes = import_ray().nodes()
    return {node["NodeID"]: node["Resources"].get("memory", math.inf) for node in nodes if node["Alive"]}


def cpus_for_each(actors: int, spare: int = 0, together: int = 1) -> int:
    """The most CPUs that each of `actors` concurrent actors (one node each) can have on the connected cluster, with
    `spare` CPUs of every node unused. So many are `together` on a node, which divides their number.

    Raises:
        ValueError: the cluster cannot hold that many actors of one CPU.
    """
    rooms = [int(node["Resources"].get("CPU", 0)) - spare for node in import_ray().nodes() if node["Alive"]]
    for cpus in range(max(rooms) // together, 0, -1):
        if together * sum(room // (together * cpus) for room in rooms if room > 0) >= actors:
            return cpus
    room = together * sum(room // together for room in rooms if room > 0)
    where = f", {together} of them on a node" if together > 1 else ""
    raise ValueError(f"this Ray cluster has room for {room} actors of one CPU each{where}, not for {actors}")


def _resolve(address: str | None) -> str:
    return address or os.environ.get("RAY_ADDRESS") or _LOCAL
