"""Options that are written once: name, type, default and limits stand in the dataclass of whoever uses them.

In: fields made with `option`. Out: `check_options` refuses a wrong value given by code; `bullpen.settings` reads the
same fields, so that a variable or a file can set them. Elsewhere: kinds of addresses and names (`bullpen.settings`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Final, get_args

from bullpen.errors import InvalidOption

__all__ = ["YES_OR_NO", "OptionKind", "OptionMetadata", "at_least", "check_options", "choice", "metadata_of", "option"]


@dataclass(frozen=True, slots=True)
class OptionKind:
    """What kind of values an option takes."""

    expected: str
    accepts: Callable[[Any], bool]
    from_text: Callable[[str], object] = str
    """Environment variables are always text; a file or an argument must have the right type by itself."""
    shown: Callable[[Any], str] = str
    is_path: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionMetadata:
    """What is known of an option besides its field."""

    kind: OptionKind
    variable: str | None
    """The environment variable that sets it, where it is not named after section and option."""
    general: str | None
    """A name without our prefix that sets it too, which other programs may use as well."""
    otherwise: Callable[[Mapping[str, str]], tuple[object, Any] | None] | None
    """Finds it in several variables: the value and where it came from."""
    derived: Callable[[Path], tuple[object, Any]] | None
    """Finds it on the machine when nobody says it."""


def option(
    default: Any,
    kind: OptionKind | None = None,
    *,
    variable: str | None = None,
    general: str | None = None,
    otherwise: Callable[[Mapping[str, str]], tuple[object, Any] | None] | None = None,
    derived: Callable[[Path], tuple[object, Any]] | None = None,
    secret: bool = False,
) -> Any:
    """A field of an option class. Without a kind it is true or false."""
    known = OptionMetadata(
        kind=kind or YES_OR_NO, variable=variable, general=general, otherwise=otherwise, derived=derived
    )
    return field(default=default, repr=not secret, metadata={_METADATA: known})


def metadata_of(entry: Field[Any]) -> OptionMetadata | None:
    """What `option` was told; None for another field."""
    known: OptionMetadata | None = entry.metadata.get(_METADATA)
    return known


def check_options(options: Any) -> None:
    """Raise InvalidOption for the first value that is not of its kind. For `__post_init__`."""
    for entry in fields(options):
        known, value = metadata_of(entry), getattr(options, entry.name)
        if known is not None and value != entry.default and not known.kind.accepts(value):
            raise InvalidOption(entry.name, known.kind.expected, value)


# Kinds --------------------------------------------------------------------------------------------------------------


def at_least(minimum: int, most: int | None = None) -> OptionKind:
    """A whole number."""

    def from_text(text: str) -> object:
        # int() alone would also take "1_000" and digits of other scripts, which nobody means.
        return int(text) if re.fullmatch(r"[+-]?[0-9]{1,18}", text.strip()) else text

    def accepts(value: Any) -> bool:
        return type(value) is int and value >= minimum and (most is None or value <= most)

    expected = f"a whole number of at least {minimum}" if most is None else f"{minimum} to {most}"
    return OptionKind(expected, accepts, from_text)


def choice(literal: Any) -> OptionKind:
    """One of the words of a `Literal`."""
    words = get_args(literal)
    return OptionKind(" or ".join(map(repr, words)), lambda value: value in words, str.strip)


def _from_yes_or_no(text: str) -> object:
    return {"true": True, "1": True, "false": False, "0": False}.get(text.strip().lower(), text)


YES_OR_NO: Final = OptionKind(
    "true or false", lambda value: isinstance(value, bool), _from_yes_or_no, lambda value: str(value).lower()
)
_METADATA: Final = "bullpen.option"
