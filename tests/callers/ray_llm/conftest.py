"""A Ray cluster of this machine alone."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from typing import Any

import pytest
from buckets import bucket

# Ray's LLM libraries need it, and no other test does: elsewhere they cannot be imported.
collect_ignore_glob = [] if importlib.util.find_spec("jsonref") else ["test_*.py"]
# Read by Ray when it is imported.
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", OMP_NUM_THREADS="1")


@pytest.fixture(scope="session")
def adapters() -> Iterator[str]:
    """The address of a bucket."""
    with bucket("adapters") as address:
        yield address


@pytest.fixture(scope="session")
def cluster(adapters: str) -> Iterator[Any]:
    """Ray, connected to sixteen CPUs, as it counts them; its processes find the bucket."""
    import ray

    ray.init("local", num_cpus=16, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()
