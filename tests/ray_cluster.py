"""One small Ray cluster for the tests, on this machine only."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """Its address. Four CPUs to Ray, however many there are: actors of the tests wait more than they compute."""
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'ray[data]')")
    from vllm.ray_utils import import_ray

    # Actors import what this process does.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    )
    ray = import_ray(alone=True)
    ray.init(
        "local",
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=80 * 2**20,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()


def actor_pids() -> list[int]:
    """The processes of this cluster's Ray Data actors."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may hold anything.
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    own = [pid for pid, parent in parents.items() if parents.get(parent) == os.getpid()]
    return [pid for pid in own if _command(pid).startswith("ray::MapWorker")]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
