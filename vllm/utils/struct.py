"""msgspec.Struct, or, on machines without msgspec, a dataclass with the same constructor and fields."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msgspec import Struct
else:
    try:
        from msgspec import Struct
    except ImportError:

        class Struct:
            def __init_subclass__(cls, **options: Any) -> None:
                super().__init_subclass__()
                dataclasses.dataclass(cls)
                cls.__struct_fields__ = tuple(item.name for item in dataclasses.fields(cls))
                cls.__struct_defaults__ = tuple(item.default for item in dataclasses.fields(cls))


__all__ = ["Struct"]
