"""Makes modules of the rows of `names.toml` when they are imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.upstream.table import Row

_ROOT = "vllm."
# Packages with files, and with further names in the table.
_WITH_MORE = ("vllm.config", "vllm.inputs", "vllm.utils", "vllm.v1.engine", "vllm.v1.sample.logits_processor")


def install() -> None:
    """Put the finder before the one that looks for files, which it asks first: our modules win, but not a folder that
    has no modules left, nor another checkout of the package. Once in a process."""
    if Finder in sys.meta_path:
        return
    place = sys.meta_path.index(PathFinder) if PathFinder in sys.meta_path else len(sys.meta_path)
    sys.meta_path.insert(place, Finder)


class Finder:
    """Of modules below `vllm`; a meta path finder. The table is read when a file is missing."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """A file's, else the table's, else none."""
        if not name.startswith(_ROOT):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return _listed(name)
        if name in _WITH_MORE and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _RoomLoader(name, spec.loader.path)
        return spec


def _listed(name: str) -> ModuleSpec | None:
    """By the table."""
    from vllm.upstream.table import table

    rows = table()
    found = next(filter(None, map(_find, rows.candidates(name))), None)
    if found is None and name not in rows.names and name not in rows.packages:
        return None
    has_more = name in rows.names or name in rows.packages
    loader: Any
    if found is None or found.submodule_search_locations is not None or has_more:
        loader = _ListLoader(found.name if found else None)
    else:
        loader = _AliasLoader(found)
    spec = ModuleSpec(name, loader, is_package=loader.is_package(name))
    if found is not None and found.origin is not None:
        spec.origin, spec.has_location = found.origin, True
    return spec


def _find(module: str) -> ModuleSpec | None:
    try:
        return find_spec(module)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module}.".startswith(f"{error.name}."):
            return None
        raise  # a package that is not installed


class _RoomLoader(SourceFileLoader):
    """Of a package that has files."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Room(spec.name)


class _Room(ModuleType):
    """What its files do not define is in the table: a row, or the first room of its path that has the name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise _missing(self, name)
        from vllm.upstream.table import table

        return _value(self, name, next(iter(table().candidates(self.__name__)), None))


class _AliasLoader:
    """Of one more path to a module: both give the same object."""

    def __init__(self, found: ModuleSpec) -> None:
        self._found = found

    def create_module(self, spec: ModuleSpec) -> None:
        """The default."""

    def exec_module(self, module: ModuleType) -> None:
        # What an import returns is looked up here.
        sys.modules[module.__name__] = importlib.import_module(self._found.name)

    def get_code(self, name: str) -> CodeType | None:
        """For `python -m`."""
        loader: Any = self._found.loader
        return loader.get_code(self._found.name)

    def is_package(self, name: str) -> bool:
        return False


class _ListLoader:
    """Of a listed module. A package's alias is one, too: were it the package itself, the modules below it would be
    loaded once more by their other path."""

    def __init__(self, real: str | None) -> None:
        self._real = real

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return ListedModule(spec.name, self._real)

    def exec_module(self, module: ModuleType) -> None:
        if self._real is not None:
            importlib.import_module(self._real)

    def is_package(self, name: str) -> bool:
        return True


class ListedModule(ModuleType):
    """A module of names that are elsewhere: read and set there, so that nothing has two values. Refused names are made
    at their first use."""

    def __init__(self, name: str, real: str | None) -> None:
        super().__init__(name, f"Upstream's names of `{name}`.")
        self.__dict__["_real"] = real

    def __getattr__(self, name: str) -> Any:
        if name == "__all__":
            return _names(self)
        return _value(self, name, self.__dict__["_real"])

    def __setattr__(self, name: str, value: Any) -> None:
        place = _place(self, name, self.__dict__["_real"])
        # Submodules are set by the import of them.
        if place is None or isinstance(value, ModuleType) or name in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(importlib.import_module(place[0]), place[1], value)

    def __delattr__(self, name: str) -> None:
        place = _place(self, name, self.__dict__["_real"])
        if place is None or name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(importlib.import_module(place[0]), place[1])

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *self.__all__})


def _value(module: ModuleType, name: str, real: str | None) -> Any:
    """What the table says of a name, or else the module `real` has."""
    row, place = _row(module, name), _place(module, name, real)
    if place is not None:
        try:
            return getattr(importlib.import_module(place[0]), place[1])
        except AttributeError:
            if row is not None and row.place is not None:
                raise
    if row is None or row.status != "refused":
        raise _missing(module, name)
    from vllm.upstream.refusals import refused

    return module.__dict__.setdefault(name, refused(module.__name__, name, row.why, row.is_function))


def _missing(module: ModuleType, name: str) -> AttributeError:
    return AttributeError(f"module {module.__name__!r} has no attribute {name!r}", name=name, obj=module)


def _row(module: ModuleType, name: str) -> Row | None:
    from vllm.upstream.table import table

    return table().names.get(module.__name__, {}).get(name)


def _place(module: ModuleType, name: str, real: str | None) -> tuple[str, str] | None:
    """(module, name) of which `name` is an alias."""
    if name.startswith("__"):
        return None
    row = _row(module, name)
    if row is not None and row.place is not None:
        return row.place
    return None if real is None else (real, name)


def _names(module: ModuleType) -> list[str]:
    """What `import *` takes."""
    from vllm.upstream.table import table

    rows, real = table().names.get(module.__name__, {}), module.__dict__["_real"]
    names = [name for name, row in rows.items() if "." not in name and (row.place or row.status == "refused")]
    if real is None:
        return names
    other = importlib.import_module(real)
    return [*names, *getattr(other, "__all__", (name for name in vars(other) if not name.startswith("_")))]
