"""One story of a shop's orders, told to a workflow. It knows no transport; what it returns must be the same on all."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from bullpen.errors import DelayJob, PermanentError
from bullpen.plugins.messaging import MessagingClient
from bullpen.workflow.definition import Definition, InlineEntities, States, Transition
from bullpen.workflow.service import Workflow
from tests.transports._listening import Heard

PATIENCE_S = 60.0


class Status(StrEnum):
    NEW = "new"
    PAID = "paid"
    SHIPPED = "shipped"
    FAILED = "failed"


class Event(StrEnum):
    PAY = "pay"
    SHIP = "ship"


@dataclass(frozen=True)
class Order:
    urn: str
    status: Status = Status.NEW
    amount: int = 0


OrderWorkflow = Workflow[Order, Any, Event, Status]
OrderDefinition = Definition[Order, Any, Event, Status]


@dataclass
class Shop:
    """The orders, how often each was tried to be charged, and what goes wrong on the way."""

    pause_ms: int
    orders: dict[str, Order] = field(default_factory=dict)
    tries: Counter[str] = field(default_factory=Counter)

    async def charge(self, order: Order, payload: Any) -> Order:
        self.tries[order.urn] += 1
        is_first = self.tries[order.urn] == 1
        match order.urn.rpartition(":")[2]:
            case "flaky" if is_first:
                raise ConnectionError("card company away")
            case "hopeless":
                raise ConnectionError("card company gone")
            case "refused":
                raise PermanentError("card stolen")
            case "patient" if is_first:
                raise DelayJob(self.pause_ms)
            case "buggy":
                raise KeyError("typo")
        return replace(order, amount=payload["amount"])

    def update(self, order: Order, status: Status) -> Order:
        self.orders[order.urn] = replace(order, status=status)
        return self.orders[order.urn]

    def definition(self) -> OrderDefinition:
        return OrderDefinition(
            name="order",
            states=States(
                initial=Status.NEW, idles=[Status.NEW, Status.PAID], finals=[Status.SHIPPED], failed=Status.FAILED
            ),
            transitions=[
                Transition(
                    event=Event.PAY,
                    from_=Status.NEW,
                    to=Status.PAID,
                    conditions=[lambda _, payload: payload["amount"] > 0],
                    actions=[self.charge],
                ),
                Transition(event=Event.SHIP, from_=Status.PAID, to=Status.SHIPPED),
            ],
            entity=InlineEntities(
                new=lambda: Order("urn:order:none"),
                load=self.orders.get,
                update=self.update,
                status=lambda order: order.status,
                urn=lambda order: order.urn,
            ),
        )


STORY = (
    ("pay", "urn:order:plain", {"amount": 5}),
    ("ship", "urn:order:paid", None),
    ("ship", "urn:order:early", None),
    ("pay", "urn:order:free", {"amount": 0}),
    ("pay", "urn:order:flaky", {"amount": 7}),
    ("pay", "urn:order:hopeless", {"amount": 9}),
    ("pay", "urn:order:refused", {"amount": 11}),
    ("pay", "urn:order:patient", {"amount": 13}),
    ("pay", "urn:order:buggy", {"amount": 15}),
    ("pay", "urn:order:missing", {"amount": 17}),
    ("unknown", "urn:order:unmapped", None),
)


async def play(workflow: OrderWorkflow, shop: Shop, source: str, heard: Heard) -> dict[str, tuple[Any, ...]]:
    """Tell the story, wait until every event has come to its end, and say what became of each order.

    urn: (status, amount, tries to charge, cause of its dead letter, attempts in it, first line of its error).
    """
    client = workflow.client
    assert isinstance(client, MessagingClient)
    for _, urn, _ in STORY:
        shop.orders[urn] = Order(urn, Status.PAID if urn.endswith("paid") else Status.NEW)
    del shop.orders["urn:order:missing"]
    await workflow.start()
    for name, urn, payload in STORY:
        await client.produce(source, name, {"urn": urn, "payload": payload})

    def ended() -> int:
        return sum(fields["outcome"] in ("completed", "failed") for fields in heard.of("delivery.settled"))

    async with asyncio.timeout(PATIENCE_S):
        while ended() < len(STORY):
            await heard.wait("delivery.settled", len(heard.of("delivery.settled")) + 1, within_s=PATIENCE_S)
    letters = {letter.data["urn"]: letter for letter in await client.transport.dead_letters(source).list()}
    table: dict[str, tuple[Any, ...]] = {}
    for _, urn, _ in STORY:
        order, letter = shop.orders.get(urn), letters.get(urn)
        told = (letter.cause, letter.attempts_made, letter.error_message.replace(source, "SOURCE")) if letter else None
        table[urn.rpartition(":")[2]] = (order and order.status.value, order and order.amount, shop.tries[urn], told)
    return table
