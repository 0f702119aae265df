"""Packed weights on disk: whatever happens to the files, a model has its weights, and says once what went wrong."""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
import textwrap
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from models_util import load_model, make_random_model
from packed_starts import files, is_mapped, needs_kernels, packed, state  # noqa: F401 - a fixture
from preloaded import FORKED
from safetensors.torch import save_file
from thread_ranks import ThreadRanks

from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import get_tp_group, tensor_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.layers.weight_update import held_tensors
from vllm.loader import packed_weights as module
from vllm.utils.packed import ahead
from vllm.utils.packed import file as packed_file
from vllm.utils.packed import folder as packed_folder
from vllm.utils.packed.file import Mapping, find_damage, read_content
from vllm.utils.packed.folder import PackedFolder

pytestmark = [needs_kernels, pytest.mark.usefixtures("packed")]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_random_model("llama", "odd", tmp_path / "model")
    return tmp_path / "model"


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelname == "WARNING" and "packed" in record.message]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(bytes(data))


def test_small_models_are_kept_where_somebody_asks(
    model: Path,
    packed: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_PACKED_CACHE", "0")
    assert not is_mapped(load_model(model)[0])
    monkeypatch.delenv("VLLM_PACKED_CACHE_LEAST_MIB")
    monkeypatch.delenv("VLLM_PACKED_CACHE")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "root"))
    assert not is_mapped(load_model(model)[0])
    assert not packed.exists() and not (tmp_path / "root" / "packed").exists()
    monkeypatch.setenv("VLLM_PACKED_CACHE_LEAST_MIB", "0")
    assert is_mapped(load_model(model)[0])
    monkeypatch.delenv("VLLM_PACKED_CACHE_LEAST_MIB")
    monkeypatch.setenv("VLLM_PACKED_CACHE", str(packed))
    assert is_mapped(load_model(model)[0])
    monkeypatch.setenv("VLLM_PACKED_CACHE_LEAST_MIB", "1")
    assert not is_mapped(load_model(model)[0])


@pytest.mark.parametrize("value", ["true", "off"])
def test_a_switch_is_0_or_1(value: str, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PACKED_CACHE", value)
    with pytest.raises(ValueError, match="VLLM_PACKED_CACHE must be 0, 1 or a folder"):
        load_model(model)


def test_the_switch_alone_is_a_folder_of_the_root(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PACKED_CACHE", "1")
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path / "root"))
    load_model(model)
    assert len(files(tmp_path / "root" / "packed")) == 1


def test_what_packing_depends_on_has_a_file_of_its_own(
    model: Path,
    packed: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for fields in ({}, {"dtype": "bfloat16"}, {"dtype": "bfloat16", "quantization": "int8"}):
        load_model(model, **fields)
    assert len(files(packed)) == 3
    monkeypatch.setenv("VLLM_CPU_GEMM", "packed_f32")
    load_model(model, dtype="bfloat16")
    # Limits of requests make no difference.
    load_model(model, dtype="bfloat16", max_model_len=32)
    assert len(files(packed)) == 3 + (len(files(packed)) == 4)


def test_a_changed_checkpoint_is_packed_anew(model: Path, packed: Path) -> None:  # noqa: F811
    first = state(load_model(model)[0])
    path = model / "model.safetensors"
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    size = path.stat().st_size
    make_random_model("llama", "odd", model, seed=1)
    assert path.stat().st_size == size
    # As a copy that keeps times would have it.
    os.utime(path, ns=times)
    second, _ = load_model(model)
    assert state(second) != first
    assert state(load_model(model)[0]) == state(second)
    assert len(files(packed)) == 2


@pytest.mark.parametrize("at", ["end", "description"])
def test_a_broken_file_is_packed_anew(
    at: str,
    model: Path,
    packed: Path,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = state(load_model(model)[0])
    (path,) = files(packed)
    if at == "end":
        os.truncate(path, path.stat().st_size - 100)
    else:
        flip(path, path.stat().st_size - 100)
    assert state(load_model(model)[0]) == expected
    assert len(said(caplog)) == 1 and "packed anew" in said(caplog)[0]
    assert is_mapped(load_model(model)[0]) and len(said(caplog)) == 1


def test_a_state_that_does_not_fit_is_packed_anew(model: Path, packed: Path, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    expected = state(load_model(model)[0])
    (path,) = files(packed)
    content = read_content(path)
    writer = packed_file.Writer(path.with_suffix(".new"), 1 << 20, lambda _: None)
    writer.finish(content.about, [["model.no_such", "", "packed", None, False]], path)
    assert state(load_model(model)[0]) == expected
    assert len(said(caplog)) == 1
    assert is_mapped(load_model(model)[0])


def test_a_flipped_byte_is_found(model: Path, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    load_model(model)
    (path,) = files(packed)
    assert find_damage(path) is None
    flip(path, read_content(path).pieces[3].start)
    assert "damaged between" in (find_damage(path) or "")
    monkeypatch.setattr(module, "_VERIFY_AFTER_SECONDS", 0.0)
    before = set(threading.enumerate())
    served, _ = load_model(model)
    for thread in set(threading.enumerate()) - before:
        thread.join(60)
    assert not files(packed)
    with pytest.raises(RuntimeError, match="was removed, and results since the start may be wrong"):
        served.weight_updater.complete()
    load_model(model)[0].weight_updater.complete()


def test_an_unwritable_folder_is_said_once(
    model: Path,
    packed: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("VLLM_PACKED_CACHE", str(tmp_path / "file" / "folder"))
    for _ in range(2):
        assert not is_mapped(load_model(model)[0])
    assert len(said(caplog)) == 1 and "are not kept" in said(caplog)[0]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_full_disk_is_said_once(
    share: float,
    model: Path,
    packed: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = state(load_model(model)[0])
    (path,) = files(packed)
    limit = int(share * path.stat().st_size)
    path.unlink()
    write = os.pwrite

    def full(file: int, data: bytes, offset: int) -> int:
        if offset + len(data) > limit:
            raise OSError(28, "No space left on device")
        return write(file, data, offset)

    monkeypatch.setattr(packed_file.os, "pwrite", full)
    for _ in range(2):
        served, _ = load_model(model)
        assert state(served) == expected and not is_mapped(served)
    assert len(said(caplog)) == 1 and "No space left" in said(caplog)[0]
    assert not [each for each in packed.iterdir() if each.suffix not in (".lock", ".json")]


def test_the_last_part_of_the_disk_stays_free(
    model: Path,
    packed: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(packed_folder, "_KEPT_FREE", 0.1)
    monkeypatch.setattr(packed_folder.shutil, "disk_usage", lambda _: usage(1 << 40, 0, (1 << 40) // 10))
    assert not is_mapped(load_model(model)[0])
    assert "is kept" in said(caplog)[0]


def test_the_least_recently_used_go_first(model: Path, packed: Path) -> None:  # noqa: F811
    size = 0
    for age, name in enumerate(("a", "b", "c")):
        (packed / "x").parent.mkdir(exist_ok=True)
        (packed / f"{name}-0of1.packed").write_bytes(bytes(8 << 20))
        os.utime(packed / f"{name}-0of1.packed", (1000 - age, 1000 - age))
        size += 8 << 20
    folder = PackedFolder(packed, 25 / 1024)
    folder.check_room(packed / "d-0of1.packed", 1 << 20, 0)
    assert len(files(packed)) == 3
    folder.check_room(packed / "d-0of1.packed", 8 << 20, 0)
    assert [path.name[0] for path in files(packed)] == ["a", "b"]
    with pytest.raises(OSError, match="the bound"):
        folder.check_room(packed / "d-0of1.packed", 26 << 20, 0)
    assert len(files(packed)) == 2


def test_the_bound_is_an_engine_argument(model: Path, packed: Path, caplog: pytest.LogCaptureFixture) -> None:  # noqa: F811
    fields = {"skip_tokenizer_init": True, "max_model_len": 32}
    LLM(str(model), packed_cache_gib=0, **fields)
    assert not files(packed) and "the bound" in said(caplog)[0]
    LLM(str(model), packed_cache_gib=0.5, **fields)
    assert len(files(packed)) == 1
    with pytest.raises(ValueError, match="packed_cache_gib must be"):
        LLM(str(model), packed_cache_gib=-1, **fields)


def test_a_killed_writer_leaves_nothing_that_is_used(model: Path, packed: Path, tmp_path: Path) -> None:  # noqa: F811
    code = f"""
        import os, sys
        sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
        from models_util import load_model
        from vllm.utils.packed import file, folder
        folder._KEPT_FREE = 0.0
        write = os.pwrite
        def killed(number, data, offset):
            if offset > 50_000:
                os.kill(os.getpid(), 9)
            return write(number, data, offset)
        file.os.pwrite = killed
        from pathlib import Path
        load_model(Path({str(model)!r}))
    """
    done = subprocess.run([sys.executable, "-c", FORKED + textwrap.dedent(code)], capture_output=True, timeout=120)
    assert done.returncode == -9
    assert not files(packed) and list(packed.glob("*.part"))
    served, _ = load_model(model)
    assert is_mapped(served) and len(files(packed)) == 1 and not list(packed.glob("*.part"))


def test_others_wait_for_who_packs(model: Path, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The second start maps what the first one wrote while it waited."""
    written: list[Path] = []
    finish = packed_file.Writer.finish

    def counted(self: packed_file.Writer, about: object, content: object, path: Path) -> None:
        written.append(path)
        time.sleep(0.3)
        finish(self, about, content, path)  # type: ignore[arg-type]

    monkeypatch.setattr(packed_file.Writer, "finish", counted)
    models: list[torch.nn.Module] = []
    threads = [threading.Thread(target=lambda: models.append(load_model(model)[0])) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(written) == 1 and state(models[0]) == state(models[1])


def test_what_a_program_mapped_first_is_read_ahead_the_next_time(
    model: Path,
    packed: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[tuple[int, bool]] = []

    def read_ahead(self: Mapping, step: int, should_stop: Callable[[], bool]) -> None:
        read.append((len(self), should_stop()))

    def begin() -> list[tuple[int, bool]]:
        """Sizes of files that a program reads which begins now, and whether it is to end at once."""
        read.clear()
        monkeypatch.setattr(ahead, "_reading", None)
        monkeypatch.setattr(ahead, "_is_noted", False)
        ahead.begin()
        for thread in threading.enumerate():
            if thread.name == "reading-ahead":
                thread.join()
        return read

    assert not begin()
    load_model(model)
    monkeypatch.setattr(packed_file.Mapping, "read_ahead", read_ahead)
    (entry,) = files(packed)
    assert begin() == [(entry.stat().st_size, False)]
    # A configuration that asks for another entry ends it.
    load_model(model)
    assert not ahead._reading[1].is_set()
    load_model(model, dtype="bfloat16")
    assert ahead._reading[1].is_set()
    (other,) = set(files(packed)) - {entry}
    # That one came second.
    assert begin() == [(entry.stat().st_size, False)]
    load_model(model, dtype="bfloat16")
    assert begin() == [(other.stat().st_size, False)]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "orig_argv", ["python", "another.py"])
        assert not begin()
    other.unlink()
    assert not begin()
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in packed.iterdir())


@pytest.mark.parametrize(
    "text", ["[", "[]", "[" * 100_000, '{"%s": "/etc/"}', '{"%s": "../"}', '{"%s": ["*"]}', '{"%s": "*"}']
)
def test_notes_that_nobody_wrote_are_nothing(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PACKED_CACHE", str(tmp_path))
    monkeypatch.setattr(ahead, "_reading", None)
    monkeypatch.setattr(ahead, "_is_noted", False)
    (tmp_path / "weights-0of1.packed").write_bytes(bytes(4096))
    (tmp_path / "starts.json").write_text(text.replace("%s", ahead.program()))
    read: list[Mapping] = []
    monkeypatch.setattr(packed_file.Mapping, "read_ahead", lambda self, *_: read.append(self))
    ahead.begin()
    ahead.note(tmp_path, "weights")
    assert json.loads((tmp_path / "starts.json").read_text())[ahead.program()] == "weights"
    for thread in threading.enumerate():
        if thread.name == "reading-ahead":
            thread.join()
    assert not read


def test_a_program_has_a_name_in_a_folder_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    here = ahead.program()
    (tmp_path / "folder").rmdir()
    assert ahead.program() != here


def test_new_weights_stay_in_the_process(model: Path, packed: Path, tmp_path: Path) -> None:  # noqa: F811
    from safetensors.torch import load_file

    load_model(model)
    (path,) = files(packed)
    before = path.read_bytes()
    others = load_model(model)[0]
    expected = state(others)
    make_random_model("llama", "odd", tmp_path / "new", seed=3)
    served, _ = load_model(model)
    served.load_weights(load_file(tmp_path / "new" / "model.safetensors").items())
    assert state(served) == state(load_model(tmp_path / "new")[0])
    # Whoever writes to a mapped tensor has a copy of its pages.
    for tensor in (each for each in others.state_dict().values() if each.is_floating_point()):
        tensor.add_(1)
    assert state(others) != expected
    assert path.read_bytes() == before and state(load_model(model)[0]) == expected


def test_sleep_drops_pages_and_keeps_changes(model: Path, packed: Path) -> None:  # noqa: F811
    fields = {"skip_tokenizer_init": True, "max_model_len": 32, "enable_prefix_caching": False}
    LLM(str(model), **fields)
    llm = LLM(str(model), **fields)
    params = SamplingParams(max_tokens=2, temperature=0, logprobs=3, detokenize=False)

    def readings() -> list[float]:
        (output,) = llm.generate([{"prompt_token_ids": [3, 5, 7]}], params, use_tqdm=False)
        return output.outputs[0].logprobs.logprobs.tolist()

    def change(served: torch.nn.Module) -> None:
        for parameter in served.parameters():
            if parameter.dim() == 1:
                parameter.data.mul_(1.5)

    plain = readings()
    llm.sleep(level=1)
    llm.wake_up()
    assert readings() == plain
    llm.apply_model(change)
    changed = readings()
    assert changed != plain
    llm.sleep(level=1)
    llm.wake_up()
    assert readings() == changed
    llm.sleep(level=2)
    llm.wake_up()
    assert readings() == plain


def test_dropped_pages_are_those_of_the_file(tmp_path: Path) -> None:
    size = 64 * resource.getpagesize()
    (tmp_path / "file").write_bytes(bytes(range(256)) * (size // 256))
    mapping = Mapping(tmp_path / "file")
    expected = mapping.bytes.copy()
    expected[resource.getpagesize() * 5] = mapping.bytes[resource.getpagesize() * 5] = 99
    mapping.populate()
    # The whole pages alone of a range.
    assert mapping.release(1, 4 * resource.getpagesize())
    assert mapping.drop_pages() == 60 * resource.getpagesize()
    assert np.array_equal(mapping.bytes, expected)


def test_whole_tensors_of_the_checkpoint_are_not_copied(
    model: Path,
    packed: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load_model(model)
    copied = read_content(files(packed)[0])
    files(packed)[0].unlink()
    monkeypatch.setattr(module, "_LEAST_REFERRED", 10_000)
    expected = state(load_model(model)[0])
    content = read_content(files(packed)[0])
    assert content.sources == [str((model / "model.safetensors").resolve())]
    # The embeddings, which no head shares.
    assert copied.num_bytes - content.num_bytes == 503 * 72 * 4
    assert state(load_model(model)[0]) == expected


def test_a_thread_that_packs_finds_a_ranks_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LEAST_REFERRED", 1000)
    path, weight = tmp_path / "model.safetensors", torch.arange(1000.0)
    save_file({"weight": weight}, path)
    unused: Any = None
    group: Any = SimpleNamespace(world_size=2, rank=1)
    with tensor_parallel(group):
        own = module.PackedWeights(unused, unused, tmp_path / "packed", [path])
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(own._in_checkpoint, weight[500:].view(torch.uint8).numpy()).result()
    assert found == (path.resolve(), path.stat().st_size - 2000)


def test_models_larger_than_memory_are_told(
    model: Path,
    packed: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    expected = state(load_model(model)[0])
    monkeypatch.setattr(module, "available_bytes", lambda: 1000)
    assert state(load_model(model)[0]) == expected
    assert len(said(caplog)) == 1 and "larger than the memory" in said(caplog)[0]


def test_modules_of_others_are_not_kept(model: Path, packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Their code may keep what is not seen in attributes."""
    import vllm.models.dense.llama as llama

    monkeypatch.setattr(llama.LlamaForCausalLM, "__module__", "elsewhere")
    assert not is_mapped(load_model(model)[0])
    assert not files(packed)


def test_dummy_weights_are_not_kept(model: Path, packed: Path) -> None:  # noqa: F811
    load_model(model, load_format="dummy")
    assert not packed.exists()


def mapped_kib(pid: int) -> tuple[int, int]:
    """How much of packed files a process has in memory, and its proportional share of that."""
    sizes, is_packed = {"Rss:": 0, "Pss:": 0}, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0]:
            is_packed = fields[-1].endswith(".packed")
        elif is_packed and fields[0] in sizes:
            sizes[fields[0]] += int(fields[1])
    return sizes["Rss:"], sizes["Pss:"]


def kib_in_huge_pages(path: Path) -> int:
    """How much of a file is in this process's memory by huge pages, once all of it is there."""
    mapping = Mapping(path)
    mapping.populate()
    found, is_asked = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0]:
            is_asked = fields[-1] == str(path)
        elif is_asked and fields[0] == "FilePmdMapped:":
            found += int(fields[1])
    return found


def test_files_lie_in_huge_pages_where_the_system_has_them(tmp_path: Path) -> None:
    whole, block = 8, 1 << 21
    (tmp_path / "probe").write_bytes(bytes(4 * block))
    if not Path("/proc/self/smaps").exists() or not kib_in_huge_pages(tmp_path / "probe"):
        pytest.skip("files have no huge pages here")
    writer = packed_file.Writer(tmp_path / "part", 16 * block, lambda size: None)
    generator = np.random.default_rng(0)
    for _ in range(whole * 3):
        writer.add(generator.integers(0, 256, block // 3, dtype=np.uint8))
    writer.finish({}, None, tmp_path / "model.packed")
    del writer
    gc.collect()
    assert kib_in_huge_pages(tmp_path / "model.packed") >= (whole - 1) * block // 1024


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not say")
def test_processes_share_memory(model: Path, packed: Path) -> None:  # noqa: F811
    served, _ = load_model(model)
    (path,) = files(packed)
    weights = [tensor for tensor in held_tensors(served) if tensor.nbytes > 4096]
    assert len(weights) > 10
    (mapping,) = served.__dict__["mappings"]
    assert all(0 < tensor.data_ptr() - mapping.address < len(mapping) for tensor in weights)
    del served, weights
    gc.collect()
    code = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[1] / "support")!r})
        from pathlib import Path
        from models_util import load_model
        from vllm.layers.weight_update import held_tensors
        model, _ = load_model(Path({str(model)!r}))
        assert sum(float(each.float().sum()) for each in held_tensors(model) if each.numel() > 1) < 1e30
        print("ready", flush=True)
        sys.stdin.readline()
    """
    command = [sys.executable, "-c", FORKED + textwrap.dedent(code)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(2)]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        sizes = [mapped_kib(process.pid) for process in processes]
    finally:
        for process in processes:
            process.communicate("\n", timeout=60)
    whole = path.stat().st_size / 1024
    assert all(rss > 0.9 * whole for rss, _ in sizes)
    assert sum(pss for _, pss in sizes) < 1.15 * whole


def agreed(model: Path, packed: Path) -> list[tuple[str | None, bool]]:  # noqa: F811
    """The work of two ranks that ask each other, and whether their shares are there."""
    ranks = ThreadRanks(2)
    args = EngineArgs(str(model), skip_tokenizer_init=True, max_model_len=32, dtype="float32", tensor_parallel_size=2)
    config = args.create_engine_config().model_config

    def ask(rank: int) -> tuple[str | None, bool]:
        with tensor_parallel(ranks.groups[rank]), module.open_packed_weights(config, False, None) as own:
            if own is None:
                return None, False
            return "write" if own.may_write else "map", own.content is not None

    found = ranks.run(ask)
    ranks.close()
    return found


@pytest.mark.parametrize("num_stages", [1, 2])
def test_each_rank_maps_its_share(
    num_stages: int,
    model: Path,
    packed: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make_random_model("llama", "small", model)
    fields = {"skip_tokenizer_init": True, "max_model_len": 32, "dtype": "float32", "tensor_parallel_size": 2}
    fields["pipeline_parallel_size"] = num_stages
    params = SamplingParams(max_tokens=3, temperature=0, logprobs=3, detokenize=False)

    def readings() -> list[float]:
        llm = LLM(str(model), **fields)
        (output,) = llm.generate([{"prompt_token_ids": [3, 5, 7]}], params, use_tqdm=False)
        llm.llm_engine.engine_core.shutdown()
        return output.outputs[0].logprobs.logprobs.tolist()

    first = readings()
    written = {path: path.stat().st_ino for path in files(packed)}
    second = readings()
    assert {path: path.stat().st_ino for path in files(packed)} == written
    assert [path.stem.partition("-")[2] for path in files(packed)] == ["0of2", "1of2"] * num_stages
    assert len({path.stem.partition("-")[0] for path in files(packed)}) == num_stages
    # So do ranks that no executor tells what to do, such as Ray's.
    if num_stages == 1:
        assert agreed(model, packed) == [("map", True)] * 2
    # A rank that lacks its share has all of its stage pack again.
    files(packed)[1].unlink()
    if num_stages == 1:
        assert agreed(model, packed) == [("write", False)] * 2
        with PackedFolder(packed).locked(files(packed)[0].stem.partition("-")[0], 0.0):
            assert agreed(model, packed) == [(None, False)] * 2
        # A machine that keeps none has the others keep none.
        with monkeypatch.context() as patch:
            place = module._place
            patch.setattr(module, "_place", lambda *each: None if get_tp_group().rank else place(*each))
            assert agreed(model, packed) == [(None, False)] * 2
    third = readings()
    assert len(files(packed)) == 2 * num_stages
    monkeypatch.setenv("VLLM_PACKED_CACHE", "0")
    assert first == second == third == readings()
