"""Headers by which RabbitMQ routes: who may write one exchange reaches no queue behind it through our rights."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Final

import aio_pika
import pytest

from bullpen._kernel.outcome import Completed, Retry
from bullpen.errors import InvalidOption, NotTakenNow
from bullpen.plugins.transports.rabbitmq import RabbitMQTransport, Topology
from bullpen.ports.transport import Published
from bullpen.testing.contracts.transport import an_event, take
from bullpen.testing.rabbitmq import RabbitServer
from tests.transports._listening import PATIENCE_S
from tests.transports.test_rabbitmq import QUICK, messages, unique


@pytest.fixture
async def transport(rabbit: RabbitServer) -> AsyncIterator[RabbitMQTransport]:
    opened = RabbitMQTransport(rabbit.url, topology=Topology(delays=QUICK))
    yield opened
    await opened.aclose()


def neighbour(rabbit: RabbitServer, exchange: str) -> str:
    """The address for a user who may write to this exchange and do nothing else."""
    name = unique("neighbour")
    rabbit.control("add_user", name, "secret")
    rabbit.control("set_permissions", name, "^$", f"^{exchange.replace('.', '[.]')}$", "^$")
    return rabbit.url.replace("//guest:guest@", "//").replace("//", f"//{name}:secret@")


@pytest.mark.parametrize("delay_ms", [0, 40])
async def test_a_retry_routes_to_its_own_queue_only(rabbit: RabbitServer, delay_ms: int) -> None:
    """The broker delivers to every queue that the header CC lists, with the rights of whoever publishes. A retry is a
    copy that the consumer publishes: with the header in it, a neighbour writes where only the consumer may."""
    ours, theirs = messages(), messages()
    queue, victim = ours.queues[0].name, theirs.queues[0].name
    listed: Any = [victim, ".".join("0" * QUICK.levels) + f".{victim}"]
    transport = RabbitMQTransport(rabbit.url, topology=ours)
    other = RabbitMQTransport(rabbit.url, topology=theirs)
    try:
        for one, name in ((transport, queue), (other, victim)):
            await one.declare(one.spec(name))
        async with await aio_pika.connect(neighbour(rabbit, ours.exchange)) as connection:
            exchange = await (await connection.channel()).get_exchange(ours.exchange, ensure=False)
            forged = aio_pika.Message(
                json.dumps({"urn": "urn:forged"}).encode(),
                headers={"CC": listed, "BCC": listed, "tenant": "t1"},
                message_id="forged",
                type="birthday",
            )
            await exchange.publish(forged, "birthday")
        # The broker routes by what stands in the message, also for the neighbour: to the exchange's own queues only.
        assert (await other.depth(victim)).messages == 0
        consumption = await transport.deliveries(queue, prefetch=1)

        first = await take(consumption)
        await transport.settle(first, Retry("no", "", delay_ms))
        second = await take(consumption)

        # Confirmed by the broker, so all queues that it was routed to have it.
        assert (second.id, second.attempt, dict(second.event.headers)) == ("forged", 2, {"tenant": "t1"})
        await transport.settle(second, Completed(b"null"))
        assert (await other.depth(victim)).messages == 0
    finally:
        await transport.aclose()
        await other.aclose()


HEADERS: Final[dict[str, dict[str, Any]]] = {
    "CC": {"headers": {"CC": "other-queue"}},
    "BCC": {"headers": {"BCC": "other-queue"}},
    "a long header": {"headers": {"é" * 65: "x"}},
    "a header with half a character": {"headers": {"trace": "\ud800"}},
    "a header name with half a character": {"headers": {"\ud800": "x"}},
    "a long name": {"name": "n" * 256},
    "a name with half a character": {"name": "\ud800"},
    "a long id": {"id": "n" * 256},
}


@pytest.mark.parametrize("case", HEADERS)
async def test_what_amqp_cannot_carry_fails_its_event_alone(transport: RabbitMQTransport, case: str) -> None:
    """The broker closes the channel over a CC that is text, and with it every publish that waits there; a text that the
    driver cannot write fails the whole batch."""
    queue = unique()
    async with asyncio.timeout(PATIENCE_S):
        while isinstance((await transport.publish_many([(an_event(queue), 0)]))[0], NotTakenNow):
            pass  # a new queue elects its leader
    sent = [an_event(queue, number, **HEADERS[case] if number == 5 else {}) for number in range(10)]

    one_by_one = await asyncio.gather(*(transport.publish(event) for event in sent), return_exceptions=True)
    together = await transport.publish_many([(event, 0) for event in sent])

    for results in (one_by_one, together):
        assert [type(result) for result in results] == [InvalidOption if n == 5 else Published for n in range(10)]
