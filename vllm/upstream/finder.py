"""Makes modules of the rows of `names.toml` when they are imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from vllm.upstream.table import Row, table

_ROOT = "vllm."
# Modules of ours that do not have all of upstream's names; the table has the others.
_WITH_MORE = {
    "vllm.attention",
    "vllm.config",
    "vllm.config.load",
    "vllm.config.lora",
    "vllm.distributed",
    "vllm.distributed.parallel_state",
    "vllm.envs",
    "vllm.exceptions",
    "vllm.inputs",
    "vllm.inputs.data",
    "vllm.logprobs",
    "vllm.tokenizers",
    "vllm.tracing",
    "vllm.utils",
    "vllm.utils.serial_utils",
    "vllm.v1.core.kv_cache_manager",
    "vllm.v1.engine",
    "vllm.v1.engine.core",
    "vllm.v1.engine.detokenizer",
    "vllm.v1.metrics.loggers",
    "vllm.v1.metrics.stats",
    "vllm.v1.outputs",
    "vllm.v1.sample.logits_processor",
    "vllm.v1.structured_output",
}
# Modules that have, or whose classes have, further attributes: attributes.py has them, a row each.
_WITH_ATTRIBUTES = {
    "vllm.config.device",
    "vllm.config.kv_transfer",
    "vllm.config.model",
    "vllm.config.parallel",
    "vllm.config.vllm",
    "vllm.distributed.communicator",
    "vllm.entrypoints.async_llm",
    "vllm.entrypoints.llm",
    "vllm.logprobs.flat",
    "vllm.models.registry",
    "vllm.v1.engine.core",
    "vllm.v1.executor.worker",
}


def install() -> None:
    """Put the finder before the one that looks for files, which it asks first: our modules win, but not a folder that
    has no modules left, nor another checkout of the package. Once in a process."""
    if Finder in sys.meta_path:
        return
    place = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
    sys.meta_path.insert(place, Finder)


class Finder:
    """A meta path finder of modules below `vllm`. The table is read when a file is missing.

    It imports nothing: Python holds the global import lock meanwhile, which another thread that imports the same needs.
    """

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """A file's, else the table's, else none."""
        if not name.startswith(_ROOT):
            return None
        spec = _of_file(name, path, target)
        if spec is None:
            return _listed(name)
        if name in _WITH_MORE | _WITH_ATTRIBUTES and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _MoreLoader(name, spec.loader.path)
        return spec


def _of_file(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
    """None for a folder that has no modules, too."""
    spec = PathFinder.find_spec(name, path, target)
    return spec if spec is not None and spec.loader is not None else None


def _listed(name: str) -> ModuleSpec | None:
    """By the table."""
    rows = table()
    found = next(filter(None, map(_find, rows.candidates(name))), None)
    if found is None and name not in rows.names and name not in rows.packages:
        return None
    is_package = found is None or found.submodule_search_locations is not None or name in rows.packages
    has_more = any(row.place or row.status == "refused" for row in rows.names.get(name, {}).values())
    loader: Any = _AliasLoader(found) if found and not is_package and not has_more else _ListLoader(found)
    spec = ModuleSpec(name, loader, is_package=is_package)
    if found is not None and found.origin is not None:
        spec.origin, spec.has_location = found.origin, True
    return spec


def _find(module: str) -> ModuleSpec | None:
    """The spec of a file or by the table; what is above it is not imported."""
    root, *parts = module.split(".")
    path: Sequence[str] | None = sys.modules[root].__path__
    spec, name = None, root
    for part in parts:
        name = f"{name}.{part}"
        spec = _of_file(name, path) if path else None
        path = spec.submodule_search_locations if spec is not None else None
    return spec or _listed(module)


class _MoreLoader(SourceFileLoader):
    """Loads a module of ours that has further names by the table or in a room of its path, or whose classes have
    further attributes."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return ListedModule(spec.name, None, is_ours=True) if spec.name in _WITH_MORE else None

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ in _WITH_ATTRIBUTES:
            from vllm.upstream import attributes

            attributes.add(module)


class _ListLoader:
    """The loader of a listed module. A package's alias is one, too: were it the package itself, the modules below it
    would be loaded once more by their other path.

    Args:
        found: the module that has what no row says.
    """

    def __init__(self, found: ModuleSpec | None) -> None:
        self._found = found

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return ListedModule(spec.name, self._found.name if self._found else None)

    def exec_module(self, module: ModuleType) -> None:
        if self._found is not None:
            importlib.import_module(self._found.name)

    def get_code(self, name: str) -> CodeType | None:
        """For `python -m`."""
        if self._found is None:
            return None
        loader: Any = self._found.loader
        return loader.get_code(self._found.name)


class _AliasLoader(_ListLoader):
    """The loader of one more path to a module: both give the same object.

    Until it is imported, a listed module stands in for it, which another thread's `from ... import` may get.
    """

    def exec_module(self, module: ModuleType) -> None:
        # An import looks up here what it returns.
        assert self._found is not None
        sys.modules[module.__name__] = importlib.import_module(self._found.name)


class ListedModule(ModuleType):
    """A module of names that are elsewhere: read and set there, so that nothing has two values. Refused names are made
    at their first use."""

    def __init__(self, name: str, real: str | None, is_ours: bool = False) -> None:
        super().__init__(name, f"Upstream's names of `{name}`.")
        self.__dict__.update(_real=real, _is_ours=is_ours)

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return _names(self)
        if place := _place(self, name):
            try:
                return getattr(importlib.import_module(place[0]), place[1])
            except AttributeError as error:
                if error.obj is not sys.modules[place[0]]:
                    raise  # while the module is imported
        row = _row(self, name)
        if row is None or row.status != "refused" or row.place is not None:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name, obj=self)
        from vllm.upstream.refusals import refused

        return self.__dict__.setdefault(name, refused(self.__name__, name, row.why, row.is_function))

    def __setattr__(self, name: str, value: Any) -> None:
        # Submodules are set by the import of them.
        place = None if isinstance(value, ModuleType) or name in self.__dict__ else _place(self, name)
        if place is None:
            super().__setattr__(name, value)
        else:
            setattr(importlib.import_module(place[0]), place[1], value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__ or (place := _place(self, name)) is None:
            super().__delattr__(name)
        else:
            delattr(importlib.import_module(place[0]), place[1])

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *self.__all__})


def _row(module: ModuleType, name: str) -> Row | None:
    if name.startswith("__"):
        return None
    return table().names.get(module.__name__, {}).get(name)


def _place(module: ModuleType, name: str) -> tuple[str, str] | None:
    """(module, name) of which `name` is an alias."""
    if name.startswith("__"):
        return None
    row, real = _row(module, name), _real(module)
    if row is not None and row.place is not None:
        return row.place
    return None if real is None else (real, name)


def _real(module: ModuleType) -> str | None:
    """The module that has what no row says."""
    if not module.__dict__["_is_ours"]:
        return module.__dict__["_real"]
    return next(iter(table().candidates(module.__name__)), None)


def _names(module: ModuleType) -> list[str]:
    """The names that `import *` takes."""
    rows, real = table().names.get(module.__name__, {}), _real(module)
    names = [name for name, row in rows.items() if "." not in name and (row.place or row.status == "refused")]
    if real is None:
        return names
    other = importlib.import_module(real)
    return [*names, *getattr(other, "__all__", (name for name in vars(other) if not name.startswith("_")))]
