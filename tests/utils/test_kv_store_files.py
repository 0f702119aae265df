"""A store's files: what is written is found by other processes, and what is damaged, lost or too much is not."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

from vllm.utils.kv_store import blocks as blocks_module
from vllm.utils.kv_store import folder as folder_module
from vllm.utils.kv_store import segment as segment_module
from vllm.utils.kv_store.blocks import BlockStore
from vllm.utils.kv_store.folder import StoreFolder
from vllm.utils.kv_store.segment import ENTRY_BYTES, checksums

SIZE = 5000  # no multiple of a sector


def block(number: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def make(path: Path, gib: float | None = 1.0, shelf: str = "shelf") -> BlockStore:
    return BlockStore(StoreFolder(path, gib), shelf, {"model": "m"})


def write(path: Path, numbers: range, **fields) -> None:
    store = make(path, **fields)
    for number in numbers:
        assert store.write(key(number), block(number))
    assert store.flush()
    store.close()


def found(path: Path, numbers: range, **fields) -> list[int]:
    """The numbers of the blocks that a store reads, each asked for alone; what it reads is right."""
    store = make(path, **fields)
    store.refresh()
    there = []
    for number in numbers:
        data = store.read([key(number)])
        if data:
            assert np.array_equal(data[key(number)], block(number))
            there.append(number)
    store.close()
    return there


def test_what_is_written_is_found_by_others(tmp_path):
    write(tmp_path / "s", range(5))
    assert found(tmp_path / "s", range(7)) == list(range(5))
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "s").iterdir()} == {0o600}
    assert (tmp_path / "s").stat().st_mode & 0o777 == 0o700
    # Another name is another model's.
    assert found(tmp_path / "s", range(7), shelf="other") == []


def test_blocks_are_found_while_their_writer_lives(tmp_path):
    writer, reader = make(tmp_path), make(tmp_path)
    reader.refresh()
    assert key(1) not in reader
    for number in range(3):
        writer.write(key(number), block(number))
        assert writer.will_have(key(number))
        writer.flush()
        reader.refresh()
        assert key(number) in reader and reader.size([key(number)]) == SIZE
        writer.refresh()
        assert key(number) in writer
    writer.take_back([key(1)])
    writer.flush()
    reader.refresh()
    assert [key(number) in reader for number in range(3)] == [True, False, True]
    assert not writer.will_have(key(1))


def test_reading_ends_at_the_first_block_that_is_not_there(tmp_path):
    write(tmp_path, range(3))
    store = make(tmp_path)
    store.refresh()
    assert list(store.read([key(0), key(9), key(1)])) == [key(0)]


def test_a_block_that_has_been_written_is_not_held(tmp_path):
    """The next step's blocks go where this one's were."""
    store, data = make(tmp_path), block(0)
    held = weakref.ref(data)
    store.write(key(0), data)
    del data
    store.flush()
    deadline = time.monotonic() + 20
    while held() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_pieces_are_read_at_once_and_found_in_order(tmp_path, monkeypatch):
    write(tmp_path, range(4))
    monkeypatch.setattr(blocks_module, "_READ_BYTES", SIZE)
    read, both = blocks_module.read_blocks, threading.Barrier(2, timeout=20)

    def read_together(*args):
        both.wait()
        return read(*args)

    monkeypatch.setattr(blocks_module, "read_blocks", read_together)
    store = make(tmp_path)
    store.refresh()
    data = store.read([key(number) for number in (2, 0, 3, 1)])
    assert list(data) == [key(number) for number in (2, 0, 3, 1)]
    assert all(np.array_equal(data[key(number)], block(number)) for number in range(4))
    # A piece behind one that is damaged does not count.
    file = next(tmp_path.glob("*.blocks"))
    damaged = bytearray(file.read_bytes())
    damaged[SIZE] ^= 1
    file.write_bytes(damaged)
    assert list(store.read([key(number) for number in range(4)])) == [key(0)]


@pytest.mark.parametrize("damaged", range(7))
def test_blocks_of_several_sizes_are_read_up_to_one_that_is_damaged(tmp_path, damaged):
    sizes = [SIZE, SIZE, 8, 512, 512, 4096]
    store = make(tmp_path)
    for number, size in enumerate(sizes):
        store.write(key(number), block(number, size))
    store.close()
    file = next(tmp_path.glob("*.blocks"))
    data = bytearray(file.read_bytes())
    if damaged < len(sizes):
        data[sum(sizes[:damaged]) + sizes[damaged] - 1] ^= 4
        file.write_bytes(data)
    store = make(tmp_path)
    store.refresh()
    read = store.read([key(number) for number in range(len(sizes))])
    assert list(read) == [key(number) for number in range(damaged)]
    assert all(np.array_equal(read[key(number)], block(number, sizes[number])) for number in range(damaged))


@pytest.mark.parametrize("bit", [0, 8 * 4999 + 7, 8 * 4607, 1234])
def test_a_flipped_bit_is_a_miss(tmp_path, bit, caplog):
    write(tmp_path, range(3))
    file = next(tmp_path.glob("*.blocks"))
    data = bytearray(file.read_bytes())
    data[SIZE + bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)
    assert found(tmp_path, range(3)) == [0, 2]
    folder = StoreFolder(tmp_path)
    assert "between bytes 5,000 and 10,000" in folder.verify(folder.segments()[0])


def test_sectors_that_changed_places_are_seen():
    data = block(1, 8192)
    swapped = data.copy()
    swapped[:512], swapped[512:1024] = data[512:1024], data[:512]
    others = swapped, data[:-1], np.zeros(8192, np.uint8)
    assert len({checksums(each, 1)[0] for each in (data, *others)}) == 4


@pytest.mark.parametrize("cut", [1, ENTRY_BYTES, ENTRY_BYTES + 1])
def test_what_a_torn_index_does_not_say_is_not_there(tmp_path, cut):
    write(tmp_path, range(3))
    index = next(tmp_path.glob("*.index"))
    os.truncate(index, index.stat().st_size - cut)
    assert found(tmp_path, range(3)) == ([0, 1] if cut <= ENTRY_BYTES else [0])


def test_a_damaged_entry_and_all_after_it_are_not_there(tmp_path):
    write(tmp_path, range(3))
    index = next(tmp_path.glob("*.index"))
    data = bytearray(index.read_bytes())
    data[-2 * ENTRY_BYTES + 20] ^= 1
    index.write_bytes(data)
    assert found(tmp_path, range(3)) == [0]


@pytest.mark.parametrize("damage", [b"", b"VLLM", b"x" * 500])
def test_a_file_that_is_no_index_is_passed_over(tmp_path, damage):
    write(tmp_path, range(2))
    (tmp_path / "shelf-0-1.index").write_bytes(damage)
    assert found(tmp_path, range(2)) == [0, 1]


def test_blocks_that_were_cut_off_are_a_miss(tmp_path):
    write(tmp_path, range(3))
    os.truncate(next(tmp_path.glob("*.blocks")), 2 * SIZE + 5)
    assert found(tmp_path, range(3)) == [0, 1]


def test_the_least_recently_used_segment_goes_first_and_the_bound_holds(tmp_path):
    bound = 40 * SIZE
    for number in range(0, 12, 2):
        write(tmp_path, range(number, number + 2), gib=bound / 2**30)
        # Files have the clock's time; a reader's comes between two writers'.
        used = 1_000_000 + number
        for path in tmp_path.glob("*.index"):
            if path.stat().st_mtime > 2_000_000:
                os.utime(path, (used, used))
    assert found(tmp_path, range(0, 2)) == [0, 1]  # used again
    for number in range(100, 140, 2):
        write(tmp_path, range(number, number + 2), gib=bound / 2**30)
        assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= bound
    there = found(tmp_path, range(200))
    assert {138, 139} <= set(there) and not {2, 3, 4, 5} & set(there)


def test_a_segment_that_is_written_is_not_removed_and_counts_whole(tmp_path):
    bound = 64 * SIZE
    writer = make(tmp_path, bound / 2**30)
    writer.write(key(0), block(0))
    writer.flush()
    [segment] = StoreFolder(tmp_path).segments()
    assert segment.is_written and segment.size >= bound // 16
    for number in range(1, 90):
        write(tmp_path, range(number, number + 1), gib=bound / 2**30)
    assert sum(each.size for each in StoreFolder(tmp_path).segments()) <= bound
    assert found(tmp_path, range(1)) == [0]
    writer.close()
    assert not any(each.is_written for each in StoreFolder(tmp_path).segments())


def test_a_bound_below_a_block_keeps_nothing(tmp_path, caplog):
    store = make(tmp_path, 1e-6)
    store.write(key(0), block(0))
    store.flush()
    assert not list(tmp_path.glob("*.index")) and not store.will_have(key(0))
    # It does not try again and again.
    assert not store.write(key(1), block(1))


def test_a_full_disk_is_no_error_and_what_was_written_stays(tmp_path, monkeypatch):
    store = make(tmp_path)
    store.write(key(0), block(0))
    store.flush()
    real, room = os.pwrite, [3000]

    def full(file, data, start):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        count, room[0] = min(len(data), room[0]), max(room[0] - len(data), 0)
        return real(file, data[:count], start)

    with monkeypatch.context() as patch:
        patch.setattr(segment_module.os, "pwrite", full)
        store.write(key(1), block(1))
        store.flush()
        assert not store.will_have(key(1)) and not store.write(key(2), block(2))
    assert found(tmp_path, range(3)) == [0]
    monkeypatch.setattr(blocks_module, "_REST_SECONDS", 0.0)
    store._writing._rests_until = 0.0
    assert store.write(key(2), block(2)) and store.flush()
    store.close()
    assert found(tmp_path, range(3)) == [0, 2]


def test_a_disk_that_is_nearly_full_stays_so(tmp_path, monkeypatch):
    usage = os.statvfs(tmp_path).f_frsize * os.statvfs(tmp_path).f_blocks
    monkeypatch.setattr(folder_module.shutil, "disk_usage", lambda path: (usage, usage, 1000))
    monkeypatch.setattr(
        folder_module.shutil, "disk_usage", lambda path: type("Usage", (), {"total": usage, "free": 1000})
    )
    store = make(tmp_path, 1.0)
    store.write(key(0), block(0))
    store.flush()
    assert not list(tmp_path.glob("*.index"))


def test_too_many_blocks_at_once_are_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(blocks_module, "MOST_UNWRITTEN_BYTES", 2 * SIZE)
    store = make(tmp_path)
    with store._writing._change:  # the writer waits
        kept = [store.write(key(number), block(number)) for number in range(4)]
    assert kept == [True, True, False, False]
    store.close()
    assert found(tmp_path, range(4)) == [0, 1]


def test_what_was_evicted_before_it_was_found_can_be_written_again(tmp_path):
    store = make(tmp_path)
    for number in range(2):
        store.write(key(number), block(number))
    store.flush()
    assert len(StoreFolder(tmp_path).clear()) == 1
    store.write(key(2), block(2))
    store.flush()
    store.refresh()
    assert [store.will_have(key(number)) for number in range(3)] == [False, False, True]
    store.write(key(0), block(0))
    store.close()
    assert found(tmp_path, range(3)) == [0, 2]


def test_a_lost_folder_is_made_again(tmp_path):
    store = make(tmp_path / "s")
    store.write(key(0), block(0))
    store.flush()
    store.refresh()
    for path in (tmp_path / "s").iterdir():
        path.unlink()
    (tmp_path / "s").rmdir()
    store.refresh()
    assert store.read([key(0)]) == {} and key(0) not in store
    store.write(key(1), block(1))
    store.flush()
    store.close()
    assert found(tmp_path / "s", range(2)) == [1]


def test_clear_takes_what_engines_write_too(tmp_path):
    store = make(tmp_path)
    store.write(key(0), block(0))
    store.flush()
    (tmp_path / "shelf-1-1.blocks").write_bytes(b"left")
    assert len(StoreFolder(tmp_path).clear()) == 1
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    store.refresh()
    assert key(0) not in store
    store.write(key(1), block(1))
    store.close()
    assert found(tmp_path, range(2)) == [1]


def test_clear_leaves_nothing_in_a_folder_that_is_no_store(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert StoreFolder(tmp_path).clear() == []
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_users_files_are_not_read(tmp_path):
    write(tmp_path / "s", range(2))
    for path in (tmp_path / "s").glob("*.index"):
        os.chown(path, 1234, 1234)
    assert found(tmp_path / "s", range(2)) == []
    os.chown(tmp_path / "s", 1234, 1234)
    with pytest.raises(PermissionError, match="another user"):
        StoreFolder(tmp_path / "s").open()


def test_a_writer_that_is_killed_leaves_whole_blocks_and_no_lock(tmp_path):
    code = """
import sys
from test_kv_store_files import block, key, make
from pathlib import Path
store, number = make(Path(sys.argv[1])), 0
while True:
    if store.write(key(number), block(number, 300_000)):
        number += 1
        if number == 20:
            print("begun", flush=True)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=environment
    ) as process:
        process.stdout.readline()
        time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
    assert not any(segment.is_written for segment in StoreFolder(tmp_path).segments())
    store, whole = make(tmp_path), 0
    store.refresh()
    for number in range(100_000):
        if not (data := store.read([key(number)])):
            break
        assert np.array_equal(data[key(number)], block(number, 300_000))
        whole += 1
    assert whole > 0
    folder = StoreFolder(tmp_path)
    assert all(folder.verify(segment) is None for segment in folder.segments())
