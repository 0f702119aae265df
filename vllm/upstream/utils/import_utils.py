"""Modules and objects by name."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

from vllm.logger import init_logger

logger = init_logger(__name__)


def import_from_path(module_name: str, file_path: str | os.PathLike) -> ModuleType:
    """A module of the file, under that name.

    Raises:
        ModuleNotFoundError: the file is no module.
    """
    spec = importlib.util.spec_from_file_location(module_name, file_path)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(f"No module named {module_name!r} at {os.fspath(file_path)}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    spec.loader.exec_module(module)
    return module


def import_plugin(plugin_path: str) -> ModuleType | None:
    """The module of a name or of a file; None, with a warning, where there is none."""
    try:
        return importlib.import_module(plugin_path)
    except ImportError as error:
        by_name = error
    name = os.path.splitext(os.path.basename(plugin_path))[0]
    try:
        return import_from_path(name, plugin_path)
    except (OSError, ImportError) as error:
        sys.modules.pop(name, None)
        logger.warning("no plug-in %s: by name: %s; as a file: %s", plugin_path, by_name, error)
        return None


def resolve_obj_by_qualname(qualname: str) -> Any:
    """The object of "module.path.name"."""
    module, _, name = qualname.rpartition(".")
    return getattr(importlib.import_module(module), name)


@functools.cache
def _has_module(module_name: str) -> bool:
    try:
        if importlib.util.find_spec(module_name) is None:
            return False
        # A module that is there may still lack a library that it is linked with.
        importlib.import_module(module_name)
    except ImportError:
        return False
    return True


def is_numba_available() -> bool:
    """Whether numba can be imported."""
    return _has_module("numba")


def has_deep_gemm() -> bool:
    """Whether deep_gemm can be imported; nothing here uses it."""
    return _has_module("deep_gemm")


class LazyLoader(ModuleType):
    """A module that is imported when something of it is used.

    Args:
        local_name: what it is called in `parent_module_globals`, where the module takes its place.
        name: of the module.
    """

    def __init__(self, local_name: str, parent_module_globals: dict[str, Any], name: str) -> None:
        super().__init__(str(name))
        self._place = parent_module_globals, local_name

    def _load(self) -> ModuleType:
        found = importlib.import_module(self.__name__)
        names, local_name = self._place
        names[local_name] = found
        return found

    def __getattr__(self, item: str) -> Any:
        return getattr(self._load(), item)

    def __dir__(self) -> list[str]:
        return dir(self._load())


class PlaceholderModule:
    """Stands for a package that could not be imported: what uses it raises the import's error."""

    def __init__(self, name: str) -> None:
        self._name = name

    def placeholder_attr(self, attr_path: str) -> PlaceholderModule:
        """A stand-in for something of it."""
        return PlaceholderModule(f"{self._name}.{attr_path}")

    def __getattr__(self, key: str) -> Any:
        raise ModuleNotFoundError(f"{self._name} is not installed, and {key} of it was used")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise ModuleNotFoundError(f"{self._name} is not installed, and was called")
