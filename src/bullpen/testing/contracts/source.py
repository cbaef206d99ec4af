"""What every event source promises, as tests. Subclass `SourceContract` and give it a `harness` fixture.

    class TestMySource(SourceContract):
        @pytest.fixture
        async def harness(self) -> AsyncIterator[SourceHarness]: ...

The suite knows the port, never an event store: appending and outages are played by the harness.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import pytest

from bullpen.errors import InvalidOption, SourceUnavailable, WrongVersion
from bullpen.ports.source import BEGINNING, NO_STREAM, EventBatch, EventMetadata, EventSource, NewEvent, SourceEvent

__all__ = ["SourceContract", "SourceHarness", "an_event", "take"]

PATIENCE_S = 30.0


class SourceHarness(Protocol):
    """What the suite asks of an event store, which is empty when a test begins."""

    def make(self, *, prefixes: Iterable[str] = (), regex: str | None = None) -> EventSource:
        """A new source, as another process would have it."""
        ...

    async def append(self, stream: str, events: list[NewEvent], *, expected_version: int | None = None) -> None:
        """Store events. Raises WrongVersion when the stream is not at the version that was expected."""
        ...

    def outage(self) -> AbstractAsyncContextManager[None]:
        """The store is away inside of the block, and back after it with everything it had."""
        ...


def an_event(number: int = 1, type: str = "payment.completed.v1", **metadata: Any) -> NewEvent:
    given = {"correlation_id": f"c-{number}", "source": "shop", **metadata}
    return NewEvent(type=type, data={"number": number, "text": "naïve ☕"}, metadata=EventMetadata(**given))


async def take(
    batches: AsyncGenerator[EventBatch, None], count: int, *, within_s: float = PATIENCE_S
) -> tuple[list[SourceEvent], int]:
    """So many events of a subscription, and the checkpoint behind the batch that held the last."""
    events: list[SourceEvent] = []
    position: int | None = None
    try:
        async with asyncio.timeout(within_s):
            while len(events) < count:
                batch = await anext(batches)
                events += batch.events
                position = batch.position
    except TimeoutError:
        raise AssertionError(f"{len(events)} of {count} events within {within_s} s") from None
    return events, BEGINNING if position is None else position


class SourceContract:
    """Every event once per reading, in order, from any position; nothing is passed over."""

    @pytest.mark.requirement("O-27", "O-28")
    async def test_an_event_arrives_as_it_was_stored(self, harness: SourceHarness) -> None:
        source = harness.make()
        event = an_event(1, tenant_id="acme", user_id="u-7", headers={"traceparent": "00-ab-cd-01"})
        await harness.append("payment-1", [event])

        async with contextlib.aclosing(source.subscribe(BEGINNING)) as batches:
            (got,), position = await take(batches, 1)

        assert (got.id, got.stream, got.type, got.version) == (event.id, "payment-1", "payment.completed.v1", 0)
        assert got.data == event.data
        assert got.metadata.to_wire() == event.metadata.to_wire()
        assert position >= got.position
        await source.aclose()

    async def test_events_come_in_order_and_only_once(self, harness: SourceHarness) -> None:
        source = harness.make()
        for number in range(30):
            await harness.append(f"payment-{number % 3}", [an_event(number)])

        async with contextlib.aclosing(source.subscribe(BEGINNING)) as batches:
            got, _ = await take(batches, 30)

        assert [event.data["number"] for event in got] == list(range(30))
        assert sorted({event.position for event in got}) == [event.position for event in got]
        await source.aclose()

    @pytest.mark.requirement("O-28", "O-36")
    async def test_reading_goes_on_behind_a_position(self, harness: SourceHarness) -> None:
        """A process that was restarted gets what comes behind its checkpoint, and nothing else."""
        source = harness.make()
        await harness.append("payment-1", [an_event(1), an_event(2)])
        async with contextlib.aclosing(source.subscribe(BEGINNING)) as batches:
            _, position = await take(batches, 2)
        await harness.append("payment-1", [an_event(3)])

        async with contextlib.aclosing(source.subscribe(position)) as batches:
            got, _ = await take(batches, 1)

        assert [event.data["number"] for event in got] == [3]
        await source.aclose()

    async def test_new_events_come_while_somebody_listens(self, harness: SourceHarness) -> None:
        source = harness.make()
        async with contextlib.aclosing(source.subscribe(BEGINNING)) as batches:
            waiting = asyncio.create_task(take(batches, 1))
            await asyncio.sleep(0)
            await harness.append("payment-1", [an_event(5)])

            (got,), _ = await waiting

        assert got.data["number"] == 5
        await source.aclose()

    @pytest.mark.requirement("O-28", "O-29", "X-96")
    async def test_several_prefixes_at_once(self, harness: SourceHarness) -> None:
        source = harness.make(prefixes=["payment.", "account."])
        types = ["payment.completed.v1", "order.paid.v1", "account.opened.v1", "xpayment.done", "payment"]
        await harness.append("mixed", [an_event(n, kind) for n, kind in enumerate(types)])
        await harness.append("mixed", [an_event(9, "payment.failed.v1")])

        async with contextlib.aclosing(source.subscribe(BEGINNING)) as batches:
            got, _ = await take(batches, 3)

        assert [event.type for event in got] == ["payment.completed.v1", "account.opened.v1", "payment.failed.v1"]
        await source.aclose()

    @pytest.mark.requirement("O-28")
    async def test_a_pattern_chooses_too(self, harness: SourceHarness) -> None:
        source = harness.make(regex=r"payment\.(completed|failed)\.v[12]|account\..*")
        types = ["payment.completed.v1", "payment.completed.v3", "account.x", "my.account.x", "payment.failed.v2"]
        await harness.append("mixed", [an_event(n, kind) for n, kind in enumerate(types)])

        async with contextlib.aclosing(source.subscribe(BEGINNING)) as batches:
            got, _ = await take(batches, 3)

        assert [event.type for event in got] == ["payment.completed.v1", "account.x", "payment.failed.v2"]
        await source.aclose()

    @pytest.mark.requirement("X-75")
    async def test_the_position_moves_over_events_that_nobody_wants(self, harness: SourceHarness) -> None:
        """Otherwise a rare event type reads everything again after each restart."""
        source = harness.make(prefixes=["rare."])
        for number in range(0, 200, 50):
            await harness.append("noise", [an_event(n, "noise.v1") for n in range(number, number + 50)])

        async with contextlib.aclosing(source.subscribe(BEGINNING)) as batches, asyncio.timeout(PATIENCE_S):
            batch = await anext(batches)

        assert batch.events == ()
        assert batch.position is not None
        assert batch.position > BEGINNING
        await source.aclose()

    @pytest.mark.requirement("X-86")
    async def test_a_part_can_be_read_to_its_end(self, harness: SourceHarness) -> None:
        source = harness.make()
        await harness.append("payment-1", [an_event(n) for n in range(6)])
        everything = [
            event
            for batch in [each async for each in source.read(BEGINNING, until=await source.head())]
            for event in batch.events
        ]

        part = source.read(everything[1].position, until=everything[3].position)
        numbers = [event.data["number"] async for batch in part for event in batch.events]

        assert [event.data["number"] for event in everything] == list(range(6))
        assert numbers == [2, 3]
        assert await source.head() >= everything[-1].position
        await source.aclose()

    async def test_the_head_of_an_empty_store_is_the_beginning(self, harness: SourceHarness) -> None:
        source = harness.make()

        assert await source.head() == BEGINNING
        assert [batch async for batch in source.read(BEGINNING, until=10)] == []
        await source.aclose()

    async def test_an_append_that_was_overtaken_is_refused(self, harness: SourceHarness) -> None:
        await harness.append("payment-1", [an_event(1)], expected_version=NO_STREAM)
        await harness.append("payment-1", [an_event(2)], expected_version=0)

        with pytest.raises(WrongVersion, match="at version 1, not at version 0"):
            await harness.append("payment-1", [an_event(3)], expected_version=0)
        with pytest.raises(WrongVersion, match="at version 1, not absent"):
            await harness.append("payment-1", [an_event(3)], expected_version=NO_STREAM)
        with pytest.raises(WrongVersion, match="is absent, not at version 4"):
            await harness.append("payment-2", [an_event(3)], expected_version=4)

    async def test_appending_the_same_events_again_changes_nothing(self, harness: SourceHarness) -> None:
        """The answer of an append may be lost; whoever repeats it must not do harm."""
        source, events = harness.make(), [an_event(1), an_event(2)]
        await harness.append("payment-1", events, expected_version=NO_STREAM)

        await harness.append("payment-1", events, expected_version=NO_STREAM)
        await harness.append("payment-1", [an_event(3)], expected_version=1)

        async with contextlib.aclosing(source.subscribe(BEGINNING)) as batches:
            got, _ = await take(batches, 3)
        assert [event.data["number"] for event in got] == [1, 2, 3]
        await source.aclose()

    @pytest.mark.requirement("O-28", "O-36")
    async def test_an_outage_ends_the_subscription_and_a_new_one_goes_on(self, harness: SourceHarness) -> None:
        source = harness.make()
        await harness.append("payment-1", [an_event(1)])
        async with contextlib.aclosing(source.subscribe(BEGINNING)) as batches:
            _, position = await take(batches, 1)
            async with harness.outage():
                with pytest.raises(SourceUnavailable):
                    await take(batches, 1_000)
                assert not (await source.check()).ok
        await harness.append("payment-1", [an_event(2)])

        async with contextlib.aclosing(source.subscribe(position)) as batches:
            got, _ = await take(batches, 1)

        assert [event.data["number"] for event in got] == [2]
        assert (await source.check()).ok
        await source.aclose()
        await source.aclose()

    def test_filters_that_make_no_sense_are_refused(self, harness: SourceHarness) -> None:
        for wrong in ({"prefixes": [""]}, {"prefixes": ["$x"]}, {"prefixes": ["a"], "regex": "b"}, {"regex": "("}):
            with pytest.raises(InvalidOption):
                harness.make(**wrong)
