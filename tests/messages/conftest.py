"""Fixtures of the message suites: a client on any transport, messages over the test's ledger."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from bullpen.ledger import Ledger
from bullpen.messages import Messages
from bullpen.plugins.transports.bullmq import BullMQClient
from bullpen.plugins.transports.memory import MemoryBroker, MemoryClient
from bullpen.redis import Connection
from bullpen.testing.rabbitmq import RabbitServer
from tests.messages.kit import QUICK, Provider, Told, make, telling
from tests.messages.rabbit import rabbit_client, rabbit_names

MakeMessages = Callable[..., Messages]


@pytest.fixture
def ledger(sqlite_url: str, make_ledger: Callable[..., Ledger]) -> Ledger:
    """SQLite, where a test does not ask for more."""
    return make_ledger(sqlite_url)


@pytest.fixture
def both_ledgers(ledger_url: str, make_ledger: Callable[..., Ledger]) -> Ledger:
    """PostgreSQL and SQLite, one after the other."""
    return make_ledger(ledger_url)


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


@pytest.fixture
async def connection(redis_url: str) -> AsyncIterator[Connection]:
    opened = Connection(redis_url)
    yield opened
    await opened.aclose()


@pytest.fixture
async def make_messages(ledger: Ledger, broker: MemoryBroker) -> AsyncIterator[MakeMessages]:
    """Messages in memory over the test's ledger, unless told otherwise; all are closed in the end."""
    made: list[Messages] = []

    def build(provider: Any = None, *, ledger: Ledger = ledger, client: Any = None, **options: Any) -> Messages:
        client = client or MemoryClient(broker, policy=QUICK, concurrency=5)
        made.append(make(ledger, client, provider, **options))
        return made[-1]

    yield build

    for messages in made:
        await messages.aclose()


@pytest.fixture(params=["memory", "bullmq", "rabbitmq"])
def any_client(request: pytest.FixtureRequest) -> tuple[Any, str]:
    """A client on each transport, and the queue to use."""
    if request.param == "memory":
        return MemoryClient(request.getfixturevalue("broker"), policy=QUICK, concurrency=5), "messages"
    if request.param == "bullmq":
        connection: Connection = request.getfixturevalue("connection")
        return BullMQClient(connection, policy=QUICK, concurrency=5), "messages"
    rabbit: RabbitServer = request.getfixturevalue("rabbit")
    names = rabbit_names()
    return rabbit_client(rabbit.url, names), names["queue_name"]


@pytest.fixture
def provider(ledger: Ledger) -> Provider:
    return Provider(ledger=ledger)


@pytest.fixture
def told() -> Iterator[Told]:
    with telling() as listening:
        yield listening
