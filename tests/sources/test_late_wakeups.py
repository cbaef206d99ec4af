"""Events that nobody told of are found by the poll, and counted."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from bullpen._kernel import telemetry
from bullpen.plugins.sources.sql import SqlEvents
from bullpen.ports.source import BEGINNING
from bullpen.testing.contracts.source import an_event
from tests.databases import MakeLedger

_UNTIL_COUNTED_S = 1.5
"""A notification has a second to come."""


@pytest.mark.cuts_wakeups
async def test_an_event_that_nobody_told_of_is_counted(postgres_url: str, make_ledger: MakeLedger) -> None:
    """Stored by a program that does not notify, beside a reader that relies on it."""
    ledger, silent = make_ledger(postgres_url), make_ledger(postgres_url, notify=False)
    before = telemetry.late_wakeups().get("projector", 0)
    source = SqlEvents(ledger, poll_ms=400)
    number = 0
    async with asyncio.timeout(60), contextlib.aclosing(source.subscribe(BEGINNING)) as batches:
        assert (await anext(batches)).events == ()
        # Nothing counts before the reader listens, and only a notification shows that it does: so until one is counted.
        while telemetry.late_wakeups().get("projector", 0) == before:
            for writer in (ledger, silent):
                number += 1
                await writer.events.append(None, "payment-1", [an_event(number)])
                assert len((await anext(batches)).events) == 1
            await asyncio.sleep(_UNTIL_COUNTED_S)


@pytest.mark.many
async def test_events_that_are_told_of_are_not_counted(postgres_url: str, make_ledger: MakeLedger) -> None:
    """However often the poll comes between: the notification of a commit may be on its way."""
    ledger = make_ledger(postgres_url)
    source = SqlEvents(ledger, poll_ms=1)
    async with asyncio.timeout(60), contextlib.aclosing(source.subscribe(BEGINNING)) as batches:
        assert (await anext(batches)).events == ()
        for number in range(1, 51):
            await ledger.events.append(None, "payment-1", [an_event(number)])
            assert len((await anext(batches)).events) == 1
        await asyncio.sleep(_UNTIL_COUNTED_S)
