"""What every transport promises, as tests. Subclass `TransportContract` and give it a `harness` fixture.

    class TestMyTransport(TransportContract):
        @pytest.fixture
        async def harness(self) -> AsyncIterator[TransportHarness]: ...

The suite knows the port and the client, never a broker: what it needs of one (a new connection, an outage, a process
that dies) the harness plays. Features that a transport says it lacks are tested to be refused.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

import pytest

from bullpen._kernel.backoff import Backoff
from bullpen._kernel.outcome import Cause, Completed, Delayed, Failed, Retry, Waiting
from bullpen._kernel.policy import DeadLetterPolicy, RetryPolicy
from bullpen.errors import (
    ConnectionLost,
    DeadLetterNotFound,
    DelayJob,
    DeliveryLost,
    InvalidOption,
    PermanentError,
    PublishFailed,
)
from bullpen.plugins.messaging import MessagingClient
from bullpen.ports.transport import Deliveries, Delivery, Event, Transport, Tries
from bullpen.testing.killer import Child

__all__ = [
    "TransportContract",
    "TransportHarness",
    "an_event",
    "die_holding_one",
    "nothing_comes",
    "nothing_waits",
    "quick_policy",
    "take",
]

DONE = Completed(b"null")
PATIENCE_S = 30.0
"""Long enough for a busy machine and a broker that elects a leader; reached only when something is broken."""


class TransportHarness(Protocol):
    """What the suite asks of a broker."""

    shortest_pause_ms: int
    """Pauses shorter than this may be rounded up to it."""

    def make(self, *, dead_letters: DeadLetterPolicy | None = None) -> Transport[Any]:
        """A new transport, as another process would have it."""
        ...

    async def source(self) -> str:
        """A queue or topic that nobody used before."""
        ...

    async def die_holding_one(self, source: str, *, failures: int = 0) -> tuple[str, int]:
        """Let a process fail so many deliveries, then die without a word while it holds one: id and attempt of that."""
        ...

    async def put_garbage(self, source: str) -> None:
        """Store something that is no event of ours: no JSON, or no urn."""
        ...

    def outage(self) -> AbstractAsyncContextManager[None]:
        """The broker is away inside of the block, and back after it with everything it had confirmed."""
        ...


async def die_holding_one(
    factory: str, arguments: Mapping[str, Any], source: str, *, failures: int = 0
) -> tuple[str, int]:
    """Kill a process with SIGKILL while it holds a delivery. `factory` is `module:function` and makes a transport."""
    child = Child.module("bullpen.testing.contracts._doomed", factory, json.dumps(arguments), source, str(failures))
    with child:
        for _ in range(failures + 1):
            line = await child.seen(r"^\{", PATIENCE_S)
        child.kill()
    told = json.loads(line)
    return str(told["id"]), int(told["attempt"])


def quick_policy(attempts: int = 3, pause_ms: int = 100) -> RetryPolicy:
    """A policy whose retries a test can wait for."""
    return RetryPolicy(attempts=attempts, backoff=Backoff.fixed(pause_ms), dead_letters=DeadLetterPolicy(store="queue"))


async def take(deliveries: Deliveries, *, within_s: float = PATIENCE_S) -> Delivery:
    """The next delivery, or a failed test."""
    try:
        async with asyncio.timeout(within_s):
            return await anext(deliveries)
    except TimeoutError:
        raise AssertionError(f"no delivery within {within_s} s") from None


async def nothing_comes(deliveries: Deliveries, *, for_s: float) -> None:
    """Fail if a delivery comes; only for what must never come, where no event can be awaited."""
    try:
        async with asyncio.timeout(for_s):
            delivery = await anext(deliveries)
    except (TimeoutError, StopAsyncIteration):
        return
    raise AssertionError(f"{delivery} came, and should not have")


async def nothing_waits(transport: Transport[Any], source: str) -> None:
    """Fail unless the source is empty soon: brokers count acknowledgements a moment later."""
    deadline = time.monotonic() + 5
    while (depth := await transport.depth(source)).messages:
        assert time.monotonic() < deadline, depth
        await asyncio.sleep(0.02)


def an_event(source: str, number: int = 1, **fields: Any) -> Event:
    return Event(
        **{
            "source": source,
            "urn": f"urn:order:{number}",
            "name": "paid",
            "payload": {"number": number, "text": "naïve ☕"},
            "id": f"paid~{number}~{uuid.uuid4()}",
            **fields,
        }
    )


class TransportContract:
    """At least once, attempts counted exactly, dead letters complete, nothing raised at a consumer."""

    @pytest.fixture
    async def transport(self, harness: TransportHarness) -> AsyncIterator[Transport[Any]]:
        made = harness.make()
        yield made
        await made.aclose()

    @pytest.fixture
    async def source(self, harness: TransportHarness) -> str:
        return await harness.source()

    # ---- delivering -------------------------------------------------------------------------------------------

    @pytest.mark.requirement("W-2", "W-49")
    async def test_an_event_arrives_as_it_was_sent(self, transport: Transport[Any], source: str) -> None:
        """Handlers must not notice which transport brought it."""
        event = an_event(source, headers={"correlationId": "c-1", "traceparent": "00-aa-bb-01"})

        receipt = await transport.publish(event)
        delivery = await take(await transport.deliveries(source, prefetch=1))

        assert receipt.id == event.id == delivery.id
        assert (delivery.source, delivery.urn, delivery.name) == (source, event.urn, event.name)
        assert delivery.payload == event.payload
        assert {name: delivery.headers[name] for name in event.headers} == event.headers
        assert delivery.attempt == 1
        assert delivery.problem is None
        assert delivery.idempotency_key
        await transport.settle(delivery, DONE)

    async def test_an_event_without_payload_arrives_with_none(self, transport: Transport[Any], source: str) -> None:
        await transport.publish(an_event(source, payload=None))

        delivery = await take(await transport.deliveries(source, prefetch=1))

        assert delivery.payload is None
        assert delivery.problem is None
        await transport.settle(delivery, DONE)

    @pytest.mark.requirement("S-21")
    async def test_what_is_done_does_not_come_again(self, harness: TransportHarness, source: str) -> None:
        """Also not to the next process."""
        first, second = harness.make(), harness.make()
        await first.publish(an_event(source))
        await first.settle(await take(await first.deliveries(source, prefetch=1)), DONE)
        await first.aclose()

        deliveries = await second.deliveries(source, prefetch=1)

        await nothing_comes(deliveries, for_s=0.5)
        await nothing_waits(second, source)
        await second.aclose()

    @pytest.mark.requirement("S-20")
    async def test_no_more_than_prefetch_are_unsettled(self, transport: Transport[Any], source: str) -> None:
        """A consumer that takes more than it can handle keeps it from others."""
        for number in range(4):
            await transport.publish(an_event(source, number))
        deliveries = await transport.deliveries(source, prefetch=2)
        held = [await take(deliveries)]

        try:
            async with asyncio.timeout(0.5):
                while len(held) < 4:
                    held.append(await anext(deliveries))
        except TimeoutError:
            pass

        assert len(held) <= 2
        for _ in range(4):
            await transport.settle(held.pop() if held else await take(deliveries), DONE)

    async def test_something_that_is_no_event_is_delivered_with_its_problem(
        self, harness: TransportHarness, transport: Transport[Any], source: str
    ) -> None:
        """One bad message harms only itself: it can be judged and buried, and the next one follows."""
        await harness.put_garbage(source)
        await transport.publish(an_event(source))
        deliveries = await transport.deliveries(source, prefetch=1)

        bad = await take(deliveries)
        assert bad.problem
        await transport.settle(bad, Failed(bad.problem, bad.problem, Cause.BAD_DATA))

        good = await take(deliveries)
        assert good.problem is None
        await transport.settle(good, DONE)
        assert await transport.dead_letters(source).depth() == 1

    # ---- coming again -----------------------------------------------------------------------------------------

    @pytest.mark.requirement("S-24", "X-1", "X-61")
    async def test_a_retry_comes_after_its_pause_with_the_next_number(
        self, harness: TransportHarness, transport: Transport[Any], source: str
    ) -> None:
        event = an_event(source, headers={"correlationId": "c-9"})
        await transport.publish(event)
        deliveries = await transport.deliveries(source, prefetch=1)
        pause_ms = max(200, harness.shortest_pause_ms)

        seen = [await take(deliveries)]
        for _ in range(2):
            started = time.monotonic()
            await transport.settle(seen[-1], Retry("no", "stack", pause_ms))
            seen.append(await take(deliveries))
            assert time.monotonic() - started >= pause_ms / 1000 - 0.01

        assert [one.attempt for one in seen] == [1, 2, 3]
        assert {one.id for one in seen} == {event.id}
        assert {one.idempotency_key for one in seen} == {seen[0].idempotency_key}
        assert seen[-1].payload == event.payload
        assert seen[-1].headers["correlationId"] == "c-9"
        await transport.settle(seen[-1], DONE)

    async def test_an_event_put_back_keeps_its_number(
        self, harness: TransportHarness, transport: Transport[Any], source: str
    ) -> None:
        """A handler that asked for a pause, or a worker that closes, has not failed."""
        await transport.publish(an_event(source))
        deliveries = await transport.deliveries(source, prefetch=1)

        await transport.settle(await take(deliveries), Waiting())
        again = await take(deliveries)
        pause_ms = max(100, harness.shortest_pause_ms)
        started = time.monotonic()
        await transport.settle(again, Delayed(pause_ms))
        later = await take(deliveries)

        assert (again.attempt, later.attempt) == (1, 1)
        assert time.monotonic() - started >= pause_ms / 1000 - 0.01
        await transport.settle(later, DONE)

    @pytest.mark.requirement("S-49")
    async def test_a_process_that_dies_loses_nothing(self, harness: TransportHarness, source: str) -> None:
        """kill -9 between receive and settle: the event goes to another process."""
        transport = harness.make()
        event = an_event(source)
        await transport.publish(event)

        held = await harness.die_holding_one(source)
        delivery = await take(await transport.deliveries(source, prefetch=1))

        assert held == (event.id, 1)
        assert (delivery.id, delivery.attempt) == (event.id, 1)
        await transport.settle(delivery, DONE)
        await transport.aclose()

    @pytest.mark.requirement("X-2", "X-39", "X-43")
    async def test_attempts_are_counted_exactly_over_a_death(self, harness: TransportHarness, source: str) -> None:
        """A failure that was settled counts although its process is gone; a death does not."""
        transport = harness.make()
        await transport.publish(an_event(source))

        held = await harness.die_holding_one(source, failures=1)
        delivery = await take(await transport.deliveries(source, prefetch=1))

        assert held[1] == 2
        assert delivery.attempt == 2
        await transport.settle(delivery, DONE)
        await transport.aclose()

    async def test_what_is_unsettled_at_close_comes_again(self, harness: TransportHarness, source: str) -> None:
        first, second = harness.make(), harness.make()
        await first.publish(an_event(source))
        held = await take(await first.deliveries(source, prefetch=1))

        await first.aclose()
        again = await take(await second.deliveries(source, prefetch=1))

        assert (again.id, again.attempt) == (held.id, 1)
        await second.settle(again, DONE)
        with pytest.raises((DeliveryLost, ConnectionLost)):
            await first.settle(held, DONE)
        await second.aclose()

    # ---- delays and order -------------------------------------------------------------------------------------

    async def test_a_delay_holds_back_or_is_refused(
        self, harness: TransportHarness, transport: Transport[Any], source: str
    ) -> None:
        client = MessagingClient(transport, policy=quick_policy())
        data = {"urn": "urn:order:1"}
        if not transport.features.delays:
            with pytest.raises(InvalidOption, match="delay"):
                await client.produce(source, "paid", data, delay=100)  # type: ignore[arg-type]  # a plain dict
            return
        pause_ms = max(300, harness.shortest_pause_ms)
        started = time.monotonic()

        await client.produce(source, "paid", data, delay=pause_ms)  # type: ignore[arg-type]  # a plain dict
        delivery = await take(await transport.deliveries(source, prefetch=1))

        assert time.monotonic() - started >= pause_ms / 1000 - 0.01
        assert delivery.attempt == 1
        await transport.settle(delivery, DONE)

    @pytest.mark.requirement("X-54")
    async def test_events_of_one_urn_stay_in_order_or_that_is_refused(
        self, harness: TransportHarness, transport: Transport[Any], source: str
    ) -> None:
        """Not even a retry is overtaken by its successor."""
        if not transport.features.ordered:
            with pytest.raises(InvalidOption, match="ordered"):
                await transport.deliveries(source, prefetch=2, ordered=True)
            return
        for number in range(4):
            await transport.publish(an_event(source, payload=number, urn="urn:order:same"))
        deliveries = await transport.deliveries(source, prefetch=3, ordered=True)

        seen: list[tuple[int, int]] = []
        failures = {0: 1, 2: 2}
        while len(seen) < 4:
            delivery = await take(deliveries)
            if failures.get(delivery.payload, 0):
                failures[delivery.payload] -= 1
                await transport.settle(delivery, Retry("not yet", "", max(50, harness.shortest_pause_ms)))
            else:
                seen.append((delivery.payload, delivery.attempt))
                await transport.settle(delivery, DONE)

        assert seen == [(0, 2), (1, 1), (2, 3), (3, 1)]

    # ---- dead letters -----------------------------------------------------------------------------------------

    @pytest.mark.requirement("W-41", "W-42", "W-43", "W-44", "X-5", "X-6")
    async def test_a_final_failure_is_one_dead_letter_with_all_context(
        self, transport: Transport[Any], source: str
    ) -> None:
        """Enough to debug it without the original, and nothing twice."""
        event = an_event(source, tries=Tries(1, None))
        await transport.publish(event)
        delivery = await take(await transport.deliveries(source, prefetch=1))

        settled = await transport.settle(delivery, Failed("card refused", "Traceback: card refused", Cause.PERMANENT))

        store = transport.dead_letters(source)
        (letter,) = await store.list()
        assert settled.dead_letter == store.name
        assert store.name == f"{source}-dlq"
        assert await store.depth() == 1
        assert await store.get(letter.id) == letter
        assert (letter.message_id, letter.name, letter.source) == (event.id, event.name, source)
        assert letter.data == {"urn": event.urn, "payload": event.payload}
        assert (letter.error_message, letter.error_stack) == ("card refused", "Traceback: card refused")
        assert (letter.cause, letter.attempts_made) == ("permanent", 1)
        assert letter.failed_at.endswith("Z")
        assert letter.entry["error"] == {"message": "card refused", "stack": "Traceback: card refused"}
        assert letter.entry["originalJobId"] == event.id

    @pytest.mark.requirement("X-40")
    async def test_a_redriven_letter_keeps_its_identity_and_begins_again(
        self, transport: Transport[Any], source: str
    ) -> None:
        event = an_event(source)
        await transport.publish(event)
        deliveries = await transport.deliveries(source, prefetch=1)
        first = await take(deliveries)
        await transport.settle(first, Failed("no", "stack", Cause.EXHAUSTED))
        store = transport.dead_letters(source)
        (letter,) = await store.list()

        sent = await store.redrive(letter.id, by="ada")

        again = await take(deliveries)
        assert sent == again.id == event.id
        assert again.idempotency_key == first.idempotency_key
        assert (again.attempt, again.urn, again.payload) == (1, event.urn, event.payload)
        await transport.settle(again, DONE)
        assert await store.depth() == 0
        with pytest.raises(DeadLetterNotFound):
            await store.redrive(letter.id)
        await nothing_comes(deliveries, for_s=0.3)

    @pytest.mark.requirement("W-24", "X-36")
    async def test_without_a_dead_letter_queue_a_failure_is_only_settled(
        self, harness: TransportHarness, source: str
    ) -> None:
        transport = harness.make(dead_letters=DeadLetterPolicy(store="none"))
        await transport.publish(an_event(source))
        deliveries = await transport.deliveries(source, prefetch=1)

        settled = await transport.settle(await take(deliveries), Failed("no", "", Cause.PERMANENT))

        assert settled.dead_letter is None
        with pytest.raises(InvalidOption, match="dead_letters"):
            transport.dead_letters(source)
        await nothing_comes(deliveries, for_s=0.2)
        await transport.aclose()

    # ---- the client -------------------------------------------------------------------------------------------

    @pytest.mark.requirement("W-38", "W-39", "W-40", "W-54", "S-25", "S-26", "X-2", "X-43")
    async def test_a_handler_runs_exactly_as_often_as_the_policy_says(
        self, harness: TransportHarness, source: str
    ) -> None:
        """Three attempts are three runs and one dead letter; a permanent error is one run; success stops it."""
        pause_ms = max(50, harness.shortest_pause_ms)
        client = MessagingClient(harness.make(), policy=quick_policy(3, pause_ms), concurrency=3)
        runs: list[tuple[str, int]] = []
        settled = asyncio.Semaphore(0)

        async def handle(delivery: Delivery) -> None:
            runs.append((delivery.payload, delivery.attempt))
            if (delivery.payload, delivery.attempt) in {("always", 3), ("once", 2), ("bad", 1), ("ok", 1)}:
                settled.release()
            if delivery.payload == "always" or (delivery.payload == "once" and delivery.attempt == 1):
                raise ConnectionError("partner away")
            if delivery.payload == "bad":
                raise PermanentError("no such order")

        await client.consume(source, handle)
        for kind in ("always", "once", "bad", "ok"):
            await client.produce(source, "paid", {"urn": f"urn:{kind}", "payload": kind})
        for _ in range(4):
            await asyncio.wait_for(settled.acquire(), PATIENCE_S)
        await client.close()

        assert sorted(runs) == [
            ("always", 1),
            ("always", 2),
            ("always", 3),
            ("bad", 1),
            ("ok", 1),
            ("once", 1),
            ("once", 2),
        ]
        reader = harness.make()
        letters = {letter.data["payload"]: letter for letter in await reader.dead_letters(source).list()}
        assert set(letters) == {"always", "bad"}
        assert (letters["always"].attempts_made, letters["always"].cause) == (3, "exhausted")
        assert (letters["bad"].attempts_made, letters["bad"].cause) == (1, "permanent")
        await reader.aclose()

    @pytest.mark.requirement("W-32")
    async def test_one_event_may_have_tries_of_its_own(self, harness: TransportHarness, source: str) -> None:
        client = MessagingClient(harness.make(), policy=quick_policy(5, 10_000))
        runs: list[int] = []
        done = asyncio.Event()

        async def handle(delivery: Delivery) -> None:
            runs.append(delivery.attempt)
            if delivery.attempt == 2:
                done.set()
            raise OSError("away")

        await client.consume(source, handle)
        await client.produce(source, "paid", {"urn": "urn:1"}, attempts=2, backoff=max(20, harness.shortest_pause_ms))
        await asyncio.wait_for(done.wait(), PATIENCE_S)
        await client.close()

        assert runs == [1, 2]
        reader = harness.make()
        assert [letter.attempts_made for letter in await reader.dead_letters(source).list()] == [2]
        await reader.aclose()

    @pytest.mark.requirement("W-57", "S-27", "X-29")
    async def test_close_lets_running_handlers_end(self, harness: TransportHarness, source: str) -> None:
        """And what it had not begun is there for the next process."""
        client = MessagingClient(harness.make(), policy=quick_policy())
        entered, release = asyncio.Event(), asyncio.Event()
        finished: list[str] = []

        async def handle(delivery: Delivery) -> None:
            entered.set()
            await release.wait()
            finished.append(delivery.urn)

        await client.consume(source, handle, concurrency=1)
        for number in range(3):
            await client.produce(source, "paid", {"urn": f"urn:{number}"})
        await asyncio.wait_for(entered.wait(), PATIENCE_S)
        closing = asyncio.create_task(client.close())
        await asyncio.sleep(0.05)
        assert not closing.done()
        release.set()
        await asyncio.wait_for(closing, PATIENCE_S)
        await client.close()

        assert len(finished) == 1
        reader = harness.make()
        deliveries = await reader.deliveries(source, prefetch=1)
        rest = set()
        for _ in range(2):
            delivery = await take(deliveries)
            rest.add(delivery.urn)
            await reader.settle(delivery, DONE)
        assert rest | set(finished) == {"urn:0", "urn:1", "urn:2"}
        await reader.aclose()

    @pytest.mark.requirement("X-29")
    async def test_close_gives_back_what_does_not_end_in_time(self, harness: TransportHarness, source: str) -> None:
        """With no attempt counted: the handler was interrupted by us."""
        client = MessagingClient(harness.make(), policy=quick_policy())
        entered = asyncio.Event()

        async def handle(delivery: Delivery) -> None:
            entered.set()
            await asyncio.Event().wait()

        await client.consume(source, handle)
        await client.produce(source, "paid", {"urn": "urn:1"})
        await asyncio.wait_for(entered.wait(), PATIENCE_S)
        await client.close(timeout=50)

        reader = harness.make()
        delivery = await take(await reader.deliveries(source, prefetch=1))
        assert delivery.attempt == 1
        await reader.settle(delivery, DONE)
        await reader.aclose()

    async def test_a_handler_may_ask_for_a_pause(self, harness: TransportHarness, source: str) -> None:
        client = MessagingClient(harness.make(), policy=quick_policy(1))
        attempts: list[int] = []
        done = asyncio.Event()

        async def handle(delivery: Delivery) -> None:
            attempts.append(delivery.attempt)
            if len(attempts) == 1:
                raise DelayJob(max(50, harness.shortest_pause_ms))
            done.set()

        await client.consume(source, handle)
        await client.produce(source, "paid", {"urn": "urn:1"})
        await asyncio.wait_for(done.wait(), PATIENCE_S)
        await client.close()

        assert attempts == [1, 1]

    # ---- faults -----------------------------------------------------------------------------------------------

    @pytest.mark.requirement("W-56", "X-49")
    async def test_health_is_an_answer_and_never_an_error(self, harness: TransportHarness) -> None:
        client = MessagingClient(harness.make(), policy=quick_policy(), health_timeout=5_000)

        assert await client.is_healthy()
        await client.close()
        assert not await client.is_healthy()

    @pytest.mark.requirement("W-6", "W-34", "W-55", "W-56", "S-3")
    async def test_after_an_outage_work_goes_on_by_itself(self, harness: TransportHarness, source: str) -> None:
        """Nothing is raised at the consumer, health tells, publishing fails in time, and nothing confirmed is lost."""
        transport = harness.make()
        client = MessagingClient(transport, policy=quick_policy(), concurrency=2)
        hasty = MessagingClient(transport, policy=quick_policy(), publish_deadline=500, health_timeout=1_000)
        handled: list[str] = []
        came = asyncio.Semaphore(0)

        async def handle(delivery: Delivery) -> None:
            handled.append(delivery.urn)
            came.release()

        await client.consume(source, handle)
        await client.produce(source, "paid", {"urn": "urn:before"})
        await asyncio.wait_for(came.acquire(), PATIENCE_S)

        async with harness.outage():
            assert not await hasty.is_healthy()
            with pytest.raises(PublishFailed, match=f"^Failed to add job to queue {source}: ") as failure:
                await hasty.produce(source, "paid", {"urn": "urn:during"})
            assert failure.value.__cause__ is not None

        async with asyncio.timeout(PATIENCE_S):
            while not await client.is_healthy():  # noqa: ASYNC110 - nobody tells when a broker is back
                await asyncio.sleep(0.05)
            while True:  # a broker that answers pings may not take messages yet
                try:
                    await client.produce(source, "paid", {"urn": "urn:after"})
                    break
                except PublishFailed:
                    await asyncio.sleep(0.05)
            while "urn:after" not in handled:
                await came.acquire()
        await client.close()

    async def test_depth_counts_what_waits(self, transport: Transport[Any], source: str) -> None:
        for number in range(3):
            await transport.publish(an_event(source, number))
        deliveries = await transport.deliveries(source, prefetch=1)
        delivery = await take(deliveries)

        depth = await transport.depth(source)

        assert depth.messages == 3
        assert depth.consumers is None or depth.consumers <= 1  # a consumer that never idled may not be listed yet
        await transport.settle(delivery, DONE)
        for _ in range(2):
            await transport.settle(await take(deliveries), DONE)
        await nothing_waits(transport, source)

    async def test_stopping_ends_the_iteration_and_not_the_settling(
        self, transport: Transport[Any], source: str
    ) -> None:
        await transport.publish(an_event(source))
        deliveries = await transport.deliveries(source, prefetch=1)
        delivery = await take(deliveries)
        waiting = asyncio.create_task(anext(deliveries, None))

        await deliveries.stop()

        assert await asyncio.wait_for(waiting, PATIENCE_S) is None
        await deliveries.stop()
        await transport.settle(delivery, DONE)
        await nothing_waits(transport, source)

    async def test_closing_twice_is_harmless(self, harness: TransportHarness, source: str) -> None:
        transport = harness.make()
        await transport.publish(an_event(source))

        await transport.aclose()
        await transport.aclose()

        with pytest.raises(ConnectionLost):
            await transport.publish(an_event(source))
