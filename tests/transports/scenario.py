"""One story of a shop's events, told to any client. It knows no transport; what it returns must be the same on all."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from bullpen.errors import DelayJob, PermanentError
from bullpen.plugins.messaging import MessagingClient
from bullpen.ports.bindings import Binding
from bullpen.workflow.bindings import EventConsumers
from tests.transports._listening import Heard

PATIENCE_S = 60.0


class Order(StrEnum):
    PAID = "paid"
    SHIPPED = "shipped"


@dataclass
class Shop:
    """Stands for a workflow: what was applied to which order, and what goes wrong on the way."""

    pause_ms: int
    applied: list[tuple[str, str]] = field(default_factory=list)
    tries: dict[str, int] = field(default_factory=dict)

    async def emit(self, event: Order, urn: str, payload: Any) -> None:
        self.tries[urn] = count = self.tries.get(urn, 0) + 1
        match urn.rpartition(":")[2]:
            case "flaky" if count == 1:
                raise ConnectionError("card company away")
            case "hopeless":
                raise ConnectionError("card company gone")
            case "refused":
                raise PermanentError("card stolen")
            case "patient" if count == 1:
                raise DelayJob(self.pause_ms)
            case "buggy":
                raise KeyError(payload["typo"])
        self.applied.append((urn, event.value))


EVENTS = (
    ("pay", "urn:order:plain", {"amount": 5}),
    ("ship", "urn:order:sent", None),
    ("pay", "urn:order:flaky", {"amount": 7}),
    ("pay", "urn:order:hopeless", {"amount": 9}),
    ("pay", "urn:order:refused", {"amount": 11}),
    ("pay", "urn:order:patient", {"amount": 13}),
    ("pay", "urn:order:buggy", {"amount": 15}),
    ("unknown", "urn:order:unmapped", None),
)

EXPECTED = {
    # urn: (events applied, tries, cause of its dead letter, attempts in it, error message)
    "urn:order:plain": (("paid",), 1, None, None, None),
    "urn:order:sent": (("shipped",), 1, None, None, None),
    "urn:order:flaky": (("paid",), 2, None, None, None),
    "urn:order:hopeless": ((), 3, "exhausted", 3, "card company gone"),
    "urn:order:refused": ((), 1, "permanent", 1, "card stolen"),
    "urn:order:patient": (("paid",), 2, None, None, None),
    "urn:order:buggy": ((), 3, "exhausted", 3, "'typo'"),
    "urn:order:unmapped": (
        (),
        0,
        "permanent",
        1,
        "no event is mapped to 'unknown' of 'SOURCE' (mapped are: pay, ship)",
    ),
}


async def play(
    client: MessagingClient[Any], binding: Binding[Order], source: str, heard: Heard, *, pause_ms: int
) -> dict[str, tuple[Any, ...]]:
    """Tell the story, wait until every event has come to its end, and say what became of each."""
    shop = Shop(pause_ms)
    consumers = EventConsumers(binding, client, shop.emit)
    await consumers.start()
    for name, urn, payload in EVENTS:
        await client.produce(source, name, {"urn": urn, "payload": payload})

    def ended() -> int:
        return sum(fields["outcome"] in ("completed", "failed") for fields in heard.of("delivery.settled"))

    async with asyncio.timeout(PATIENCE_S):
        while ended() < len(EVENTS):
            await heard.wait("delivery.settled", len(heard.of("delivery.settled")) + 1, within_s=PATIENCE_S)
    await consumers.close()
    letters = {letter.data["urn"]: letter for letter in await client.transport.dead_letters(source).list()}
    table: dict[str, tuple[Any, ...]] = {}
    for _, urn, _ in EVENTS:
        letter = letters.get(urn)
        table[urn] = (
            tuple(event for applied, event in shop.applied if applied == urn),
            shop.tries.get(urn, 0),
            letter.cause if letter else None,
            letter.attempts_made if letter else None,
            letter.error_message.replace(source, "SOURCE") if letter else None,
        )
    return table
