"""Make text printable that somebody else wrote: a terminal must show an escape sequence, not obey it.

In: any text, also with lone surrogates. Out: the same text with escapes in place of what is not printable: control
characters (8-bit ones too), marks that turn the direction of writing, and what no encoding can write. Line breaks and
tabs stay.
"""

from __future__ import annotations

import json
from typing import Any


def printable(text: str) -> str:
    """The text, with `\\x1b` and the like in place of what a terminal would obey."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else _escaped(char) for char in text)


def printable_json(value: Any, *, indent: int | None = None, default: Any = None) -> str:
    """A JSON document of printable characters; whoever reads it as JSON reads the same value."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, default=default)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char == "\n" else json.dumps(char)[1:-1] for char in text)


def _escaped(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
