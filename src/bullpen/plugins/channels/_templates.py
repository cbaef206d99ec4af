"""Texts with gaps, filled from a payload: `Order $order.id for ${customer.name}`. No input or output.

A gap names a field, or a field of a field; `$$` is a dollar sign. What fills it is escaped for where the text goes, so
that a customer's name can be no header and no markup. There is no logic and no access to anything but the payload.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any, Final

from bullpen._kernel import json
from bullpen.errors import InvalidOption

__all__ = ["FieldMissing", "FieldTemplate", "for_header", "for_html", "for_slack", "plain"]

Escape = Callable[[str], str]

_GAP: Final = re.compile(r"\$(?:(?P<dollar>\$)|(?P<bare>[A-Za-z_][\w.]*\w|[A-Za-z_])|\{(?P<braced>[A-Za-z_][\w.]*)\})")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029]+")


class FieldMissing(Exception):
    """The payload has no such field."""


def plain(text: str) -> str:
    return text


def for_header(text: str) -> str:
    """On one line: a line break would begin another header. And without encoded words, which may hide one: some
    versions of Python decode `=?utf-8?q?=0d=0a?=` while they write a mail, and others leave it to the reader."""
    return _CONTROL.sub(" ", text).replace("=?", "= ?").strip()


def for_html(text: str) -> str:
    return html.escape(text, quote=True)


def for_slack(text: str) -> str:
    """Slack reads `<…>` as a link or a mention of everybody, and takes these three characters as entities."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


class FieldTemplate:
    """A text with gaps. Checked when made."""

    def __init__(self, text: str, escape: Escape = plain) -> None:
        if not isinstance(text, str):
            raise InvalidOption("template", "text", text)
        stray = _GAP.sub("", text)
        if "$" in stray:
            raise InvalidOption("template", "fields such as $name or ${order.id}, and $$ for a dollar sign", text)
        self._text, self._escape = text, escape

    def fill(self, payload: Any) -> str:
        """The text with its gaps filled. Raises FieldMissing."""

        def value(found: re.Match[str]) -> str:
            if found["dollar"]:
                return "$"
            return self._escape(_field(payload, found["bare"] or found["braced"]))

        return _GAP.sub(value, self._text)


def _field(payload: Any, path: str) -> str:
    value = payload
    for name in path.split("."):
        if not isinstance(value, dict) or name not in value:
            raise FieldMissing(f"the payload has no field {path!r}")
        value = value[name]
    return value if isinstance(value, str) else json.encode(value).decode()
