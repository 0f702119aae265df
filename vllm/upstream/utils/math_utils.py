"""Integers."""

from __future__ import annotations


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(a // -b)


def next_power_of_2(n: int) -> int:
    """The least power of 2 that is not below n; 1 below 1."""
    return 1 if n < 1 else 1 << (n - 1).bit_length()


def prev_power_of_2(n: int) -> int:
    """The greatest power of 2 that is not above n; 0 below 1."""
    return 0 if n < 1 else 1 << (n.bit_length() - 1)


def round_up(x: int, y: int) -> int:
    """The least multiple of y that is not below x."""
    return cdiv(x, y) * y


def round_down(x: int, y: int) -> int:
    """The greatest multiple of y that is not above x."""
    return x // y * y


def largest_power_of_2_divisor(n: int) -> int:
    """The greatest power of 2 that divides n."""
    return n & -n
