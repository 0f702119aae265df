"""One small Ray cluster for the tests, on this machine only."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from two_machines import TwoMachines

from vllm.scoring.rows import PartFolder

# A node that does not answer its cluster is dead after four seconds.
DEAD_SOON = {
    "RAY_health_check_initial_delay_ms": "0",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "4",
}

# Ray's is 15, with which actors would wait until all other processes leave them a core.
_NICENESS = "0"

_clusters: list[Any] = []
"""The one that runs."""

_environment = pytest.MonkeyPatch()
"""As its processes have it."""


@pytest.fixture(scope="module")
def ray_cluster() -> str:
    """The address of two nodes of two CPUs each, as Ray counts them: this process is connected to the first. Files that
    follow each other share it."""
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'ray[data]')")
    if not _clusters:
        _clusters.append(_start_cluster())
    return _clusters[0].address


def end_cluster() -> None:
    """End the one that runs, if one does."""
    for cluster in _clusters:
        import ray

        ray.shutdown()
        cluster.shutdown()
    _clusters.clear()
    _environment.undo()


def _start_cluster() -> Any:
    from vllm.utils.ray_utils import import_ray_for

    # Actors import what this process does.
    _environment.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    # Each folder that is read would have 32 processes look at its files.
    _environment.setenv("RAY_DATA_PARQUET_FOOTER_NUM_ACTORS", "1")
    _environment.setenv("RAY_worker_niceness", _NICENESS)
    import_ray_for()
    import ray
    import ray.data
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=node)
    cluster.add_node(**node)
    ray.init(cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    return cluster


def actor_pids(name: str = "ray::MapWorker") -> list[int]:
    """The processes of this cluster's actors of a class; without its name, of those that hold Ray Data's."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may hold anything.
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    own = [pid for pid, parent in parents.items() if parents.get(parent) == os.getpid()]
    return [pid for pid in own if _command(pid).startswith(name)]


def kill_an_actor_at_first_part(monkeypatch: pytest.MonkeyPatch, name: str = "ray::MapWorker") -> list[int]:
    """Once the first part of an output is written, SIGKILL an actor of the class; its id is then in the list."""
    killed: list[int] = []
    plain = PartFolder.write

    def write(self: PartFolder, number: int, content: bytes) -> None:
        plain(self, number, content)
        if not killed:
            killed.append(actor_pids(name)[0])
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(PartFolder, "write", write)
    return killed


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def environment(machines: TwoMachines, **more: str) -> dict[str, str]:
    """Variables of a cluster's processes on two machines."""
    path = os.pathsep.join(path for path in sys.path if path)
    address = f"{machines.addresses[0]}:6379"
    fixed = {"PYTHONPATH": path, "RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
    fixed["RAY_worker_niceness"] = _NICENESS
    # A cluster of this process's has set variables of its own.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {**inherited, **fixed, **more}


def join(machines: TwoMachines, machine: int, num_cpus: int, environment: dict[str, str]) -> None:
    """Start a node of their cluster."""
    where = ["--address", environment["RAY_ADDRESS"]]
    if machine == 0:
        where = ["--head", "--port=6379", "--include-dashboard=false"]
    node = ["--node-ip-address", machines.addresses[machine], "--temp-dir", machines.folder, f"--num-cpus={num_cpus}"]
    limits = ["--object-store-memory", str(80 * 2**20), "--disable-usage-stats"]
    command = machines.command(machine, sys.executable, "-m", "ray.scripts.scripts", "start", *where, *node, *limits)
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
