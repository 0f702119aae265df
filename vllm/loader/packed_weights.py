"""Packed weights are made once, written, and mapped at every later start, by all processes of a machine."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from vllm import envs
from vllm.config import ModelConfig
from vllm.config.checkpoint.mapped_tensors import stored_files, tensor_places
from vllm.config.checkpoint.shards import shard_files
from vllm.config.load import reads_folder
from vllm.distributed.communicator import Communicator
from vllm.distributed.parallel_state import get_tp_group
from vllm.distributed.stages import get_stage
from vllm.layers.weight_update import own_tensors
from vllm.loader import packed_state
from vllm.loader.identity import model_identity
from vllm.logger import init_logger
from vllm.ops.cpu_kernels import packs_for
from vllm.ops.experts import PackedExperts
from vllm.utils.host_memory import available_bytes
from vllm.utils.packed import ahead
from vllm.utils.packed.file import Content, DamagedFileError, Mapping, Writer, find_damage, read_content
from vllm.utils.packed.folder import PackedFolder, packed_folder, say_once

logger = init_logger(__name__)

FORMAT = 2
"""The version of the files' format; a change of their contents raises it."""

# Smaller tensors stay in memory of the process's own.
_LEAST_SHARED = 1 << 16
# Larger ones may be the checkpoint's own bytes.
_LEAST_REFERRED = 1 << 20
_COMPARED_FIRST = 4096
_GIB = 2**30
_WAIT_SECONDS = 300.0  # for others that pack
# A start is over by then, and short programs are not slowed.
_VERIFY_AFTER_SECONDS = 10.0
# The code that decides how weights are packed.
_ROOMS = ("ops", "layers", "quantization", "models", "loader", "config/checkpoint")


@cache
def _code_identity() -> list[tuple[str, int, int]]:
    """Names, sizes and times of modification of the files that decide how weights are packed."""
    root = Path(__file__).parents[1]
    files = [*root.glob("_cpu_ops*"), *(path for room in _ROOMS for path in (root / room).rglob("*.py"))]
    stats = [(path, path.stat()) for path in sorted(files)]
    return [(path.relative_to(root).as_posix(), stat.st_size, stat.st_mtime_ns) for path, stat in stats]


def _fingerprint(config: ModelConfig, files: list[Path], takes_adapters: bool, world_size: int) -> dict[str, Any]:
    """All that packed weights depend on."""
    parts = {"ranks": world_size, "stage": get_stage().part}
    return (
        {"format": FORMAT, "code": _code_identity(), "adapters": takes_adapters} | parts | model_identity(config, files)
    )


Plan = Literal["map", "write", "neither"]
"""The work of all ranks of a group: each maps its share, or packs and writes it, or packs and keeps nothing."""


@contextlib.contextmanager
def planned(config: ModelConfig, takes_adapters: bool, world_size: int) -> Iterator[Plan]:
    """The work of the ranks of a group on this machine, while they load. Until they have, no other process packs these
    weights."""
    found = _place(config, takes_adapters, world_size)
    if found is None:
        yield "neither"
        return
    folder, name, _ = found
    paths = [folder.file(name, f"{rank}of{world_size}") for rank in range(world_size)]
    if all(map(_is_whole, paths)):
        yield "map"
        return
    with contextlib.ExitStack() as stack:
        is_ours = _begin(stack, folder, name)
        # Another process may have packed them meanwhile.
        is_there = all(map(_is_whole, paths))
        yield "map" if is_there else "write" if is_ours else "neither"


@contextlib.contextmanager
def open_packed_weights(config: ModelConfig, takes_adapters: bool, plan: Plan | None) -> Iterator[PackedWeights | None]:
    """The packed weights of a model on the CPU as this rank has them, whether they are on disk or not; None: they are
    not to be. Within, no other process packs these weights. `plan`: of a group of several ranks; None: they agree
    on one. RuntimeError: this rank's are not what they were when it was made."""
    group = get_tp_group()
    found = None if plan == "neither" else _place(config, takes_adapters, group.world_size)
    are_kept = found is not None
    if group.world_size > 1 and plan is None:
        # Machines may differ, such as in their kernels.
        are_kept = _on_all(group, are_kept)
    if found is None or not are_kept:
        yield None
        return
    folder, name, files = found
    ahead.end_unless(name)
    own = PackedWeights(config, folder, folder.file(name, f"{group.rank}of{group.world_size}"), files)
    with contextlib.ExitStack() as stack:
        if group.world_size > 1 and plan is None:
            plan = _agreed(stack, group, folder, name, own.path)
            if plan is None:
                yield None
                return
        if plan == "write":
            own.may_write = True
        elif not own.find() and plan == "map":
            raise RuntimeError(f"{own.path} was removed while the ranks started: start again")
        if plan is None and own.content is None:
            own.may_write = _begin(stack, folder, name)
            # Another process may have packed them meanwhile.
            if own.may_write and own.find():
                stack.close()
        try:
            yield own
        finally:
            own.end()


def _agreed(
    stack: contextlib.ExitStack, group: Communicator, folder: PackedFolder, name: str, path: Path
) -> Plan | None:
    """The work of ranks that may be on several machines, each of which calls this with the `path` of its share; None:
    another process packs on one of them. On each machine one rank keeps others from packing until the stack is closed,
    and nobody waits for them: who waits for a rank that does so would count it as hung."""
    if _on_all(group, _is_whole(path)):
        return "map"
    machines = group.all_gather(torch.tensor([folder.machine()])).flatten().tolist()
    is_first = machines.index(machines[group.rank]) == group.rank
    return "write" if _on_all(group, not is_first or _begin(stack, folder, name, 0.0)) else None


def _on_all(group: Communicator, flag: bool) -> bool:
    return bool(group.all_gather(torch.tensor([int(flag)])).all())


def _place(config: ModelConfig, takes_adapters: bool, world_size: int) -> tuple[PackedFolder, str, list[Path]] | None:
    """The folder of a model's packed weights, their name there, and the checkpoint's files; None: they are not to be
    kept."""
    if not reads_folder(config.load_format):
        return None
    folder = packed_folder(config.packed_cache_gib)
    if folder is None or packs_for() is None:
        return None
    files = stored_files(shard_files(Path(config.path)))
    if sum(path.stat().st_size for path in files) < envs.packed_cache_least_bytes():
        return None
    fingerprint = _fingerprint(config, [path.resolve() for path in files], takes_adapters, world_size)
    return folder, folder.name(fingerprint), files


def _begin(stack: contextlib.ExitStack, folder: PackedFolder, name: str, wait_seconds: float = _WAIT_SECONDS) -> bool:
    """Keep others from packing until the stack is closed. False: the folder cannot be written to, or they do not come
    to an end."""
    try:
        if stack.enter_context(folder.locked(name, wait_seconds)):
            return True
        say_once("another process packs these weights, and has not come to an end: they are packed here, and not kept")
    except OSError as error:
        say_once("packed weights are not kept, so that the next start packs them again: %s", error)
    return False


def _is_whole(path: Path) -> bool:
    try:
        read_content(path)
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


@dataclass
class _Placed:
    """A tensor whose bytes were written."""

    tensor: weakref.ref[Tensor]
    number: int
    is_mapped: bool


class PackedWeights:
    """A model's packed weights on disk.

    Attributes:
        path: of this rank's.
        content: what is there; None: nothing yet.
        may_write: whether they may be written once they are packed.
    """

    def __init__(self, config: ModelConfig, folder: PackedFolder, path: Path, files: list[Path]) -> None:
        self.path, self.may_write = path, False
        self.content: Content | None = None
        self._config, self._folder, self._files = config, folder, files
        self._writer: Writer | None = None
        self._built: packed_state.BuiltState | None = None
        self._placed: dict[int, _Placed] = {}
        self._sources: dict[str, Mapping] = {}
        self._checkpoint: dict[int, list[tuple[Path, int]]] | None = None
        self._started = 0.0
        # Threads that pack have no group of their own.
        self._num_ranks = get_tp_group().world_size
        self._lock = threading.Lock()

    def find(self) -> bool:
        """Look whether they are there."""
        try:
            self.content = read_content(self.path)
        except (FileNotFoundError, NotADirectoryError):
            self.content = None
        except (OSError, DamagedFileError, ValueError, KeyError, TypeError) as error:
            say_once("packed weights cannot be read, and are packed anew: %s", error)
            self._folder.remove(self.path)
            self.content = None
        return self.content is not None

    def restore(self, model: nn.Module) -> bool:
        """Give a model that was built the weights that are there. False, and nothing is changed: they do not fit it.
        RuntimeError: the same, where other ranks have taken theirs."""
        content, changes = self.content, None
        if content is not None:
            try:
                mapping = Mapping(self.path)
                changes = packed_state.decode(content.state, lambda number: self._piece(content, mapping, number))
                known = dict(model.named_modules())
                if unknown := [change.name for change in changes if change.name not in known]:
                    raise KeyError(unknown[0])
            except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError, RuntimeError) as error:
                changes = None
                say_once("packed weights do not fit this model, and are packed anew: %r", error)
                self._folder.remove(self.path)
        if content is None or changes is None:
            self.content = None
            if get_tp_group().world_size > 1:
                raise RuntimeError(f"{self.path} was removed, as it does not fit the model: start again")
            return False
        packed_state.apply(model, changes)
        self._folder.touch(self.path)
        self._watch(model, mapping, content)
        return True

    def built(self, model: nn.Module) -> None:
        """The model's weights will be loaded and packed, and given to `take` and `keep`."""
        if not self.may_write:
            return
        self._built = packed_state.BuiltState(model)
        self._started = time.monotonic()
        size = sum(path.stat().st_size for path in self._files)
        try:
            path = self._folder.temporary(self.path)
            self._writer = Writer(path, 10 * size + _GIB, lambda size: self._check_room(path, size))
        except OSError as error:
            self._give_up(error)

    def _check_room(self, path: Path, size: int) -> None:
        written = path.stat().st_blocks * 512
        self._folder.check_room(self.path, size, min(written, size))

    def take(self, module: nn.Module) -> None:
        """Write a module's packed weights, whose memory is the file's from here on. Any thread may call it."""
        with self._lock:
            if self._writer is None:
                return
            try:
                for tensor in own_tensors(module):
                    if tensor.nbytes >= _LEAST_SHARED and not tensor.is_meta:
                        self._number(tensor)
            except OSError as error:
                self._give_up(error)

    def keep(self, model: nn.Module) -> None:
        """Write what has not been taken, and the description. Where that is not possible it is said once, and the model
        has its weights all the same."""
        if self._writer is None or self._built is None:
            return
        writer = self._writer
        try:
            state = packed_state.encode(self._built.changes(), self._number)
            writer.finish(self._about(), state, self.path)
        except packed_state.NotStorableError as error:
            logger.info("packed weights are not kept: %s", error)
            self._give_up(None)
        except OSError as error:
            self._give_up(error)
        else:
            self._writer = None
            seconds = time.monotonic() - self._started
            logger.info("packed weights written: %s, %.2f GiB, in %.1f s", self.path, self._size / _GIB, seconds)
            self._watch(model, writer.mapping, None)
        for experts in _packed_experts(model):
            experts.renew()

    def end(self) -> None:
        """Discard what was not finished."""
        if self._writer is not None:
            self._writer.discard()
            self._writer = None

    @property
    def _size(self) -> int:
        with contextlib.suppress(OSError):
            return self.path.stat().st_size
        return 0

    def _about(self) -> dict[str, Any]:
        config, group = self._config, get_tp_group()
        level = packs_for()
        assert level is not None
        return {
            "model": config.model,
            "dtype": config.dtype,
            "quantization": config.quantization,
            "level": level[0],
            "rank": [group.rank, group.world_size],
            "created": int(time.time()),
        }

    def _number(self, tensor: Tensor) -> int:
        """Write a tensor, and let its memory be the file's."""
        placed = self._placed.get(id(tensor))
        if placed is not None and placed.tensor() is tensor:
            return placed.number
        writer = self._writer
        assert writer is not None
        dense, strides = packed_state.layout(tensor)
        data = dense.reshape(-1).view(torch.uint8).numpy()
        found = self._in_checkpoint(data)
        if found is None:
            number = writer.add(data)
            memory = writer.mapping
        else:
            number = writer.refer(*found, data.nbytes)
            memory = self._source(str(found[0]))
        is_mapped = data.nbytes >= _LEAST_SHARED
        if is_mapped:
            piece = writer.pieces[number]
            with torch.inference_mode(tensor.is_inference()):
                bytes_there = torch.from_numpy(memory.bytes[piece.start : piece.start + piece.size])
                tensor.data = packed_state.over(bytes_there, tensor.dtype, tuple(tensor.shape), strides)
        self._placed[id(tensor)] = _Placed(weakref.ref(tensor), number, is_mapped)
        return number

    def _give_up(self, error: OSError | None) -> None:
        """Go on without a file: its disk is free again, and the memory this process's own."""
        if error is not None:
            say_once("packed weights are not kept, so that the next start packs them again: %s", error)
        tensors = [
            tensor for placed in self._placed.values() if placed.is_mapped and (tensor := placed.tensor()) is not None
        ]
        if sum(tensor.nbytes for tensor in tensors) < available_bytes():
            for tensor in tensors:
                with torch.inference_mode(tensor.is_inference()):
                    tensor.data = tensor.data.clone()
        self._placed.clear()
        self.end()

    def _piece(self, content: Content, mapping: Mapping, number: int) -> Tensor:
        piece = content.pieces[number]
        memory = mapping if piece.source is None else self._source(content.sources[piece.source])
        if piece.start + piece.size > len(memory):
            raise ValueError(f"{self.path.name} is cut")
        return torch.from_numpy(memory.bytes[piece.start : piece.start + piece.size])

    def _source(self, path: str) -> Mapping:
        if path not in self._sources:
            self._sources[path] = Mapping(Path(path))
        return self._sources[path]

    def _in_checkpoint(self, data: np.ndarray[Any, np.dtype[np.uint8]]) -> tuple[Path, int] | None:
        """A file of the checkpoint that has these very bytes, and where: a whole tensor, or a rank's equal part."""
        if data.nbytes < _LEAST_REFERRED:
            return None
        if self._checkpoint is None:
            self._checkpoint = {}
            for file, start, size in tensor_places(self._files):
                for parts in {1, self._num_ranks}:
                    if not size % parts:
                        places = [(file.resolve(), start + part * (size // parts)) for part in range(parts)]
                        self._checkpoint.setdefault(size // parts, []).extend(places)
        for path, start in self._checkpoint.get(data.nbytes, ()):
            source = self._source(str(path))
            there = source.bytes[start : start + data.nbytes]
            first = slice(0, _COMPARED_FIRST)
            # Its values must lie on whole numbers' places, whatever their type.
            if not start % 8 and np.array_equal(data[first], there[first]) and np.array_equal(data, there):
                # A step needs few rows of an embedding.
                source.release(start, data.nbytes)
                return path, start
        return None

    def _watch(self, model: nn.Module, mapping: Mapping, content: Content | None) -> None:
        """Note what the model maps; read it ahead and, where it was there, check it meanwhile."""
        ahead.note(self._folder.path, self.path.name.partition("-")[0])
        mappings = [mapping, *self._sources.values()]
        model.__dict__["mappings"] = mappings
        if content is None:
            return
        size, available = content.num_bytes, available_bytes()
        logger.info("packed weights mapped: %s, %.2f GiB", self.path, size / _GIB)
        if size > available:
            logger.warning(
                "the model's packed weights, %.1f GiB, are larger than the memory that is free, %.1f GiB: they are "
                "read from %s again and again, which is slow",
                *(size / _GIB, available / _GIB, self.path.parent),
            )
            return
        thread = threading.Thread(
            target=_look_after, args=(weakref.ref(model), weakref.ref(mapping), self._folder, self.path), daemon=True
        )
        thread.name = "packed-weights"
        thread.start()


def _look_after(model: weakref.ref[nn.Module], mapping: weakref.ref[Mapping], folder: PackedFolder, path: Path) -> None:
    if (memory := mapping()) is not None:
        memory.populate()
    del memory
    time.sleep(_VERIFY_AFTER_SECONDS)
    with contextlib.suppress(OSError), _only_one(path):
        damage = find_damage(path, lambda: model() is None)
        owner: Any = model()
        if damage is not None:
            folder.remove(path)
            damage = f"{damage}: it was removed, and results since the start may be wrong. Restart the engine"
            logger.error(damage)
            if owner is not None:
                owner.weight_updater.damage = damage


@contextlib.contextmanager
def _only_one(path: Path) -> Iterator[None]:
    """OSError where another process does this, too."""
    import fcntl

    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(file)


def drop_pages(model: nn.Module) -> None:
    """Give the memory of a model's mapped weights back to the system, which maps them again when they are used. What
    was changed stays."""
    for mapping in model.__dict__.get("mappings", ()):
        mapping.drop_pages()


def _packed_experts(model: nn.Module) -> Iterator[PackedExperts]:
    for module in model.modules():
        yield from (value for value in vars(module).values() if isinstance(value, PackedExperts))
