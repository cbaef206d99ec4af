"""A promise names the test that proves it: one that was renamed or removed takes the promise with it, unseen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "operate" / "guarantees.md"
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE.read_text(encoding="utf-8"))


def test_the_page_names_tests() -> None:
    assert len(NAMED) > 30


@pytest.mark.parametrize(("file", "name"), NAMED, ids=lambda part: part)
def test_every_named_test_exists(file: str, name: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")

    assert not name or re.search(rf"def {name}\(", text)
