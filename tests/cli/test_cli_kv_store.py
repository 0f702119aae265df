"""`vllm kv-store`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from vllm.cli.main import main
from vllm.utils.kv_store.blocks import BlockStore
from vllm.utils.kv_store.folder import StoreFolder


def make(folder: Path, shelf: str, count: int) -> BlockStore:
    store = BlockStore(StoreFolder(folder), shelf, {"model": f"Org/{shelf}", "dtype": "bfloat16", "quantization": None})
    for number in range(count):
        store.write(number.to_bytes(16, "little"), np.full(1000, number, np.uint8))
    store.flush()
    return store


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for shelf, count in (("a", 3), ("b", 5)):
        make(tmp_path, shelf, count).close()
    return tmp_path


def test_models_and_sizes_are_told(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = make(folder, "b", 2)
    assert main(["kv-store", "stat", str(folder)]) == 0
    text = capsys.readouterr().out
    assert "Org/a  bfloat16, 3 blocks" in text and "1 of 2 segments being written" in text
    assert main(["kv-store", "stat", str(folder), "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["models"]}
    assert {name: row["blocks"] for name, row in rows.items()} == {"a": 3, "b": 7}
    assert rows["a"]["bytes"] == sum(path.stat().st_size for path in folder.glob("a-*"))
    writer.close()


def test_blocks_that_were_taken_back_do_not_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = make(tmp_path, "a", 3)
    store.take_back([(1).to_bytes(16, "little")])
    store.close()
    assert main(["kv-store", "stat", str(tmp_path)]) == 0
    assert "2 blocks" in capsys.readouterr().out


def test_damage_is_found_and_removed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv-store", "verify", str(folder)]) == 0
    assert capsys.readouterr().out.count("whole") == 2
    blocks = next(folder.glob("a-*.blocks"))
    data = bytearray(blocks.read_bytes())
    data[1500] ^= 1
    blocks.write_bytes(data)
    assert main(["kv-store", "verify", str(folder), "--json"]) == 1
    found = {Path(row["file"]).name[0]: row["damage"] for row in json.loads(capsys.readouterr().out)["segments"]}
    assert "is damaged between bytes 1,000 and 2,000" in found["a"] and found["b"] is None
    assert not list(folder.glob("a-*")) and list(folder.glob("b-*"))


def test_all_is_removed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["kv-store", "clear", str(folder)]) == 0
    assert "removed 2 segments" in capsys.readouterr().out
    assert main(["kv-store", "stat", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"] == []


def test_a_folder_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("stat", "verify", "clear"):
        assert main(["kv-store", command, str(tmp_path / "none")]) == 2
        assert "is not a folder" in capsys.readouterr().err
