"""Types of numbers in quantised weights, as upstream describes them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScalarType:
    """A type of numbers.

    Attributes:
        exponent, mantissa: bits of each; of integers, all but the sign are the mantissa's.
        signed: whether there is a sign.
        bias: what is subtracted from a stored number.
    """

    exponent: int
    mantissa: int
    signed: bool
    bias: int = 0

    @classmethod
    def int_(cls, size_bits: int, bias: int | None) -> ScalarType:
        """Integers with a sign."""
        return cls(0, size_bits - 1, True, bias or 0)

    @classmethod
    def uint(cls, size_bits: int, bias: int | None) -> ScalarType:
        """Integers without one."""
        return cls(0, size_bits, False, bias or 0)

    @classmethod
    def float_IEEE754(cls, exponent: int, mantissa: int) -> ScalarType:
        """Floating-point numbers."""
        return cls(exponent, mantissa, True)

    @property
    def size_bits(self) -> int:
        """Size of a number, in bits."""
        return self.exponent + self.mantissa + self.signed

    def is_floating_point(self) -> bool:
        """Whether numbers have an exponent."""
        return self.exponent > 0

    def is_integer(self) -> bool:
        """Whether numbers have no exponent."""
        return self.exponent == 0

    def has_bias(self) -> bool:
        """Whether stored numbers are shifted."""
        return self.bias != 0


class scalar_types:
    """The types that there are, by name."""

    int4 = ScalarType.int_(4, None)
    uint4 = ScalarType.uint(4, None)
    int8 = ScalarType.int_(8, None)
    uint8 = ScalarType.uint(8, None)
    uint2b2 = ScalarType.uint(2, 2)
    uint3b4 = ScalarType.uint(3, 4)
    uint4b8 = ScalarType.uint(4, 8)
    uint8b128 = ScalarType.uint(8, 128)
    float8_e4m3fn = ScalarType(4, 3, True)
    float8_e5m2 = ScalarType.float_IEEE754(5, 2)
    float16_e8m7 = ScalarType.float_IEEE754(8, 7)
    float16_e5m10 = ScalarType.float_IEEE754(5, 10)
    float4_e2m1f = ScalarType(2, 1, True)
    bfloat16 = float16_e8m7
    float16 = float16_e5m10
