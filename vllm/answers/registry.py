"""Classes by name: those of a package's files, and others' that are registered or in a file of theirs."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Generic, TypeVar

Kind = TypeVar("Kind")


class Registry(Generic[Kind]):
    """Parsers of one kind. A class of ours has its names in `names`; those of a package are imported when first asked
    for."""

    def __init__(self, package: str, base: str, what: str) -> None:
        """
        Args:
            package: whose files have the parsers.
            base: name of their base class.
            what: a parser is, in errors.
        """
        self._package, self._base, self._what = package, base, what
        self._classes: dict[str, type[Kind]] = {}
        self._own: dict[str, type[Kind]] | None = None
        # Each request asks for the same template, and each class has several texts to look for in it.
        self.of_template = lru_cache(maxsize=16)(self._of_template)

    def names(self) -> list[str]:
        """All names, in order."""
        return sorted({**self._own_classes(), **self._classes})

    def get(self, name: str) -> type[Kind]:
        """The class. KeyError, with the names there are, for another name."""
        found = self._classes.get(name) or self._own_classes().get(name)
        if found is None:
            raise KeyError(f"{self._what} {name!r} is not known; there are {', '.join(self.names())}")
        return found

    def classes(self) -> list[type[Kind]]:
        """Each class once: others' first."""
        return list(dict.fromkeys([*self._classes.values(), *self._own_classes().values()]))

    def _of_template(self, template: str) -> type[Kind] | None:
        """The class all of whose `template_marks` a chat template has; of several, the one with more of them."""
        best, most = None, 0
        for each in self.classes():
            marks: tuple[str, ...] = getattr(each, "template_marks", ())
            size = sum(map(len, marks))
            if size > most and all(mark in template for mark in marks):
                best, most = each, size
        return best

    def register(
        self, name: str | Sequence[str] | None, force: bool, module: type[Kind] | None
    ) -> type[Kind] | Callable[[type[Kind]], type[Kind]]:
        """Take a class under one name or several, its own without; without a class, a decorator that does."""
        if module is None:
            return lambda parser: self.register(name, force, parser)  # type: ignore[return-value]
        for each in [name] if isinstance(name, str) else name or [module.__name__]:
            if not force and each in self.names():
                raise KeyError(f"{self._what} {each!r} is registered already")
            self._classes[each] = module
        self.of_template.cache_clear()
        return module

    def import_file(self, path: str) -> ModuleType:
        """Run a Python file, which registers its parsers. ValueError: it cannot be run."""
        name = Path(path).stem
        spec = importlib.util.spec_from_file_location(name, path)
        try:
            assert spec is not None and spec.loader is not None, "it is no Python file"
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        except Exception as error:  # a plugin may raise anything
            raise ValueError(f"the {self._what}s of {path} cannot be loaded: {error}") from error
        return module

    def _own_classes(self) -> dict[str, type[Kind]]:
        if self._own is None:
            package = importlib.import_module(self._package)
            found: dict[str, Any] = {}
            for info in pkgutil.iter_modules(package.__path__):
                module = importlib.import_module(f"{self._package}.{info.name}")
                for each in vars(module).values():
                    is_own = isinstance(each, type) and each.__module__ == module.__name__
                    if is_own and self._base in (parent.__name__ for parent in each.__mro__):
                        found.update(dict.fromkeys(vars(each).get("names", ()), each))
            self._own = found
        return self._own


class ParserManager(Generic[Kind]):
    """The parsers of one kind by name."""

    _registry: ClassVar[Registry[Any]]

    @classmethod
    def list_registered(cls) -> list[str]:
        """Their names."""
        return cls._registry.names()

    @classmethod
    def register_module(
        cls,
        name: str | Sequence[str] | None = None,
        force: bool = True,
        module: type[Kind] | None = None,
    ) -> type[Kind] | Callable[[type[Kind]], type[Kind]]:
        """Take a class under one name or several; without a class, a decorator that does.

        Raises:
            KeyError: the name is taken, with `force` False.
        """
        return cls._registry.register(name, force, module)

    @classmethod
    def of_template(cls, template: str) -> type[Kind] | None:
        """The parser whose marks a chat template has; of several, the one with more of them."""
        return cls._registry.of_template(template)
