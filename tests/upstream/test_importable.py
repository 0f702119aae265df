"""Every former import works: the paths and names of tests/data/importable.txt."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

from vllm.upstream.table import table

LISTED = {
    module: names.split()
    for line in (Path(__file__).parents[1] / "data" / "importable.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
    for module, _, names in [line.partition(":")]
}
# Modules of these keep their paths; what they are made of is theirs to change.
INNER = re.compile(
    r"vllm\.(model_executor\.(model_loader\.gguf\w*|models|layers\.quantization)|config\.quantization|sampling_limits"
    r"|engine\.(former|upstream)_args|utils\.flag_types|entrypoints\.openai\.upstream_server_args)\b"
    r"|vllm\.(entrypoints\.openai\.(serving|rendering|protocol)|ops|scoring|v1\.core|v1\.worker)\."
)
GONE = {"vllm.model_executor.layers.fused_moe.refusal"}  # it held one sentence, which is a reason in the table


@pytest.mark.parametrize("part", range(20))
def test_paths_and_names_are_there(part):
    missing = []
    for module in sorted(set(LISTED) - GONE)[part::20]:
        try:
            found = importlib.import_module(module)
        except ImportError as error:
            missing.append(f"{module}: {error}")
            continue
        if not INNER.match(module):
            missing += [f"{module}.{name}" for name in LISTED[module] if not hasattr(found, name)]
    assert not missing, "\n".join(missing)


def test_upstreams_interfaces_of_models_are_there():
    """All of them by both of their paths; the other names of the folder are its own."""
    interfaces = importlib.import_module("vllm.model_executor.models.interfaces")
    models = importlib.import_module("vllm.model_executor.models")
    names = [name for name in LISTED["vllm.model_executor.models"] if hasattr(interfaces, name)]
    assert names and all(getattr(models, name) is getattr(interfaces, name) for name in names)


def is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def test_every_row_leads_somewhere():
    rows = table()
    wrong = []
    for path, rooms in rows.rooms.items():
        wrong += [f"{path}: {room} lies below it" for room in rooms if room.startswith(f"{path}.")]
        wrong += [f"{path}: {room} is not there" for room in rooms if not is_there(room)]
    for module, names in rows.names.items():
        for name, row in names.items():
            if row.place is not None and not hasattr(importlib.import_module(row.place[0]), row.place[1]):
                wrong.append(f"{module}.{name}: {row.place} is not there")
    assert not wrong, "\n".join(wrong)
