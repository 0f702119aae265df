"""Numbers within bounds as regular expressions, of any size and any number of digits, written without an exponent.

llguidance's own bounds are doubles, and of their texts some are missing (0.2 below 0.25).
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any

_LARGEST_EXACT = 2**53  # integers up to it are doubles
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")
_MAX_DIGITS = 400
"""Limit of a bound's digits, which are as many as its expression has parts."""

_INTEGER, _NUMBER = "-?(0|[1-9][0-9]*)", r"-?(0|[1-9][0-9]*)(\.[0-9]+)?"


def is_number(value: Any) -> bool:
    """Whether it is one of JSON's."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_large(value: Any) -> bool:
    """Whether it is an integer that a double may not hold."""
    return isinstance(value, int) and abs(value) > _LARGEST_EXACT


def multiple_digits(unit: float) -> tuple[int, int]:
    """A positive number as an integer and how many of its digits are decimals."""
    number = _decimal(unit)
    places = max(-int(number.as_tuple().exponent), 0)
    return int(number.scaleb(places)), places


def needs_expressions(schema: Mapping[str, Any]) -> bool:
    """Whether llguidance's bounds would take numbers that the schema's forbid, or the other way around."""
    bounds = {name: schema[name] for name in _BOUNDS if is_number(schema.get(name))}
    types = schema.get("type", "number")
    if not bounds or "multipleOf" in schema:
        return False
    if "number" not in (types if isinstance(types, list) else [types]):
        return any(abs(each) > _LARGEST_EXACT for each in bounds.values())
    return any(
        name.startswith("exclusive") or abs(each) > _LARGEST_EXACT or _decimal(each).as_tuple().exponent < -1  # type: ignore[operator]
        for name, each in bounds.items()
    )


def number_expressions(schema: Mapping[str, Any], is_integer: bool) -> list[str]:
    """Regular expressions that match a number within the schema's bounds, all of them together.

    Raises:
        ValueError: a bound of too many digits.
    """
    found = [_INTEGER if is_integer else _NUMBER]
    for name in _BOUNDS:
        if is_number(schema.get(name)):
            bound = _decimal(schema[name])
            is_strict = name.startswith("exclusive")
            found.append((_above if name.lower().endswith("minimum") else _below)(bound, is_strict))
    return found


def is_empty(schema: Mapping[str, Any], is_integer: bool) -> bool:
    """Whether no number is within the bounds."""
    given = {name: _decimal(schema[name]) for name in _BOUNDS if is_number(schema.get(name))}
    low = max(given.get("minimum", -_INFINITE), given.get("exclusiveMinimum", -_INFINITE))
    high = min(given.get("maximum", _INFINITE), given.get("exclusiveMaximum", _INFINITE))
    if is_integer and low.is_finite() and high.is_finite():
        first, last = -((-low) // 1), high // 1
        first += first == given.get("exclusiveMinimum")
        last -= last == given.get("exclusiveMaximum")
        return first > last
    return low > high or (low == high and low in (given.get("exclusiveMinimum"), given.get("exclusiveMaximum")))


_INFINITE = Decimal("Infinity")


def _decimal(value: float) -> Decimal:
    return Decimal(value) if isinstance(value, int) else Decimal(repr(value)).normalize()


def _digits(value: Decimal) -> tuple[str, str]:
    """The digits of a number that is not negative: those of its integer, and of its fraction without zeros at the
    end."""
    integer, _, fraction = format(abs(value), "f").partition(".")
    if len(integer) + len(fraction) > _MAX_DIGITS:
        raise ValueError(f"a bound of a number has more than {_MAX_DIGITS} digits")
    return integer, fraction.rstrip("0")


def _above(bound: Decimal, is_strict: bool) -> str:
    if bound < 0:
        return rf"[0-9].*|-({_at_most(-bound, is_strict)})"
    return _at_least(bound, is_strict)


def _below(bound: Decimal, is_strict: bool) -> str:
    if bound > 0:
        return f"-.*|{_at_most(bound, is_strict)}"
    if bound == 0 and not is_strict:
        return r"-.*|0(\.0+)?"
    return f"-({_at_least(-bound, is_strict)})"


def _at_least(bound: Decimal, is_strict: bool) -> str:
    """An expression of texts without a sign."""
    integer, fraction = _digits(bound)
    larger = [rf"[1-9][0-9]{{{len(integer)},}}"]
    larger += [
        f"{integer[:place]}[{int(digit) + 1}-9][0-9]{{{len(integer) - place - 1}}}"
        for place, digit in enumerate(integer)
        if digit < "9"
    ]
    rest = rf"\.({_fraction_at_least(fraction, is_strict)})"
    return rf"({'|'.join(larger)})(\.[0-9]+)?|{integer}{rest if fraction or is_strict else f'({rest})?'}"


def _fraction_at_least(digits: str, is_strict: bool) -> str:
    if not digits:
        return "[0-9]*[1-9][0-9]*" if is_strict else "[0-9]*"
    larger = f"[{int(digits[0]) + 1}-9][0-9]*|" if digits[0] < "9" else ""
    return f"{larger}{digits[0]}({_fraction_at_least(digits[1:], is_strict)})"


def _at_most(bound: Decimal, is_strict: bool) -> str:
    """An expression of texts without a sign."""
    integer, fraction = _digits(bound)
    smaller = ["0", rf"[1-9][0-9]{{0,{len(integer) - 2}}}"] if len(integer) > 1 else []
    for place, digit in enumerate(integer):
        least = 1 if place == 0 and len(integer) > 1 else 0
        if int(digit) > least:
            smaller.append(f"{integer[:place]}[{least}-{int(digit) - 1}][0-9]{{{len(integer) - place - 1}}}")
    parts = [rf"({'|'.join(smaller)})(\.[0-9]+)?"] if smaller else []
    if fraction or not is_strict:
        parts.append(rf"{integer}(\.({_fraction_at_most(fraction, is_strict)}))?")
    return "|".join(parts) or "x"  # which no number has


def _fraction_at_most(digits: str, is_strict: bool) -> str:
    """Also of none, which are as many zeros as one likes."""
    if not digits:
        return "x" if is_strict else "0*"
    smaller = f"[0-{int(digits[0]) - 1}][0-9]*|" if digits[0] > "0" else ""
    return f"{smaller}{digits[0]}({_fraction_at_most(digits[1:], is_strict)})|"
