"""Fixtures of the outbox suites: a ledger of either kind, and Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import pytest

from bullpen.ledger import Ledger
from bullpen.outbox import DispatcherOptions, Outbox
from bullpen.redis import Connection
from tests.loops import LoopFactory, loop_factories
from tests.outbox.kit import Told, telling

MakeOutbox = Callable[..., Outbox]


@pytest.fixture
async def connection(redis_url: str) -> AsyncIterator[Connection]:
    opened = Connection(redis_url)
    yield opened
    await opened.aclose()


@pytest.fixture
async def make_outbox(ledger: Ledger) -> AsyncIterator[MakeOutbox]:
    """Outboxes over the test's ledger; all are closed in the end. Further arguments are dispatcher options."""
    opened: list[Outbox] = []

    def make(routes: Any, *, connection: Connection | None = None, ledger: Ledger = ledger, **options: Any) -> Outbox:
        opened.append(Outbox(ledger, routes, connection=connection, options=DispatcherOptions(**options)))
        return opened[-1]

    yield make

    for outbox in opened:
        await outbox.aclose()


@pytest.fixture
def told() -> Iterator[Told]:
    with telling() as listening:
        yield listening


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, LoopFactory]:
    return loop_factories(item)
