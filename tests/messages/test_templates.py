"""Texts: what is in braces is replaced, and nothing in a template or a value ever runs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullpen._kernel.templates import MAX_VALUE, Template
from bullpen.errors import InvalidOption, MissingValue
from bullpen.messages import Text
from bullpen.messages.templates import choose


def test_names_are_replaced_and_may_have_a_default() -> None:
    template = Template("Dear {name|friend}, {{you}} are {number}!")

    assert template.render({"name": "Ada", "number": 36}) == "Dear Ada, {you} are 36!"
    assert template.render({"name": "", "number": 0}) == "Dear friend, {you} are 0!"
    assert template.names == {"name", "number"}


def test_a_missing_value_says_what_to_write() -> None:
    with pytest.raises(MissingValue, match=r"the template needs \{city\}.*write \{city\|something\}"):
        Template("{city}").render({"name": "Ada"})


@pytest.mark.parametrize(
    "source",
    ["{name.__class__}", "{name[0]}", "{name!r}", "{name:>10}", "{}", "{0}", "{ name }", "a { b", "a } b"],
)
def test_everything_else_in_braces_is_refused(source: str) -> None:
    """A format specification or an attribute would let whoever writes a template look into our objects."""
    with pytest.raises(InvalidOption, match="template: expected"):
        Template(source)


@given(st.text())
def test_a_value_is_never_read_as_a_template(value: str) -> None:
    text = Template("<{name|x}>").render({"name": "{number}" + value, "number": 5})

    assert "{number}" in text


def test_html_is_escaped_and_lines_stay_lines() -> None:
    hostile = "<script>\r\nBcc: all@example.com\0"
    encoded = Text("x", subject="={name}").render({"name": "?utf-8?q?=0d=0aBcc:_eve@example.com?="})
    assert "=?" not in encoded["subject"]
    text = Text("{name}", subject="Hi {name}", html="<b>{name}</b>")

    parts = text.render({"name": hostile})

    assert parts["subject"] == "Hi <script> Bcc: all@example.com"
    assert parts["html"].startswith("<b>&lt;script&gt;")
    assert "\0" not in "".join(parts.values())


def test_values_are_bounded_and_plain() -> None:
    assert len(Template("{name}").render({"name": "x" * 10_000})) == MAX_VALUE
    with pytest.raises(InvalidOption, match="text or a number"):
        Template("{name}").render({"name": ["a"]})
    with pytest.raises(InvalidOption, match="at most 100000 characters"):
        Template("x" * 100_001)


@pytest.mark.parametrize(
    "wrong", [{"body": ""}, {"body": 5}, {"body": "x", "subject": "{"}, {"body": "x", "html": "}"}]
)
def test_a_text_is_checked_when_it_is_made(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        Text(**wrong)


def test_the_locale_chooses_from_narrow_to_wide() -> None:
    texts = {"en": Text("en"), "": Text("any"), "de": Text("de"), "de-AT": Text("at")}

    chosen = {locale: choose(texts, locale).body for locale in ("de-AT", "de_AT", "de-CH", "fr", "", "en-GB-x")}

    assert chosen == {"de-AT": "at", "de_AT": "at", "de-CH": "de", "fr": "any", "": "any", "en-GB-x": "en"}
    assert choose({"en": Text("en")}, "fr").body == "en"
    assert Text("{name}", subject="{number}").names == {"name", "number"}
