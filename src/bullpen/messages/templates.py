"""Texts of messages: names in braces are replaced, and nothing else happens. No I/O.

In: a template such as `Happy birthday, {name|friend}!` and values. Out: text. A template is data, so nothing in it
runs: there is no attribute access, no format specification, no expression. `{name|friend}` has a default;
`{{` and `}}` are braces. In HTML every value is escaped; in a subject, which becomes a header, line breaks become
spaces and encoded words (`=?utf-8?q?…?=`) are broken up.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal

from bullpen._kernel.outcome import cut
from bullpen.errors import InvalidOption, MissingValue, require

__all__ = ["Template", "Text", "choose"]

Form = Literal["line", "text", "html"]

MAX_TEMPLATE: Final = 100_000
MAX_VALUE: Final = 2_000
"""Characters of one value: what a person typed into a form must not become a book in everybody's mailbox."""

_PART: Final = re.compile(r"\{\{|\}\}|\{([a-z_][a-z0-9_]{0,59})(?:\|([^{}]*))?\}|[{}]")
_CONTROL: Final = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u2028\u2029\ud800-\udfff]")


class Template:
    """One text with places for values. Checked when made: raises InvalidOption for a lone brace."""

    __slots__ = ("_form", "_parts", "names", "needed", "source")

    def __init__(self, source: str, *, form: Form = "text") -> None:
        require("template", isinstance(source, str), "text", source)
        require("template", len(source) <= MAX_TEMPLATE, f"at most {MAX_TEMPLATE} characters", len(source))
        self.source, self._form = source, form
        self._parts = _parse(source)
        self.names = frozenset(part[0] for part in self._parts if isinstance(part, tuple))
        """What it names, with or without a default."""
        self.needed = frozenset(part[0] for part in self._parts if isinstance(part, tuple) and part[1] is None)
        """What it names without a default."""

    def render(self, values: Mapping[str, Any]) -> str:
        """Put the values in. Raises MissingValue for one that is missing and has no default."""
        return "".join(part if isinstance(part, str) else self._value(part, values) for part in self._parts)

    def _value(self, part: tuple[str, str | None], values: Mapping[str, Any]) -> str:
        name, default = part
        value = values.get(name)
        if value is None or value == "":
            if default is None:
                raise MissingValue(name)
            value = default
        if not isinstance(value, str | int | float):
            raise InvalidOption(f"{{{name}}}", "text or a number", value)
        text = _CONTROL.sub("", cut(str(value), MAX_VALUE))
        match self._form:
            case "line":
                return " ".join(text.split())
            case "html":
                return html.escape(text)
            case "text":
                return text


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


@dataclass(frozen=True, slots=True)
class Text:
    """What one message says: a body, and where the channel has them a subject and HTML."""

    body: str
    subject: str = ""
    html: str = ""

    def __post_init__(self) -> None:
        require("body", isinstance(self.body, str) and self.body != "", "a text that is not empty", self.body)
        self._templates()  # a lone brace is refused now, not at nine in the morning

    @property
    def names(self) -> frozenset[str]:
        """Values that it needs."""
        return frozenset().union(*(template.names for template in self._templates()))

    @property
    def needed(self) -> frozenset[str]:
        """Those of them that have no default."""
        return frozenset().union(*(template.needed for template in self._templates()))

    def render(self, values: Mapping[str, Any]) -> dict[str, str]:
        """The finished parts, without those that are empty."""
        subject, body, page = (template.render(values) for template in self._templates())
        parts = {
            "subject": " ".join(_CONTROL.sub("", subject).split()).replace("=?", "= ?"),
            "text": body,
            "html": page,
        }
        return {name: part for name, part in parts.items() if part}

    def _templates(self) -> tuple[Template, Template, Template]:
        return _compiled(self.subject, "line"), _compiled(self.body, "text"), _compiled(self.html, "html")


@lru_cache(maxsize=512)
def _compiled(source: str, form: Form) -> Template:
    return Template(source, form=form)


def choose(texts: Mapping[str, Text], locale: str) -> Text:
    """The text for a locale: `de-AT`, else `de`, else the one without a locale, else the first."""
    for wanted in _wider(locale):
        if wanted in texts:
            return texts[wanted]
    return next(iter(texts.values()))


def _wider(locale: str) -> Iterable[str]:
    parts = re.split(r"[-_]", locale) if locale else []
    for length in range(len(parts), 0, -1):
        yield "-".join(parts[:length])
    yield ""
