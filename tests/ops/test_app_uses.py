"""What an app runs stands in the program as a call: reading a property starts and registers nothing."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from bullpen import Bullpen, NotConfigured, Settings

PARTS = ("alerts", "messages", "outbox", "runs")


@pytest.fixture
def app(tmp_path: Path) -> Bullpen:
    return Bullpen(settings=Settings.load(environ={"BULLPEN_DATA_DIR": str(tmp_path)}, start=tmp_path))


@pytest.mark.parametrize("part", PARTS)
def test_a_part_that_is_not_used_names_the_call(app: Bullpen, part: str) -> None:
    with pytest.raises(NotConfigured, match=rf"does not use {part}; call app\.use_{part}\(\)"):
        getattr(app, part)


async def test_reading_every_property_registers_nothing(app: Bullpen) -> None:
    """A debugger, a repr or a template that looks at an app must not change what it runs."""
    properties = [name for name, member in inspect.getmembers(Bullpen) if isinstance(member, property)]

    for name in properties:
        if name not in PARTS:
            getattr(app, name)

    assert app.services == ()
    assert await app.metrics() == []
    assert app.has_outbox is False
    await app.aclose()


@pytest.mark.parametrize("part", PARTS)
async def test_a_part_is_made_once(app: Bullpen, part: str) -> None:
    use = getattr(app, f"use_{part}")
    made = use()

    count = len(app.services)
    assert use() is made
    assert getattr(app, part) is made
    assert len(app.services) == count > 0
    await app.aclose()
