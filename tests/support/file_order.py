"""Which test files run first, and which in one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pytest import Item

_OPENAI = "tests/server"

# These wait more than they compute, so one process runs them all; the first share a cluster.
_ON_RAY = (
    "tests/scoring/test_dataset.py",
    "tests/scoring/test_ray_engines.py",
    "tests/auditing/test_ray.py",
    "tests/cli/test_cli_score_ray.py",
    "tests/cli/test_cli_decide.py",
    "tests/v1/executor/test_ray_executor.py",
    "tests/v1/executor/test_stages_over_ray.py",
    "tests/utils/test_ray_utils.py",
)
_OVER_MACHINES = ("tests/cli/test_ray_over_machines.py", "tests/v1/executor/test_stages_over_machines.py")
# Each shares what is costly to start.
_WITH_CLIENTS = (
    f"{_OPENAI}/test_online_examples.py",
    f"{_OPENAI}/test_clients_openai_errors.py",
    f"{_OPENAI}/test_clients_openai_chat.py",
    f"{_OPENAI}/test_clients_openai.py",
    f"{_OPENAI}/test_clients_curl.py",
    f"{_OPENAI}/test_scoring_docs.py",
)

# Begun late, these would leave the other processes idle. The longest come first.
_FIRST: Sequence[tuple[str, ...]] = (
    (*_ON_RAY, *_OVER_MACHINES),
    ("tests/ops/test_emulated_levels.py",),
    ("tests/ptx/test_ptx.py",),
    ("tests/ptx/test_triton_cubins.py",),
    _WITH_CLIENTS,
    (f"{_OPENAI}/test_schema.py",),
    ("tests/models/test_vision.py",),
    (f"{_OPENAI}/test_launcher.py",),
    (f"{_OPENAI}/test_memory.py",),
    ("tests/benchmarks/test_serving_benchmark.py",),
    ("tests/ops/test_token_readings.py",),
)
_PLACES = {file: (place, number) for place, files in enumerate(_FIRST) for number, file in enumerate(files)}
_LAST = (len(_FIRST), 0)


def in_order(items: Sequence[Item]) -> list[Item]:
    """The tests of each file together, those of the first files first."""
    return sorted(items, key=lambda item: _PLACES.get(_file(item.nodeid), _LAST))


def is_on_ray(item: Item | None) -> bool:
    """Whether it is of a file that needs Ray's cluster."""
    return item is not None and _file(item.nodeid) in _ON_RAY


def groups_of(items: Sequence[Item]) -> list[list[int]]:
    """Numbers of the tests that one process runs: a file's, or those of files that share something. In the order of the
    tests."""
    groups: dict[str, list[int]] = {}
    for number, item in enumerate(items):
        file = _file(item.nodeid)
        groups.setdefault(_FIRST[_PLACES[file][0]][0] if file in _PLACES else file, []).append(number)
    return list(groups.values())


def _file(nodeid: str) -> str:
    return nodeid.partition("::")[0]
