"""Fixtures of the message suites: a client on any transport, messages over the test's ledger."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from bullpen.ledger import Ledger
from bullpen.messages import Messages
from bullpen.plugins.transports.bullmq import BullMQClient
from bullpen.plugins.transports.memory import MemoryBroker, MemoryClient
from bullpen.plugins.transports.rabbitmq import DelayLadder, RabbitMQClient, Topology
from bullpen.queue import Connection
from bullpen.testing.rabbitmq import RabbitServer
from tests.messages.kit import QUICK, Provider, Told, make, telling

MakeMessages = Callable[..., Messages]


def rabbit_names() -> dict[str, str]:
    """The names of the preset, under a first word of their own."""
    base = f"birthday-{uuid.uuid4().hex[:8]}"
    return {
        "exchange_name": f"{base}.messages",
        "dlx_name": f"{base}.messages.dlx",
        "queue_name": f"{base}.messages.queue",
        "dlq_name": f"{base}.messages.dlq",
    }


def rabbit_client(urls: Any, names: dict[str, str], **options: Any) -> RabbitMQClient:
    topology: dict[str, Any] = {**names, "delays": DelayLadder(unit_ms=20, levels=9), **options.pop("topology", {})}
    return RabbitMQClient.for_scheduled_messages(
        urls, topology=Topology.scheduled_messages(**topology), **{"retry_delay_ms": 20, **options}
    )


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
