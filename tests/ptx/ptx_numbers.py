"""Numbers of 16 bits, of which NumPy knows but one kind, and vectors of registers."""

from __future__ import annotations

import numpy as np


def names(operand: str) -> list[str]:
    """The names of a vector's registers, or of the one."""
    return operand.strip("{}").replace(" ", "").split(",")


def from_16_bit(values: np.ndarray, kind: str) -> np.ndarray:
    """float32 [threads, 1], or 2, the low half first."""
    bits = np.ascontiguousarray(values).view(np.uint16).reshape(len(values), -1)
    if kind.startswith("f16"):
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_16_bit(values: np.ndarray, kind: str) -> np.ndarray:
    """Rounded to the nearest, halfway to even."""
    if kind.startswith("f16"):
        return values.astype(np.float16).view(np.uint16)
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)
