"""Names that upstream's callers import are at its paths, take its arguments, and stand in docs/migration.md."""

from __future__ import annotations

import itertools
from dataclasses import fields

import pytest
from names_table import DOCUMENT, STATUSES, arguments_section, document, find, flags_section, load, problem

from vllm.server.server_args import ServerArgs
from vllm.version import __version__

VERSION, NAMES = load()
MODULES = {module: list(names) for module, names in itertools.groupby(NAMES, key=lambda name: name.module)}


@pytest.mark.parametrize("module", MODULES)
def test_what_is_there_takes_upstreams_arguments(module):
    problems = {
        str(name): found
        for name in MODULES[module]
        if name.status in ("done", "refused") and (found := problem(name)) is not None
    }
    assert not problems


def test_what_is_not_there_is_not_there():
    stale = []
    for name in NAMES:
        if name.status != "absent":
            continue
        try:
            find(name)
        except (ImportError, AttributeError):
            continue
        stale.append(str(name))
    assert not stale, "these are there by now; vllm/upstream/names.toml says otherwise"


def test_the_table_is_sound():
    assert __version__.partition("+")[0] == VERSION
    assert len(NAMES) > 400
    assert len(set(map(str, NAMES))) == len(NAMES)
    assert len(MODULES) == len(list(itertools.groupby(NAMES, key=lambda name: name.module)))
    assert {name.status for name in NAMES} <= set(STATUSES)
    assert all(name.why for name in NAMES if name.status in ("refused", "absent"))


def test_every_engine_argument_has_its_row():
    section = arguments_section()
    wanted = next(name for name in NAMES if name.name == "AsyncEngineArgs" and name.parameters)
    assert wanted.parameters is not None and len(wanted.parameters) > 250
    assert [name for name in wanted.parameters if name != "*" and f"`{name}`" not in section] == []


def test_every_server_flag_has_its_row():
    section = flags_section()
    assert [item.name for item in fields(ServerArgs) if f"`--{item.name.replace('_', '-')}`" not in section] == []


def test_the_document_is_in_step():
    text = DOCUMENT.read_text(encoding="utf-8")
    assert text == document(), "run: python tests/support/names_table.py"
    assert f"upstream's version {VERSION}" in text
