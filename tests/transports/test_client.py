"""The messaging client: what it refuses, says and does, whatever the transport. On memory, which is quick."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from bullpen._kernel.backoff import Backoff
from bullpen._kernel.outcome import Outcome
from bullpen._kernel.policy import DeadLetterPolicy, RetryPolicy
from bullpen.errors import (
    ConnectionLost,
    HandlerTimeout,
    InvalidOption,
    PermanentError,
    PublishFailed,
    ServerRefused,
    WaitForChildren,
)
from bullpen.plugins.messaging import MessagingClient
from bullpen.plugins.metrics import MessagingMetrics
from bullpen.plugins.transports.bullmq import BullMQClient
from bullpen.plugins.transports.kafka import KafkaClient
from bullpen.plugins.transports.memory import MemoryBroker, MemoryClient, MemoryTransport
from bullpen.plugins.transports.rabbitmq import RabbitMQClient
from bullpen.ports.messaging import EventData
from bullpen.ports.transport import Delivery, Event, Published, Settled, TransportHealth
from bullpen.testing.contracts.transport import quick_policy
from tests.transports._listening import PATIENCE_S, lines, listening

URN: EventData = {"urn": "urn:order:1"}


@pytest.fixture
async def client() -> AsyncIterator[MemoryClient]:
    made = MemoryClient(policy=quick_policy(3, 1))
    yield made
    await made.close(0)


async def no_op(delivery: Delivery) -> None:
    """A handler that succeeds."""


# ---- producing ---------------------------------------------------------------------------------------------------


@pytest.mark.requirement("W-28")
@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ({}, "data.urn"),
        ({"urn": ""}, "data.urn"),
        ({"urn": 5}, "data.urn"),
        ({"urn": "u", "playload": 1}, "data.playload: expected only urn and payload"),
        ("urn:order:1", "data: expected"),
    ],
)
async def test_data_of_another_shape_is_refused_before_the_broker_is_touched(
    client: MemoryClient, data: Any, complaint: str
) -> None:
    with pytest.raises(InvalidOption, match=complaint):
        await client.produce("orders", "paid", data)

    assert (await client.transport.depth("orders")).messages == 0


async def test_an_unknown_option_names_the_nearest(client: MemoryClient) -> None:
    with pytest.raises(InvalidOption, match="did you mean 'attempts'"):
        await client.produce("orders", "paid", URN, attemps=3)  # type: ignore[call-arg]  # that is the point


@pytest.mark.parametrize("name", ["", None, 5])
async def test_an_event_needs_a_name(client: MemoryClient, name: Any) -> None:
    with pytest.raises(InvalidOption, match="name"):
        await client.produce("orders", name, URN)


@pytest.mark.requirement("W-31", "X-44", "X-45")
async def test_ids_are_unique_and_tell_what_they_are_about(client: MemoryClient) -> None:
    """Milliseconds are not unique: five hundred produced at once must be five hundred jobs."""
    results = await client.produce_many("orders", [("paid", URN)] * 500)

    ids = {result.id for result in results if isinstance(result, Published)}
    assert len(ids) == 500
    assert all(one.startswith("paid~urn%3Aorder%3A1~") for one in ids)
    assert (await client.transport.depth("orders")).messages == 500


@pytest.mark.requirement("W-31", "X-44")
async def test_an_idempotency_key_makes_the_id(client: MemoryClient) -> None:
    """So that a producer which does not know whether it sent can send again."""
    first = await client.produce("orders", "paid", URN, idempotency_key="invoice-7")
    again = await client.produce("orders", "paid", URN, idempotency_key="invoice-7")
    other = await client.produce("orders", "paid", URN, idempotency_key="invoice-8")

    assert first.id == again.id == "paid~urn%3Aorder%3A1~invoice-7"
    assert other.id != first.id
    assert (await client.transport.depth("orders")).messages == 2


@pytest.mark.requirement("W-33", "X-24")
async def test_a_sent_event_is_logged(client: MemoryClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    receipt = await client.produce("orders", "paid", URN, idempotency_key="invoice-7")

    (line,) = lines(caplog.records, "Job added to queue")
    assert (line["queue"], line["jobId"], line["urn"]) == ("orders", receipt.id, "urn:order:1")


@pytest.mark.parametrize("kind", ["memory", "bullmq"])
async def test_an_event_that_was_sent_before_leaves_a_trace(
    kind: str, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing was added: a line that says so would send somebody on a search."""
    caplog.set_level(logging.INFO)
    client: MessagingClient[Any] = MemoryClient() if kind == "memory" else BullMQClient(redis_url)
    metrics = MessagingMetrics()
    for _ in range(2):
        receipt = await client.produce("orders", "paid", URN, idempotency_key="invoice-7")
    counted = {metric.name: metric for metric in await metrics.collect()}["queue_message_deduplicated_total"]
    metrics.close()
    await client.close()

    assert len(lines(caplog.records, "Job added to queue")) == 1
    (line,) = lines(caplog.records, "Job was added before, nothing was added to queue")
    assert (line["queue"], line["jobId"]) == ("orders", receipt.id)
    assert [sample.value for sample in counted.samples] == [1]


async def test_a_batch_of_events_is_one_line(client: MemoryClient, caplog: pytest.LogCaptureFixture) -> None:
    """A line for each of ten thousand messages hides everything else."""
    caplog.set_level(logging.INFO)

    await client.produce_many("orders", [("paid", URN)] * 50)

    (line,) = [record for record in caplog.records if "added to queue" in record.getMessage()]
    assert line.getMessage() == "50 jobs added to queue"
    assert (vars(line)["queue"], vars(line)["count"]) == ("orders", 50)


async def test_what_is_not_taken_of_a_batch_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    client = MessagingClient(Stubborn(ServerRefused("queue is full"), times=3))

    await client.produce_many("orders", [("paid", URN)] * 20)
    await client.close()

    said = [record.getMessage() for record in caplog.records if record.name == "bullpen.messaging"]
    assert said[0] == "17 jobs added to queue"
    assert said[1].startswith("3 of 20 jobs were not added to queue, the first: ")
    assert "queue is full" in said[1]
    assert len(said) == 2


class Stubborn(MemoryTransport):
    """Fails to publish as often as it is told, with the given error."""

    def __init__(self, error: Exception, times: int) -> None:
        super().__init__()
        self.error, self.times, self.calls = error, times, 0

    async def publish(self, event: Event, *, delay_ms: int = 0) -> Published:
        self.calls += 1
        if self.calls <= self.times:
            raise self.error
        return await super().publish(event, delay_ms=delay_ms)


@pytest.mark.requirement("W-34")
async def test_a_failed_send_is_logged_and_raised_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    cause = ServerRefused("no queue takes it")
    client = MessagingClient(Stubborn(cause, 1))

    with pytest.raises(PublishFailed) as failure:
        await client.produce("orders", "paid", URN)

    assert str(failure.value) == "Failed to add job to queue orders: no queue takes it"
    assert failure.value.__cause__ is cause
    assert lines(caplog.records, "Failed to add job to queue orders: no queue takes it")


@pytest.mark.requirement("S-8")
async def test_a_broker_that_is_away_for_a_moment_is_tried_again() -> None:
    transport = Stubborn(ConnectionLost("away"), 2)
    client = MessagingClient(transport, publish_deadline=5_000)

    receipt = await client.produce("orders", "paid", URN)

    assert transport.calls == 3
    assert receipt.id


@pytest.mark.requirement("S-8", "W-34")
async def test_a_broker_that_stays_away_is_given_up_at_the_deadline() -> None:
    client = MessagingClient(Stubborn(ConnectionLost("away"), 10**6), publish_deadline=100)

    with pytest.raises(PublishFailed, match="Failed to add job to queue orders: away"):
        await client.produce("orders", "paid", URN)


async def test_a_broker_that_does_not_answer_is_given_up_at_the_deadline() -> None:
    class Silent(MemoryTransport):
        async def publish(self, event: Event, *, delay_ms: int = 0) -> Published:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    client = MessagingClient(Silent(), publish_deadline=50)

    with pytest.raises(PublishFailed, match=r"no answer within 0\.05 s; it may have arrived"):
        await client.produce("orders", "paid", URN)


@pytest.mark.requirement("S-8")
async def test_a_batch_has_one_result_per_message() -> None:
    """One that is refused must not hide what became of the others."""
    client = MessagingClient(Stubborn(ServerRefused("full"), 1))

    results = await client.produce_many("orders", [("paid", {"urn": f"urn:{number}"}) for number in range(3)])

    assert [isinstance(result, PublishFailed) for result in results] == [True, False, False]


class Paid(msgspec.Struct):
    amount: int


@pytest.mark.requirement("S-5", "S-22", "W-73")
async def test_a_payload_against_its_schema_is_refused_and_never_handled() -> None:
    broker = MemoryBroker()
    strict = MemoryClient(broker, schemas={"paid": Paid}, policy=quick_policy(3, 1))
    lax = MemoryClient(broker)

    with pytest.raises(InvalidOption, match=r"data\.payload: expected what the schema of 'paid' says .*amount"):
        await strict.produce("orders", "paid", {"urn": "urn:1", "payload": {"amount": "five"}})
    await lax.produce("orders", "paid", {"urn": "urn:1", "payload": {"amount": "five"}})
    with listening() as heard:
        await strict.consume("orders", no_op)
        settled = await heard.wait("delivery.settled")

    assert settled["outcome"] == "failed"
    (letter,) = await strict.transport.dead_letters("orders").list()
    assert letter.cause == "bad_data"
    assert "amount" in letter.error_message
    await strict.close()
    await lax.close()


async def test_headers_without_a_value_are_left_out(client: MemoryClient) -> None:
    headers: Any = {"correlationId": "c", "tenantId": None}

    event = client.event("orders", "paid", URN, headers=headers)

    assert event.headers == {"correlationId": "c"}
    with pytest.raises(InvalidOption, match="headers"):
        client.event("orders", "paid", URN, headers={"n": 5})  # type: ignore[dict-item]  # the mistake under test


# ---- consuming ---------------------------------------------------------------------------------------------------


@pytest.mark.requirement("W-35", "W-37", "W-49")
async def test_success_is_logged_from_start_to_end(client: MemoryClient, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with listening() as heard:
        consumer = await client.consume("orders", no_op)
        receipt = await client.produce("orders", "paid", URN)
        await heard.wait("delivery.settled")

    assert consumer.queue == "orders"
    (started,) = lines(caplog.records, "Worker initialized for queue")
    assert started["queue"] == "orders"
    for text in ("Processing job", "Job processed successfully"):
        (line,) = lines(caplog.records, text)
        assert (line["jobId"], line["queue"], line["urn"]) == (receipt.id, "orders", "urn:order:1")


@pytest.mark.requirement("W-37", "W-39", "W-45")
async def test_failure_is_logged_to_its_end(client: MemoryClient, caplog: pytest.LogCaptureFixture) -> None:
    """Three failures, one of them final, and one dead letter."""

    async def fail(delivery: Delivery) -> None:
        raise OSError("partner away")

    with listening() as heard:
        await client.consume("orders", fail)
        receipt = await client.produce("orders", "paid", URN)
        await heard.wait("dead_letter.written")

    failures = lines(caplog.records, "Job processing failed: partner away")
    assert [(line["jobId"], line["urn"], line["attemptsMade"]) for line in failures] == [
        (receipt.id, "urn:order:1", number) for number in range(3)
    ]
    levels = [record.levelname for record in caplog.records if "Job processing failed" in record.getMessage()]
    assert levels == ["WARNING", "WARNING", "ERROR"]
    assert failures[0]["exc_info"] is None
    assert failures[2]["exc_info"][0] is OSError
    assert len(lines(caplog.records, "Job exceeded retry limit")) == 1
    (sent,) = lines(caplog.records, "Job sent to DLQ")
    assert (sent["jobId"], sent["dlq"]) == (receipt.id, "orders-dlq")


@pytest.mark.requirement("W-39")
async def test_a_permanent_failure_does_not_exceed_the_retry_limit(
    client: MemoryClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever reads that raises the limit, in vain."""

    async def refuse(delivery: Delivery) -> None:
        raise PermanentError("no such order")

    with listening() as heard:
        await client.consume("orders", refuse)
        await client.produce("orders", "paid", URN)
        await heard.wait("dead_letter.written")

    assert lines(caplog.records, "Job exceeded retry limit") == []
    (line,) = lines(caplog.records, "Job processing failed: no such order")
    assert (line["levelname"], line["cause"]) == ("ERROR", "permanent")


@pytest.mark.requirement("W-45")
async def test_a_dead_letter_that_cannot_be_written_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    class Forgetful(MemoryTransport):
        async def settle(self, delivery: Delivery, outcome: Outcome) -> Settled:
            await super().settle(delivery, outcome)
            return Settled(dead_letter_problem="disk full")

    client = MessagingClient(Forgetful(), policy=quick_policy(1))

    async def refuse(delivery: Delivery) -> None:
        raise PermanentError("no")

    with listening() as heard:
        await client.consume("orders", refuse)
        await client.produce("orders", "paid", URN)
        await client.produce("orders", "paid", URN)
        await heard.wait("dead_letter.unwritten", 2)

    assert len(lines(caplog.records, "Failed to send job to DLQ: disk full")) == 2
    await client.close()


@pytest.mark.requirement("X-47")
async def test_a_second_consumer_of_a_queue_is_refused(client: MemoryClient) -> None:
    """Each would get a random half, and the first would be lost to shutdown."""
    consumer = await client.consume("orders", no_op)

    with pytest.raises(InvalidOption, match="has one for 'orders'"):
        await client.consume("orders", no_op)

    await consumer.close()
    await client.consume("orders", no_op)


@pytest.mark.requirement("W-36", "W-63")
async def test_the_concurrency_of_a_queue_wins_over_the_clients() -> None:
    client = MemoryClient(policy=quick_policy(), concurrency=2)
    peak = {"orders": 0, "mails": 0}
    everyone = {"orders": asyncio.Barrier(2), "mails": asyncio.Barrier(4)}

    async def handle(delivery: Delivery) -> None:
        await asyncio.wait_for(everyone[delivery.source].wait(), PATIENCE_S)

    with listening() as heard:
        default = await client.consume("orders", handle)
        own = await client.consume("mails", handle, concurrency=4)
        for queue, count in (("orders", 4), ("mails", 4)):
            await client.produce_many(queue, [("paid", {"urn": f"urn:{number}"}) for number in range(count)])
        await heard.wait("delivery.settled", 8)
        for fields in heard.of("delivery.received"):
            peak[fields["source"]] = max(peak[fields["source"]], fields["running"])

    assert (default.concurrency, own.concurrency) == (2, 4)
    assert peak == {"orders": 2, "mails": 4}
    await client.close()


@pytest.mark.parametrize(("option", "value"), [("concurrency", 0), ("concurrency", 2.5), ("timeout", -1)])
async def test_wrong_options_of_a_consumer_are_refused(client: MemoryClient, option: str, value: Any) -> None:
    with pytest.raises(InvalidOption, match=option):
        await client.consume("orders", no_op, **{option: value})


async def test_a_plain_function_runs_in_a_thread(client: MemoryClient) -> None:
    threads: list[int] = []

    def handle(delivery: Delivery) -> None:
        threads.append(threading.get_ident())

    with listening() as heard:
        await client.consume("orders", handle)
        await client.produce("orders", "paid", URN)
        assert (await heard.wait("delivery.settled"))["outcome"] == "completed"

    assert threads != [threading.get_ident()]


async def test_a_handler_that_takes_too_long_has_failed(client: MemoryClient) -> None:
    async def hang(delivery: Delivery) -> None:
        await asyncio.Event().wait()

    with listening() as heard:
        await client.consume("orders", hang, timeout=20)
        await client.produce("orders", "paid", URN, attempts=1)
        await heard.wait("dead_letter.written")

    (letter,) = await client.transport.dead_letters("orders").list()
    assert letter.error_message == "timed out after 20 ms"
    assert issubclass(HandlerTimeout, TimeoutError)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TimeoutError("partner slow"), "partner slow"),
        (asyncio.CancelledError(), "CancelledError"),
        (SystemExit(3), "3"),
        (WaitForChildren(), "waiting for other jobs is impossible on Memory"),
    ],
)
async def test_whatever_a_handler_raises_is_its_failure(
    client: MemoryClient, error: BaseException, reason: str
) -> None:
    """Nothing that one handler does may end the consumer."""

    async def fail(delivery: Delivery) -> None:
        raise error

    with listening() as heard:
        consumer = await client.consume("orders", fail)
        await client.produce("orders", "paid", URN, attempts=1)
        await heard.wait("dead_letter.written")

    (letter,) = await client.transport.dead_letters("orders").list()
    assert letter.error_message == reason
    assert consumer.is_alive


async def test_a_value_that_is_no_json_is_dropped_where_nobody_could_read_it(client: MemoryClient) -> None:
    async def handle(delivery: Delivery) -> object:
        return object()

    with listening() as heard:
        await client.consume("orders", handle)
        await client.produce("orders", "paid", URN)
        assert (await heard.wait("delivery.settled"))["outcome"] == "completed"


async def test_a_lost_delivery_stops_its_handler(client: MemoryClient) -> None:
    """Another process may have it by now; two must not do the same work."""
    transport = client.transport
    assert isinstance(transport, MemoryTransport)
    entered, cancelled = asyncio.Event(), asyncio.Event()

    async def handle(delivery: Delivery) -> None:
        if delivery.is_redelivered:
            return
        entered.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    with listening() as heard:
        await client.consume("orders", handle)
        await client.produce("orders", "paid", URN)
        await asyncio.wait_for(entered.wait(), PATIENCE_S)
        transport.give_back()
        await heard.wait("delivery.settled")

    assert cancelled.is_set()
    assert len(heard.of("delivery.lost")) == 1
    assert [fields["attempt"] for fields in heard.of("delivery.received")] == [1, 1]
    assert heard.of("delivery.received")[1]["is_redelivered"]


@pytest.mark.requirement("W-56")
async def test_a_consumer_that_cannot_go_on_makes_the_client_ill(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(MemoryTransport):
        async def deliveries(self, source: str, *, prefetch: int, ordered: bool = False) -> Any:
            inner = await super().deliveries(source, prefetch=prefetch, ordered=ordered)

            async def fail() -> Delivery:
                raise RuntimeError("protocol broken")

            inner.__class__ = type("Breaking", (inner.__class__,), {"__anext__": lambda self: fail()})
            return inner

    client = MessagingClient(Broken())
    with listening() as heard:
        consumer = await client.consume("orders", no_op)
        await heard.wait("consumer.stopped")

    assert not consumer.is_alive
    assert not await client.is_healthy()
    assert lines(caplog.records, "Memory health check failed: the consumer of 'orders' ended: protocol broken")
    await client.close()


@pytest.mark.requirement("X-5")
@pytest.mark.parametrize(
    "make",
    [
        MemoryClient,
        partial(BullMQClient, "redis://localhost:1"),
        partial(KafkaClient, "localhost:1", workflow="order"),
        partial(RabbitMQClient, "amqp://localhost:1"),
    ],
    ids=["memory", "bullmq", "kafka", "rabbitmq"],
)
async def test_the_policy_of_a_client_says_where_its_dead_letters_go(
    make: Callable[..., MessagingClient[Any]],
) -> None:
    """Every client hands it to its transport."""
    named = make(policy=RetryPolicy(dead_letters=DeadLetterPolicy(store="queue", suffix="-graves")))
    none = make(policy=RetryPolicy(dead_letters=DeadLetterPolicy(store="none")))

    assert named.transport.dead_letters("orders").name == "orders-graves"
    with pytest.raises(InvalidOption, match="dead_letters"):
        none.transport.dead_letters("orders")
    await named.close()
    await none.close()


@pytest.mark.requirement("S-27")
async def test_a_client_has_its_own_patience_with_running_handlers() -> None:
    """What does not end within `close_timeout` is given back; nobody said anything at the close itself."""
    client = MemoryClient(close_timeout=50)
    began = asyncio.Event()

    async def handle(_: Delivery) -> None:
        began.set()
        await asyncio.Event().wait()

    await client.consume("orders", handle)
    await client.produce("orders", "paid", {"urn": "urn:1"})
    await began.wait()

    async with asyncio.timeout(PATIENCE_S):
        await client.close()


@pytest.mark.requirement("W-56", "X-49")
async def test_a_broker_that_does_not_answer_in_time_is_ill(caplog: pytest.LogCaptureFixture) -> None:
    class Silent(MemoryTransport):
        async def check(self) -> TransportHealth:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    client = MessagingClient(Silent(), health_timeout=20)

    assert not await client.is_healthy()
    assert lines(caplog.records, "Memory health check failed: no answer within 20 ms")
    await client.close()


async def test_a_check_that_raises_is_an_answer_too(caplog: pytest.LogCaptureFixture) -> None:
    class Raising(MemoryTransport):
        async def check(self) -> TransportHealth:
            raise ValueError("what?")

    client = MessagingClient(Raising())

    assert not await client.is_healthy()
    assert lines(caplog.records, "Memory health check failed: what?")
    await client.close()


async def test_a_closed_client_says_so(client: MemoryClient) -> None:
    await client.close()

    with pytest.raises(ConnectionLost, match="Memory client was closed"):
        await client.produce("orders", "paid", URN)
    with pytest.raises(ConnectionLost, match="Memory client was closed"):
        await client.consume("orders", no_op)


async def test_a_thread_that_does_not_end_keeps_its_slot_until_it_does() -> None:
    """Nobody can stop a thread; giving its message back would run it twice at the same time."""
    client = MemoryClient(policy=quick_policy())
    entered, release = threading.Event(), threading.Event()

    def handle(delivery: Delivery) -> None:
        entered.set()
        release.wait(PATIENCE_S)

    await client.consume("orders", handle)
    await client.produce("orders", "paid", URN)
    await asyncio.to_thread(entered.wait, PATIENCE_S)
    closing = asyncio.create_task(client.close(0))
    await asyncio.sleep(0)
    release.set()
    await closing


# ---- telemetry ---------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S-9", "S-32", "S-33", "S-34", "S-35", "W-68")
async def test_everything_a_metric_needs_is_told_once(client: MemoryClient) -> None:
    """Publish and consume times, acks, nacks, redeliveries, waiting time, utilisation, depth: from events alone."""

    async def once(delivery: Delivery) -> None:
        if delivery.attempt == 1:
            raise OSError("away")

    with listening() as heard:
        await client.consume("orders", once)
        receipt = await client.produce("orders", "paid", URN)
        await heard.wait("delivery.settled", 2)
        await client.sample()

    (published,) = heard.of("transport.published")
    assert (published["transport"], published["source"], published["id"]) == ("memory", "orders", receipt.id)
    assert published["duration_s"] >= 0
    first, second = heard.of("delivery.received")
    assert (first["is_redelivered"], second["is_redelivered"]) == (False, True)
    assert first["wait_s"] >= 0
    failed, done = heard.of("delivery.settled")
    assert (failed["outcome"], failed["is_acked"], failed["attempt"]) == ("retry", False, 1)
    assert (done["outcome"], done["is_acked"], done["attempt"]) == ("completed", True, 2)
    assert done["duration_s"] >= 0
    assert (done["running"], done["concurrency"]) == (1, 1)
    (depth,) = heard.of("transport.depth")
    assert (depth["messages"], depth["consumers"], depth["dead_letters"]) == (0, 1, 0)
    assert (depth["running"], depth["concurrency"]) == (0, 1)
    assert heard.of("transport.checked")[0]["is_connected"]


async def test_sampling_without_a_dead_letter_queue_tells_none() -> None:
    client = MemoryClient(
        policy=RetryPolicy(attempts=1, backoff=Backoff.fixed(1), dead_letters=DeadLetterPolicy(store="none"))
    )
    with listening() as heard:
        await client.consume("orders", no_op)
        await client.sample()

    assert heard.of("transport.depth")[0]["dead_letters"] is None
    await client.close()


@pytest.mark.parametrize("kind", ["memory", "bullmq"])
async def test_a_policy_changes_only_what_it_names(kind: str, redis_url: str, queue_name: str) -> None:
    policy = RetryPolicy(attempts=1)
    client: MessagingClient[Any] = (
        MemoryClient(policy=policy) if kind == "memory" else BullMQClient(redis_url, policy=policy)
    )

    async def fail(delivery: Delivery) -> None:
        raise ConnectionError("away")

    with listening() as heard:
        await client.consume(queue_name, fail)
        await client.produce(queue_name, "paid", {"urn": "urn:1"})
        await heard.wait("delivery.settled")

    assert await client.transport.dead_letters(queue_name).depth() == 1
    assert client.policy.backoff == Backoff.exponential(30_000)
    await client.close()
