"""Operations of models of callers' own, by device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from torch import nn

from vllm.platforms import current_platform

_C = TypeVar("_C", bound="type[CustomOp]")


class CustomOp(nn.Module):
    """A module with a forward for each device; `forward_native` serves those that it has none for."""

    op_registry: ClassVar[dict[str, type[CustomOp]]] = {}
    name: ClassVar[str]

    def __init__(self, *, enforce_enable: bool = False, compile_native: bool = False) -> None:
        """The arguments are for upstream's compiler: nothing is compiled here, and every operation is enabled."""
        super().__init__()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = self.forward_cuda if current_platform.is_cuda() else self.forward_cpu
        return own(*args, **kwargs)

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no forward_native")

    def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_native(*args, **kwargs)

    def forward_cpu(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_native(*args, **kwargs)

    @classmethod
    def enabled(cls) -> bool:
        """True: nothing turns operations off."""
        return True

    @classmethod
    def register(cls, name: str, dynamic_arg_dims: dict[str, Any] | None = None) -> Callable[[_C], _C]:
        """Name a class.

        Raises:
            ValueError: another one has this name.
        """

        def add(op: _C) -> _C:
            if name in cls.op_registry:
                raise ValueError(f"there is an operation {name!r} already")
            op.name = name
            cls.op_registry[name] = op
            return op

        return add
