"""Modules of upstream's that we do not have, so that a file of tests which imports them can still be collected.

A test that uses one of their names is skipped with the reason that the table gives for the module.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from types import ModuleType
from typing import Any

import pytest


class _Absent(type):
    """A class that skips the running test when it is used; outside of tests it can be used for anything."""

    reason: str

    def _use(cls) -> Any:
        if "PYTEST_CURRENT_TEST" in os.environ:
            pytest.skip(cls.reason)
        return cls

    def __call__(cls, *args: Any, **fields: Any) -> Any:
        return cls._use()

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls._use()

    def __instancecheck__(cls, value: object) -> bool:
        cls._use()
        return False


def _absent(name: str, module: str, reason: str) -> _Absent:
    made = {"reason": reason, "__module__": module, "__new__": lambda cls, *args, **fields: cls._use()}
    # Not by calling the metaclass: _Absent.__call__ is for instances of it.
    return type.__new__(_Absent, name, (), made)


class _Module(ModuleType):
    reason: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _absent(name, self.__name__, self.reason))
        return self.__dict__[name]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that `reasons` has a prefix for and nothing else finds."""

    def __init__(self, reasons: dict[str, str]) -> None:
        self._reasons = reasons

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if self._reason(name) is None:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = _Module(spec.name)
        module.reason = self._reason(spec.name) or ""
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass

    def _reason(self, name: str) -> str | None:
        found = [prefix for prefix in self._reasons if name == prefix or name.startswith(prefix + ".")]
        return self._reasons[max(found, key=len)] if found else None


def install(reasons: dict[str, str]) -> None:
    """Look for modules here where they are nowhere else, and for names `module:name` in any case."""
    sys.meta_path.append(Finder({name: reason for name, reason in reasons.items() if ":" not in name}))
    for place, reason in reasons.items():
        path, _, name = place.partition(":")
        if name:
            setattr(importlib.import_module(path), name, _absent(name, path, reason))
