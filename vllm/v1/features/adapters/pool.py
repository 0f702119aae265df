"""Which LoRA adapters the workers hold, and whose requests may run together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vllm.config.lora import LoRAConfig
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest

Call = Callable[[str, tuple], Any]


@dataclass(eq=False)
class Adapter:
    """
    Attributes:
        pool: whose it is.
        request: as a caller gave it.
        number: what the workers know it by, of one load, and never used again; 0: they do not hold it.
        num_requests: unfinished ones.
        num_running: those of them that have slots.
        is_pinned: it is never unloaded for another.
        content: names what this load has read, for other processes; "": that cannot be said.
    """

    pool: AdapterPool
    request: LoRARequest
    number: int = 0
    num_requests: int = 0
    num_running: int = 0
    is_pinned: bool = False
    content: str = ""

    @property
    def worker_request(self) -> LoRARequest:
        """As the workers see it."""
        return replace(self.request, lora_int_id=self.number, load_inplace=False)


class AdapterPool:
    """The adapters of an engine core.

    An adapter is read when it is added, and again when a request of it is to run that was evicted: beyond
    max_cpu_loras the one least recently used goes that is neither pinned nor running. Each load has a number of its
    own, by which the prefix cache knows what it computed: a file may have changed.

    Args:
        call: of a method of every worker, with its arguments: add_lora(LoRARequest), whose ValueError says what is
            wrong with the files, and remove_lora(number).
        patience: so many requests of running adapters pass one that waits for its adapter's turn.
    """

    def __init__(self, config: LoRAConfig, call: Call, patience: int = 256) -> None:
        self._config, self._call, self._patience = config, call, patience
        self._numbers = itertools.count(1)
        self._listed: dict[int, Adapter] = {}  # by lora_int_id: loaded, or with unfinished requests
        self._loaded: dict[Adapter, None] = {}  # least recently used first
        self._running: dict[Adapter | None, None] = {}
        self.num_passed = 0  # requests that were admitted before one that waits for a turn

    def add(self, request: LoRARequest) -> bool:
        """Load an adapter, unless it is loaded; with `load_inplace` again. Requests that run go on with the old one.

        Raises:
            VLLMValidationError: its files, or another path under its id. Nothing has changed then.
        """
        known = self._listed.get(request.lora_int_id)
        if known is not None and not request.load_inplace:
            self._check_same(known, request)
            if known.number:
                self._use(known)
                return True
        new = Adapter(self, request) if known is None or request.load_inplace else known
        self._load(new)
        self._listed[request.lora_int_id] = new
        if known is not None and known is not new:
            self._drop_unlisted(known)
        self._trim()
        return True

    def remove(self, lora_int_id: int) -> bool:
        """Unload an adapter, now or once the last running request of it ends; False: it is not loaded."""
        known = self._listed.get(lora_int_id)
        if known is None or not known.number:
            return False
        del self._listed[lora_int_id]
        self._drop_unlisted(known)
        return True

    def loaded_ids(self) -> set[int]:
        """`lora_int_id` of the loaded ones."""
        return {key for key, adapter in self._listed.items() if adapter.number}

    def pin(self, lora_int_id: int) -> bool:
        """Never unload it for another.

        Raises:
            VLLMValidationError: it is not loaded, or as many are pinned as max_cpu_loras lets be.
        """
        adapter = self._listed.get(lora_int_id)
        if adapter is None or not adapter.number:
            raise VLLMValidationError(f"no adapter has the id {lora_int_id}", "lora_int_id", lora_int_id)
        num_pinned = sum(each.is_pinned for each in self._loaded if each is not adapter)
        if num_pinned + 1 > self._config.num_kept:
            raise VLLMValidationError(
                f"max_cpu_loras={self._config.num_kept} adapters are pinned", "lora_int_id", lora_int_id
            )
        adapter.is_pinned = True
        return True

    def bind(self, request: LoRARequest) -> Adapter:
        """The adapter of a request that is queued; `release` it when that ends.

        Raises:
            VLLMValidationError: another path is loaded under its id.
        """
        adapter = self._listed.get(request.lora_int_id)
        if adapter is None:
            adapter = self._listed[request.lora_int_id] = Adapter(self, request)
        self._check_same(adapter, request)
        adapter.num_requests += 1
        return adapter

    def release(self, adapter: Adapter) -> None:
        """A request of it has ended."""
        adapter.num_requests -= 1
        self._forget_unused(adapter)

    @property
    def open(self) -> Set[Adapter | None] | None:
        """Whose requests may be admitted; None: everyone's. Those without an adapter always may."""
        if len(self._running) < self._config.max_loras:
            return None
        return {None} if self.num_passed >= self._patience else {None, *self._running}

    def begin(self, adapter: Adapter) -> None:
        """A request of it is admitted; it is loaded."""
        adapter.num_running += 1
        if adapter not in self._running:
            self.num_passed = 0
        self._running[adapter] = None
        self._use(adapter)

    def end(self, adapter: Adapter) -> None:
        """A request of it has lost its slot."""
        adapter.num_running -= 1
        if not adapter.num_running:
            del self._running[adapter]
            if self._listed.get(adapter.request.lora_int_id) is not adapter:
                self._unload(adapter)
            self._trim()

    def make_ready(self, adapter: Adapter) -> str | None:
        """Load an adapter that has been evicted; an error's text."""
        if not adapter.number:
            try:
                self._load(adapter)
            except ValueError as error:
                return str(error.args[0])
            # Not the one that is to run.
            adapter.num_running += 1
            self._trim()
            adapter.num_running -= 1
        return None

    @property
    def running_names(self) -> list[str]:
        """The names of the adapters with running requests."""
        return [adapter.request.lora_name for adapter in self._running if adapter is not None]

    @property
    def waiting_names(self) -> list[str]:
        """The names of those with waiting ones."""
        every = {*self._listed.values(), *self._loaded}
        return sorted(each.request.lora_name for each in every if each.num_requests > each.num_running)

    def _check_same(self, adapter: Adapter, request: LoRARequest) -> None:
        if adapter.request.lora_path != request.lora_path:
            raise VLLMValidationError(
                f"lora_int_id {request.lora_int_id} is adapter {adapter.request.lora_name!r} of another path: give "
                f"{request.lora_name!r} an id of its own, remove the other, or set load_inplace",
                "lora_request",
                request.lora_name,
            )

    def _use(self, adapter: Adapter) -> None:
        self._loaded.pop(adapter, None)
        self._loaded[adapter] = None

    def _load(self, adapter: Adapter) -> None:
        number = next(self._numbers)
        request = adapter.request
        content = _content(request.lora_path)
        try:
            self._call("add_lora", (replace(request, lora_int_id=number, load_inplace=False),))
        except VLLMValidationError:
            raise
        except ValueError as error:
            raise VLLMValidationError(str(error), "lora_request", request.lora_name) from error
        adapter.number = number
        # A file that was changed meanwhile may have been read before or afterwards.
        adapter.content = content if content == _content(request.lora_path) else ""
        self._use(adapter)

    def _unload(self, adapter: Adapter) -> None:
        if adapter.number:
            number, adapter.number = adapter.number, 0
            adapter.is_pinned = False
            del self._loaded[adapter]
            self._call("remove_lora", (number,))

    def _drop_unlisted(self, adapter: Adapter) -> None:
        if not adapter.num_running:
            self._unload(adapter)

    def _forget_unused(self, adapter: Adapter) -> None:
        key = adapter.request.lora_int_id
        if not adapter.num_requests and not adapter.number and self._listed.get(key) is adapter:
            del self._listed[key]

    def _evictable(self) -> Iterator[Adapter]:
        return (each for each in self._loaded if not each.num_running and not each.is_pinned)

    def _trim(self) -> None:
        """Unload what is beyond max_cpu_loras, but for what runs or is pinned."""
        while len(self._loaded) > self._config.num_kept:
            victim = next(self._evictable(), None)
            if victim is None:
                return
            self._unload(victim)
            self._forget_unused(victim)


def _content(path: str) -> str:
    """Paths, sizes and times of an adapter's files; "": it is in no folder of this machine."""
    try:
        files = sorted(each for each in Path(path).expanduser().resolve().iterdir() if each.is_file())
        stats = [(str(each), each.stat()) for each in files]
    except OSError:
        return ""
    return repr([(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats])
