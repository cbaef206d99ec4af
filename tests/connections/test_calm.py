"""Short outages that were only counted are summed up when the connection is calm, not at the next outage."""

from __future__ import annotations

import asyncio
import time
import uuid

import pytest

from bullpen.redis import outages


async def test_the_last_outages_before_a_calm_are_summed_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Before, a log ended with "is back" after the third of ten outages, and said nothing of the others."""
    monkeypatch.setattr(outages, "_QUIET_S", 0.3)
    where, who = f"server-{uuid.uuid4().hex}", frozenset({"a connection"})

    for _ in range(8):
        outages.note_lost(who, where, "cut", time.monotonic())
        outages.note_back(where, where)
    async with asyncio.timeout(20):
        while not (said := [line for line in caplog.messages if "stable since" in line]):  # noqa: ASYNC110 - a log tells nobody
            await asyncio.sleep(0.02)

    assert said == [f"connection to {where} was unstable: lost 5 more times in 0 s, stable since"]
    assert not outages._outages[where].is_watched


async def test_an_outage_that_goes_on_is_no_calm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(outages, "_QUIET_S", 0.05)
    where, who = f"server-{uuid.uuid4().hex}", frozenset({"a connection"})
    for _ in range(4):
        outages.note_lost(who, where, "cut", time.monotonic())
        outages.note_back(where, where)
    outages.note_lost(who, where, "cut", time.monotonic())

    outages._sum_up_when_calm(where)

    assert outages._outages[where].is_watched
    assert not [line for line in caplog.messages if "stable since" in line]
    outages.note_back(where, where)
    async with asyncio.timeout(20):
        while outages._outages[where].is_watched:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.02)
