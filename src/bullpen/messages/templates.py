"""Texts of messages, by locale. No I/O.

In: what a kind of occasion says, and values of a recipient. Out: subject, text and HTML. Elsewhere: the language of
templates (`bullpen._kernel.templates`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from bullpen._kernel.templates import Form, Template, one_header
from bullpen.errors import require

__all__ = ["Text", "choose"]


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
            "subject": one_header(subject),
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
