"""Triton's interpreter without work that it does again and again.

Before a launch, and before each call of a function within, it looks through all members of its language for those that
it replaces: more than half of its time. Here what it replaces is looked up once, and the functions of a module replace
it once a launch.
"""

from __future__ import annotations

import inspect
from typing import Any

_installed: list[Any] = []


def install() -> None:
    """Make this process's interpreter lean."""
    from triton.language import core
    from triton.runtime import interpreter

    if _installed:
        return
    _installed.append(interpreter)
    launch, patch = interpreter.GridExecutor.__call__, interpreter._patch_lang
    done: set[int] = set()  # the globals of functions called since the launch
    names: dict[Any, list[str]] = {}

    def launched(executor: Any, *arguments: Any, **options: Any) -> None:
        done.clear()
        try:
            launch(executor, *arguments, **options)
        finally:
            done.clear()

    def patched(function: Any) -> Any:
        if id(function.__globals__) in done:
            return interpreter._LangPatchScope()
        done.add(id(function.__globals__))
        return patch(function)

    def patch_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]
        for name in names[package]:
            member = getattr(package, name)
            if core.is_builtin(member):  # it is none where it is replaced
                interpreter._patch_attr(package, name, member, builder, scope)

    interpreter.GridExecutor.__call__ = launched
    interpreter._patch_lang, interpreter._patch_builtin = patched, patch_builtin
