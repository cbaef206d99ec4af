"""A commit with new rows is told; a rollback is not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from bullpen.ledger import Ledger
from bullpen.testing.postgres import PostgresServer
from tests.databases import MakeLedger, item

PATIENCE_S = 40


class Ears:
    """Counts what was told."""

    def __init__(self) -> None:
        self.heard = 0
        self._changed = asyncio.Event()

    async def listen(self, ledger: Ledger) -> None:
        async with contextlib.aclosing(ledger.commits()) as commits:
            async for what in commits:
                self.heard += not what  # lines of ordering keys are told apart
                self._changed.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.heard < count:
                self._changed.clear()
                await self._changed.wait()


@contextlib.asynccontextmanager
async def listening(ledger: Ledger) -> AsyncIterator[Ears]:
    ears = Ears()
    task = asyncio.create_task(ears.listen(ledger))
    try:
        await ears.until(1)  # told once when the connection stands: what came before nobody told
        yield ears
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_commit_is_told(ledger: Ledger, ledger_url: str, make_ledger: MakeLedger) -> None:
    writer = make_ledger(ledger_url)
    async with listening(ledger) as ears:
        await writer.outbox.enqueue(item(1))
        await ears.until(2)

        await writer.outbox.enqueue(item(2))
        await ears.until(3)


async def test_a_transaction_is_told_once_and_a_rollback_not_at_all(postgres_url: str, make_ledger: MakeLedger) -> None:
    ledger = make_ledger(postgres_url)
    async with listening(ledger) as ears:
        with contextlib.suppress(RuntimeError):
            async with ledger.database.transaction() as connection:
                await ledger.enqueuer.enqueue(connection, item(1))
                raise RuntimeError("business says no")
        async with ledger.database.transaction() as connection:
            for number in range(20):
                await ledger.enqueuer.enqueue(connection, item(number))
        await ears.until(2)
        await ledger.outbox.enqueue(item(100))
        await ears.until(3)

        assert ears.heard == 3


async def test_telling_can_be_switched_off(postgres_url: str, make_ledger: MakeLedger) -> None:
    quiet, loud = make_ledger(postgres_url, notify=False), make_ledger(postgres_url)
    async with listening(loud) as ears:
        await quiet.outbox.enqueue(item(1))
        await loud.outbox.enqueue(item(2))
        await ears.until(2)

        assert ears.heard == 2


async def test_a_listener_comes_back_after_the_server(
    make_ledger: MakeLedger, caplog: pytest.LogCaptureFixture
) -> None:
    with PostgresServer.start(durable=True) as server:
        ledger = make_ledger(server.url())
        await ledger.migrate()
        async with listening(ledger) as ears:
            server.kill()
            server.restart()
            await ears.until(2)  # told again, because something may have been missed

        await ledger.aclose()
    lines = [record.getMessage() for record in caplog.records if record.name == "bullpen.ledger"]
    assert len([line for line in lines if "no longer sends notifications" in line]) == 1
    assert len([line for line in lines if "sends notifications of new rows again" in line]) == 1
