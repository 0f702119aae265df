"""The project's Triton kernels, as its sources define them."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "vllm"


def kernel_names(package: Path = PACKAGE) -> list[str]:
    """Sorted: every function of the package that triton.jit decorates and no other one of them calls.

    Raises:
        ValueError: two have one name.
    """
    jitted: dict[str, ast.FunctionDef] = {}
    for path in sorted(package.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if "triton" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and any(map(_is_jit, node.decorator_list)):
                if node.name in jitted:
                    raise ValueError(f"two jitted functions are named {node.name!r}; one is in {path}")
                jitted[node.name] = node
    called = {
        call.func.id
        for function in jitted.values()
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    }
    return sorted(set(jitted) - called)


def _is_jit(decorator: ast.expr) -> bool:
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    return (function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")) == "jit"
