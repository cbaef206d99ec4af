"""An option is written once: its default, its limits and how it may be set from outside."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

import pytest

from bullpen._kernel.options import at_least, check_options, choice, metadata_of, option
from bullpen.errors import InvalidOption

Speed = Literal["slow", "quick"]


@dataclass(frozen=True, kw_only=True)
class Engine:
    cylinders: int = option(4, at_least(1, 12))
    speed: Speed = option("slow", choice(Speed))
    is_loud: bool = option(False, general="LOUD")
    key: str | None = option(None, choice(Literal["spare"]), secret=True)
    comment: str = ""

    def __post_init__(self) -> None:
        check_options(self)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("cylinders", 0, "1 to 12"),
        ("cylinders", 13, "1 to 12"),
        ("cylinders", True, "1 to 12"),
        ("cylinders", 4.5, "1 to 12"),
        ("speed", "fast", "'slow' or 'quick'"),
        ("is_loud", 1, "true or false"),
        ("key", "mine", "'spare'"),
    ],
)
def test_a_value_of_another_kind_is_refused(name: str, value: object, expected: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        Engine(**{name: value})  # type: ignore[arg-type]  # wrong on purpose

    assert (caught.value.option, caught.value.expected, caught.value.value) == (name, expected, value)


def test_defaults_and_values_of_the_kind_are_taken() -> None:
    assert Engine().key is None
    assert Engine(cylinders=12, speed="quick", is_loud=True, key="spare", comment="x").cylinders == 12


def test_a_secret_is_not_shown() -> None:
    assert "spare" not in repr(Engine(key="spare"))


def test_what_is_known_of_an_option_is_found_at_its_field() -> None:
    known = {entry.name: metadata_of(entry) for entry in fields(Engine)}

    assert known["comment"] is None
    assert known["is_loud"] is not None
    assert known["is_loud"].general == "LOUD"


@pytest.mark.parametrize(("text", "value"), [("7", 7), (" 7 ", 7), ("1_000", "1_000"), ("٣", "٣"), ("", "")])
def test_only_plain_digits_are_a_number(text: str, value: object) -> None:
    assert at_least(0).from_text(text) == value
