"""Texts with names in braces, for messages and channels: names are replaced, and nothing else happens. No I/O.

In: a template such as `Order {order.id} for {customer.name|you}` and values. Out: text. A template is data, so nothing
in it runs: `{order.id}` is a field of a field and no attribute, and there is no format specification and no expression.
`{name|friend}` has a default; `{{` and `}}` are braces. Values are escaped for where the text goes: in HTML and Slack
no value is markup; on a line, which becomes a header, line breaks become spaces and encoded words (`=?utf-8?q?…?=`)
are broken up.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping
from typing import Any, Final, Literal

from bullpen._kernel import json
from bullpen._kernel.outcome import cut
from bullpen.errors import InvalidOption, MissingValue, require

__all__ = ["MAX_VALUE", "Form", "Template", "for_form", "one_header"]

Form = Literal["line", "text", "html", "slack"]
Values = Literal["personal", "payload"]

MAX_TEMPLATE: Final = 100_000
MAX_VALUE: Final = 2_000
"""Characters of one personal value: what somebody typed into a form must not become a book in everybody's mailbox."""

_NAME: Final = r"[A-Za-z_]\w{0,59}(?:\.[A-Za-z]\w{0,59}){0,9}"
_PART: Final = re.compile(rf"\{{\{{|\}}\}}|\{{({_NAME})(?:\|([^{{}}]*))?\}}|[{{}}]")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\x85\u2028\u2029\ud800-\udfff]")


class Template:
    """One text with places for values. Checked when made: raises InvalidOption for a lone brace.

    `values`: `personal` are those of a recipient, texts and numbers of bounded length, and an empty one counts as
    missing; `payload` are fields of an event, whatever they are.
    """

    __slots__ = ("_form", "_parts", "_values", "names", "needed", "source")

    def __init__(self, source: str, *, form: Form = "text", values: Values = "personal") -> None:
        require("template", isinstance(source, str), "text", source)
        require("template", len(source) <= MAX_TEMPLATE, f"at most {MAX_TEMPLATE} characters", len(source))
        self.source, self._form, self._values = source, form, values
        self._parts = _parse(source)
        self.names = frozenset(part[0] for part in self._parts if isinstance(part, tuple))
        """What it names, with or without a default."""
        self.needed = frozenset(part[0] for part in self._parts if isinstance(part, tuple) and part[1] is None)
        """What it names without a default."""

    def render(self, values: Any) -> str:
        """Put the values in. Raises MissingValue for one that is missing and has no default."""
        return "".join(part if isinstance(part, str) else self._value(part, values) for part in self._parts)

    def _value(self, part: tuple[str, str | None], values: Any) -> str:
        name, default = part
        value = _field(values, name)
        if value is None or (value == "" and (self._values == "personal" or default is not None)):
            if default is None:
                raise MissingValue(name)
            value = default
        return for_form(self._text(name, value), self._form)

    def _text(self, name: str, value: Any) -> str:
        if self._values == "payload":
            return value if isinstance(value, str) else json.encode(value).decode()
        if not isinstance(value, str | int | float):
            raise InvalidOption(f"{{{name}}}", "text or a number", value)
        return cut(str(value), MAX_VALUE)


def for_form(value: str, form: Form) -> str:
    """A value as it may stand there."""
    text = _CONTROL.sub(" " if form == "line" else "", value)
    match form:
        case "line":
            return " ".join(text.split())
        case "html":
            return html.escape(text)
        case "slack":
            # Slack reads `<…>` as a link or a mention of everybody, and takes these three characters as entities.
            return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
        case "text":
            return text


def one_header(text: str) -> str:
    """A whole line as a header: without encoded words, which may hide a line break. Some versions of Python decode
    `=?utf-8?q?=0d=0a?=` while they write a mail, and others leave it to the reader."""
    return for_form(text, "line").replace("=?", "= ?")


def _field(values: Any, path: str) -> Any:
    for name in path.split("."):
        if not isinstance(values, Mapping):
            return None
        values = values.get(name)
    return values


def _parse(source: str) -> list[str | tuple[str, str | None]]:
    parts: list[str | tuple[str, str | None]] = []
    place = 0
    for found in _PART.finditer(source):
        parts.append(source[place : found.start()])
        place = found.end()
        if found[1] is not None:
            parts.append((found[1], found[2]))
        elif len(found[0]) == 2:
            parts.append(found[0][0])
        else:
            near = source[max(0, found.start() - 20) : found.start() + 20]
            raise InvalidOption("template", "{name}, {name|default}, or {{ and }} for braces", near)
    parts.append(source[place:])
    return parts
