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


@pytest.mark.cuts_wakeups
async def test_an_event_that_nobody_told_of_is_counted(postgres_url: str, make_ledger: MakeLedger) -> None:
    """Stored by a program that does not notify, beside a reader that relies on it."""
    ledger, silent = make_ledger(postgres_url), make_ledger(postgres_url, notify=False)
    before = telemetry.late_wakeups().get("projector", 0)
    source = SqlEvents(ledger, poll_ms=400)
    async with asyncio.timeout(20), contextlib.aclosing(source.subscribe(BEGINNING)) as batches:
        assert (await anext(batches)).events == ()
        await ledger.events.append(None, "payment-1", [an_event(1)])
        assert len((await anext(batches)).events) == 1
        assert telemetry.late_wakeups().get("projector", 0) == before

        await silent.events.append(None, "payment-1", [an_event(2)])
        assert len((await anext(batches)).events) == 1
        while telemetry.late_wakeups().get("projector", 0) == before:  # noqa: ASYNC110 - a counter tells nobody
            await asyncio.sleep(0.01)
