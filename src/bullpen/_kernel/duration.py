"""Durations, whole numbers and texts as options take them, checked once.

In: what a caller wrote, an `int` of milliseconds, a `timedelta`, or a text such as `5m`. Out: whole milliseconds, or
InvalidOption that names the option. Elsewhere: instants (`bullpen._kernel.clock`, `bullpen.wire.options`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import timedelta
from typing import Final

from bullpen.errors import InvalidOption, require

MAX_MS = 2**53 - 1
"""The largest number that Node, Lua and JSON readers carry without loss."""

_ONE_MS = timedelta(milliseconds=1)
_UNITS: Final = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_WRITTEN: Final = re.compile(r"(\d{1,15})(ms|s|m|h|d)?")


def to_ms(name: str, value: int | timedelta, *, minimum: int = 0) -> int:
    """Turn milliseconds or a timedelta into whole milliseconds, rounded up.

    Rounded up so that a positive duration never becomes zero, which means "now" or "never" in many options.
    """
    # bool is an int to Python, and `delay=True` is a mistake that would otherwise wait one millisecond.
    if type(value) is int:
        ms = value
    elif isinstance(value, timedelta):
        ms = value // _ONE_MS + bool(value % _ONE_MS)
    else:
        raise InvalidOption(name, f"whole milliseconds (int) or a timedelta, {_bound(minimum)}", value)
    if ms < minimum:
        raise InvalidOption(name, f"whole milliseconds (int) or a timedelta, {_bound(minimum)}", value)
    if ms > MAX_MS:
        raise InvalidOption(name, f"at most {MAX_MS} ms", value)
    return ms


def written_ms(text: str) -> int | None:
    """The milliseconds of `1500` or `1500ms`, `90s`, `15m`, `2h`, `1d`; None for any other text."""
    match = _WRITTEN.fullmatch(text.strip())
    return None if match is None else int(match[1]) * _UNITS[match[2] or "ms"]


def read_ms(name: str, value: int | timedelta | str, *, minimum: int = 0) -> int:
    """As `to_ms`; the duration may also be written with its unit: `90s`, `15m`, `2h`, `1d`."""
    if not isinstance(value, str):
        return to_ms(name, value, minimum=minimum)
    ms = written_ms(value)
    if ms is None:
        raise InvalidOption(name, "milliseconds (int), a timedelta, or text such as 90s, 15m, 2h, 1d", value)
    return to_ms(name, ms, minimum=minimum)


def check_int(name: str, value: int, *, minimum: int, maximum: int = MAX_MS) -> int:
    """Return a whole number within bounds, or raise InvalidOption. Booleans and floats are refused."""
    if type(value) is not int or not minimum <= value <= maximum:
        upper = f" and at most {maximum}" if maximum != MAX_MS else ""
        raise InvalidOption(name, f"a whole number, at least {minimum}{upper}", value)
    return value


def is_text(value: object) -> bool:
    """True for non-empty text."""
    return isinstance(value, str) and value != ""


def check_texts(name: str, values: Iterable[str]) -> tuple[str, ...]:
    """Return several texts, or raise InvalidOption. One text is refused: it would be taken letter by letter."""
    found = tuple(check_many(name, values, "a list of texts"))
    for value in found:
        require(name, isinstance(value, str), "texts only", value)
    return found


def check_many(name: str, values: Iterable[str], expected: str) -> Iterable[str]:
    """Return what gives texts one after the other, unread. Raises InvalidOption for one text."""
    require(name, isinstance(values, Iterable) and not isinstance(values, str | bytes | bytearray), expected, values)
    return values


def is_share(value: object) -> bool:
    """True for a number from 0 to 1."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


def _bound(minimum: int) -> str:
    return "more than 0" if minimum == 1 else f"at least {minimum}"
