"""The life of an order, driven by events. `BULLPEN_TRANSPORT` chooses what carries them, and nothing else changes:

    python order_workflow.py                               # BullMQ, on the embedded server
    BULLPEN_TRANSPORT=memory python order_workflow.py      # or kafka, or rabbitmq

`bullpen workflows diagram order_workflow order` draws it.
"""

import asyncio
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from bullpen import Bullpen, PermanentError
from bullpen.workflow import AnyEvent, AnyTransport, Definition, SqlEntities, States, Transition, on_event, step

app = Bullpen()


class Status(StrEnum):
    NEW = "new"
    PAID = "paid"
    PACKED = "packed"
    SHIPPED = "shipped"
    FAILED = "failed"


class Event(StrEnum):
    PAY = "pay"
    PACK = "pack"
    SHIP = "ship"


@dataclass
class Payment:
    amount: int
    card: str


class Base(DeclarativeBase):
    pass


class Order(Base):
    __tablename__ = "example_orders"
    urn: Mapped[str] = mapped_column(primary_key=True)
    status: Mapped[str] = mapped_column(default=Status.NEW)
    paid: Mapped[int] = mapped_column(default=0)
    receipts: Mapped[int] = mapped_column(default=0)
    version: Mapped[int] = mapped_column(default=1)


async def charge(order: Order, payment: Payment) -> Order:
    """May run again after a crash: a real card company would be given `step().key`, and charge once."""
    if payment.card == "stolen":
        raise PermanentError(f"{order.urn}: card is stolen")
    order.paid += payment.amount
    return order


class Mail:
    @on_event(Event.PAY)
    async def receipt(self, order: Order, payment: Payment) -> Order:
        assert step().key  # the same whenever this step of this event runs again
        order.receipts += 1
        return order


orders = SqlEntities[Order, Status](Order, app.ledger, status_type=Status)
definition = Definition[Order, Payment, Event, Status](
    name="order",
    states=States(initial=Status.NEW, idles=[Status.NEW, Status.PACKED], finals=[Status.SHIPPED], failed=Status.FAILED),
    transitions=[
        Transition(event=Event.PAY, from_=Status.NEW, to=Status.PAID, actions=[charge]),
        Transition(event=Event.PACK, from_=Status.PAID, to=Status.PACKED),  # goes on by itself: PAID is no idle state
        Transition(event=Event.SHIP, from_=Status.PACKED, to=Status.SHIPPED),
    ],
    entity=orders,
    actions=[Mail()],
    payloads={Event.PAY: Payment},
    events=AnyTransport(
        events=[
            AnyEvent(source="order-events", event=Event.PAY, job_name="pay"),
            AnyEvent(source="order-events", event=Event.SHIP, job_name="ship"),
        ]
    ),
)
workflow = app.workflow(definition)


async def until(urn: str, *statuses: str) -> Order:
    while True:
        order = await workflow.load(urn)
        if order is not None and order.status in statuses:
            return order
        await asyncio.sleep(0.05)


async def main() -> None:
    async with app:
        await app.prepare()
        async with app.ledger.database.engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        await workflow.start()
        for number, card in ((1, "good"), (2, "stolen")):
            urn = f"urn:order:{number}"
            await orders.create(Order(urn=urn))
            # The same key twice: the second one is the same event, and counts once.
            for _ in range(2):
                await workflow.send(Event.PAY, urn, Payment(20, card), idempotency_key=f"payment-{number}")
        packed = await until("urn:order:1", Status.PACKED)
        await workflow.send(Event.SHIP, packed.urn, correlation_id="truck-7")
        shipped = await until(packed.urn, Status.SHIPPED)
        print(f"{shipped.urn} is {shipped.status}: {shipped.paid} paid, {shipped.receipts} receipt")
        for urn in ("urn:order:1", "urn:order:2"):
            await until(urn, Status.SHIPPED, Status.FAILED)
            for move in await workflow.history(urn):
                because = f" because {move.reason}" if move.reason else ""
                print(f"{move.urn}: {move.source} -> {move.target} by {move.event} ({move.kind}){because}")


if __name__ == "__main__":
    asyncio.run(main())
