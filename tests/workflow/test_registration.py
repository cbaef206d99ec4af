"""Workflows are registered with one transport, found by name and type, and run by their app."""

from __future__ import annotations

import logging
import subprocess
import sys
from typing import Any

import pytest

from bullpen.app import Bullpen
from bullpen.errors import DoubtfulDefinition, InvalidOption, NotConfigured
from bullpen.plugins.transports.bullmq import BullMQClient
from bullpen.plugins.transports.memory import MemoryClient
from bullpen.ports.bindings import (
    AnyEvent,
    AnyTransport,
    BullMQ,
    BullMQEvent,
    DefaultJobOptions,
    Kafka,
    KafkaEvent,
    RabbitMQ,
)
from bullpen.settings import Settings
from bullpen.workflow.actions import on_event
from bullpen.workflow.service import Workflow
from tests.transports._listening import lines, listening
from tests.workflow.kit import Event, Order, OrderDefinition, OrderTransition, Shelf, Status, define, transitions

PAID = BullMQEvent(queue="orders", event=Event.PAY)
TWO = "Cannot enable both Kafka and BullMQ simultaneously"


def make_app(transport: str = "memory", redis_url: str = "redis://localhost:1") -> Bullpen:
    return Bullpen(settings=Settings.load(environ={}, workflows_transport=transport, redis_url=redis_url))


def neutral(queue: str = "orders") -> AnyTransport[Event]:
    return AnyTransport(events=[AnyEvent(source=queue, event=Event.PAY)])


# ---- one transport -------------------------------------------------------------------------------------------------


@pytest.mark.requirement("W-26", "W-51", "W-60", "X-15")
@pytest.mark.parametrize(
    ("definition", "registered"),
    [
        ({"bullmq": BullMQ(events=[PAID]), "kafka": Kafka()}, {}),
        ({"bullmq": BullMQ(events=[PAID])}, {"kafka": Kafka()}),
        ({}, {"bullmq": BullMQ(events=[PAID]), "kafka": Kafka()}),
    ],
)
def test_two_transports_for_one_workflow_are_refused(definition: Any, registered: Any) -> None:
    with pytest.raises(InvalidOption) as refused:
        make_app().workflow(define(**definition), **registered)

    assert str(refused.value) == TWO


@pytest.mark.requirement("W-50", "W-51", "W-60", "X-15")
@pytest.mark.parametrize(
    ("definition", "registered"),
    [
        ({}, {"kafka": {"enabled": True}, "bullmq": {"enabled": True}}),
        ({"kafka": Kafka(events=[KafkaEvent(topic="orders", event=Event.PAY)])}, {"bullmq": {"enabled": True}}),
        ({"bullmq": BullMQ(events=[PAID])}, {"kafka": {"enabled": True}}),
    ],
)
def test_registering_both_is_refused_over_definition_and_registration(definition: Any, registered: Any) -> None:
    with pytest.raises(InvalidOption) as refused:
        make_app().register("order", define(**definition), **registered)

    assert str(refused.value) == TWO


@pytest.mark.requirement("X-15")
async def test_two_workflows_of_one_app_may_differ() -> None:
    """A process that consumes from Redis may still have a workflow on another transport."""
    app = make_app()

    redis = app.workflow(define(name="redis"), bullmq=BullMQ(events=[PAID]))
    memory = app.workflow(define(name="memory"), events=neutral())

    assert isinstance(redis.client, BullMQClient) and isinstance(memory.client, MemoryClient)
    await app.aclose()


@pytest.mark.requirement("W-50", "W-60")
async def test_registration_completes_what_the_definition_says() -> None:
    app = make_app()
    bullmq = app.register(
        "a",
        define(bullmq=BullMQ(events=[PAID])),
        bullmq={
            "enabled": True,
            "config": {
                "connection": {"host": "redis.example", "port": 6380},
                "default_job_options": {"attempts": 5},
                "dead_letter_queue": {"enabled": False},
                "concurrency": 7,
            },
        },
    )
    kafka = app.register(
        "b",
        define(kafka=Kafka(events=[KafkaEvent(topic="orders", event=Event.PAY)])),
        kafka={"enabled": True, "client_id": "shop", "brokers": "k1:9092,k2:9092"},
    )

    assert isinstance(bullmq.binding, BullMQ) and isinstance(kafka.binding, Kafka)
    assert (bullmq.binding.policy().attempts, bullmq.binding.concurrency) == (5, 7)
    assert (bullmq.binding.connection.host, bullmq.binding.events) == ("redis.example", [PAID])  # type: ignore[union-attr]  # it is an address
    assert (kafka.binding.client_id, kafka.binding.broker_list()) == ("shop", ["k1:9092", "k2:9092"])
    await app.aclose()


@pytest.mark.requirement("W-50", "W-60")
@pytest.mark.parametrize("where", ["in both", "in the configuration", "in the definition"])
async def test_the_configuration_may_be_a_whole_binding(where: str) -> None:
    """Its shape suggests it: `{"enabled": True, "config": definition.bullmq}` was an error about a record."""
    app, shelf = make_app(), Shelf()
    whole = BullMQ[Event](events=[PAID], concurrency=7, default_job_options=DefaultJobOptions(attempts=5))
    definition = define(shelf, bullmq=None if where == "in the configuration" else whole)
    config = {
        "in both": definition.bullmq,
        "in the configuration": whole,
        "in the definition": None,
    }[where]

    workflow = app.register("order", definition, bullmq={"enabled": True, "config": config})

    assert isinstance(workflow.binding, BullMQ)
    assert (workflow.binding.concurrency, workflow.binding.events) == (7, [PAID])
    assert workflow.binding.policy().attempts == 5
    assert workflow.client is not None
    await app.aclose()


async def test_a_binding_without_events_completes_that_of_the_definition() -> None:
    app = make_app()

    workflow = app.register(
        "order", define(bullmq=BullMQ(events=[PAID])), bullmq={"enabled": True, "config": BullMQ(concurrency=9)}
    )

    assert workflow.binding is not None
    assert (workflow.binding.concurrency, workflow.binding.events) == (9, [PAID])
    await app.aclose()


def test_two_sets_of_events_are_refused() -> None:
    other = BullMQ[Event](events=[BullMQEvent(queue="others", event=Event.PAY)])

    with pytest.raises(InvalidOption, match="those of the definition, or none"):
        make_app().register("order", define(bullmq=BullMQ(events=[PAID])), bullmq={"enabled": True, "config": other})


@pytest.mark.requirement("W-25", "W-60")
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"bullmq": {"enabled": True, "config": "redis://x"}}, r"bullmq.config: expected a mapping"),
        ({"bullmq": {"enabled": True, "config": {"conection": "redis://x"}}}, r"bullmq.config.conection"),
        ({"bullmq": {"enabled": True, "configuration": {}}}, "bullmq.configuration"),
        ({"kafka": {"enabled": True, "topic": "x"}}, "kafka.topic"),
        ({"bullmq": {"enabled": True, "config": {"default_job_options": {"attempts": 0}}}}, "attempts"),
        ({"bullmq": {"enabled": True, "config": {"connection": {"hots": "x"}}}}, "connection.hots"),
    ],
)
def test_a_wrong_registration_is_refused_at_once(options: Any, complaint: str) -> None:
    with pytest.raises(InvalidOption, match=complaint):
        make_app().register("order", define(), **options)


@pytest.mark.requirement("W-46", "X-56")
async def test_events_without_an_enabled_client_warn_and_are_not_healthy(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app()
    workflow = app.register("order", define(bullmq=BullMQ(events=[PAID])), bullmq={"enabled": False})

    await workflow.start()

    assert lines(caplog.records, "BullMQ client not available, skipping worker initialization.")
    assert workflow.client is None and not await workflow.is_healthy()
    assert workflow.problem is not None
    with pytest.raises(NotConfigured, match="has no transport"):
        await workflow.send(Event.PAY, "urn:1")
    await app.aclose()


@pytest.mark.requirement("W-46")
async def test_without_any_transport_a_workflow_is_driven_by_emit(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    shelf = Shelf()
    shelf.put()
    workflow = make_app().workflow(define(shelf))

    await workflow.start()
    order = await workflow.emit(Event.PAY, "urn:1")

    assert lines(caplog.records, "No BullMQ events defined.")
    assert (order.status, await workflow.is_healthy()) == (Status.PAID, True)
    await workflow.close()


ONLY_ITS_DRIVER = """
import sys
sys.modules["aiokafka"] = sys.modules["aio_pika"] = None  # as if not installed
from bullpen.app import Bullpen
from bullpen.workflow import *
app = Bullpen("redis://localhost:1")
definition = Definition(
    name="x", states=States(failed="f", idles=["a"]), transitions=[Transition(event="e", from_="a", to="a")],
    entity=InlineEntities(new=dict, load=dict, update=dict, status=str, urn=str),
)
app.workflow(definition, bullmq=BullMQ(events=[BullMQEvent(queue="q", event="e")]))
try:
    app.workflow(definition, name="y", kafka=Kafka(events=[KafkaEvent(topic="q", event="e")]))
except ImportError as error:
    print(error)
print(sorted(name for name in sys.modules if name.split(".")[0] in ("aiokafka", "aio_pika") and sys.modules[name]))
"""


@pytest.mark.requirement("W-52")
def test_only_the_driver_in_use_is_needed() -> None:
    answer = subprocess.run([sys.executable, "-c", ONLY_ITS_DRIVER], capture_output=True, text=True, check=False)

    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.splitlines()[0].endswith('pip install "bullpen-mq[kafka]"')
    assert answer.stdout.splitlines()[1:] == ["[]"]


# ---- one setting ---------------------------------------------------------------------------------------------------


@pytest.mark.requirement("W-1")
@pytest.mark.parametrize(
    ("transport", "kind"), [("bullmq", BullMQ), ("kafka", Kafka), ("rabbitmq", RabbitMQ), ("memory", None)]
)
async def test_one_setting_chooses_the_transport(transport: str, kind: Any) -> None:
    app = make_app(transport)
    binding = AnyTransport(
        events=[AnyEvent(source="orders", event=Event.PAY, job_name="pay")], concurrency={"orders": 4}
    )

    workflow = app.workflow(define(events=binding))

    assert workflow.binding is not None
    (mapped,) = workflow.binding.events
    assert (mapped.source, mapped.job_name, mapped.event) == ("orders", "pay", Event.PAY)
    assert workflow.binding.concurrency_of("orders") == 4
    assert kind is None or isinstance(workflow.binding, kind)
    await app.aclose()


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(InvalidOption, match="BULLPEN_TRANSPORT"):
        Settings.load(environ={"BULLPEN_TRANSPORT": "pigeon"})
    with pytest.raises(InvalidOption, match="'bullmq', 'rabbitmq', 'kafka' or 'memory'"):
        neutral().on("pigeon")


# ---- by name and by type -------------------------------------------------------------------------------------------


class Orders(Workflow[Order, Any, Event, Status]):
    """A service of its own."""

    async def pay(self, urn: str) -> Order:
        return await self.emit(Event.PAY, urn)


@pytest.mark.requirement("W-53", "X-57", "W-60")
async def test_workflows_are_found_by_name_and_by_type_and_never_confused() -> None:
    app, shelf = make_app(), Shelf()
    shelf.put()
    orders = app.workflow(define(shelf), service=Orders, events=neutral())

    assert app.get("order") is orders
    assert app.get(Orders) is orders
    assert app.get(Workflow) is orders
    assert app.get(MemoryClient) is orders.client
    assert (await app.get(Orders).pay("urn:1")).status == Status.PAID
    refunds = app.workflow(define(name="refund"))
    with pytest.raises(NotConfigured, match="Workflow is not clear, there are several: order, refund; ask by name"):
        app.get(Workflow)
    assert app.get("refund") is refunds and app.get(Orders) is orders
    assert [each.name for each in app.workflows.all] == ["order", "refund"]
    await app.aclose()


@pytest.mark.requirement("X-57")
def test_a_name_is_needed_and_is_given_once() -> None:
    app = make_app()
    app.workflow(define())

    with pytest.raises(InvalidOption, match="a name that no other workflow of the app has"):
        app.workflow(define())
    with pytest.raises(InvalidOption, match="in the definition or where it is registered"):
        app.workflow(define(name=None))


class Postman:
    def __init__(self) -> None:
        self.sent: list[str] = []


class Letters:
    def __init__(self, postman: Postman) -> None:
        self.postman = postman

    @on_event(Event.PAY)
    async def write(self, entity: Order, payload: Any) -> Order:
        self.postman.sent.append(entity.urn)
        return entity


class ShelfAccess:
    """Access as a class, which the app makes."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf

    def new(self) -> Order:
        return Order("urn:new")

    async def load(self, urn: str) -> Order | None:
        return self.shelf.orders.get(urn)

    async def update(self, entity: Order, status: Status) -> Order:
        return self.shelf.update(entity, status)

    def status(self, entity: Order) -> Status:
        return entity.status

    def urn(self, entity: Order) -> str:
        return entity.urn


@pytest.mark.requirement("W-10", "W-50", "W-53", "W-60")
async def test_classes_are_made_with_what_providers_and_other_apps_give() -> None:
    shelf, postman = Shelf(), Postman()
    shelf.put()
    office = make_app()
    office.provide(Postman, postman)
    app = make_app()
    definition = OrderDefinition(
        states=define().states, transitions=transitions(), entity=ShelfAccess, actions=[Letters]
    )

    workflow = app.register("order", definition, [office], {Shelf: shelf})
    await workflow.emit(Event.PAY, "urn:1")

    assert (postman.sent, shelf.orders["urn:1"].status) == (["urn:1"], Status.PAID)
    with pytest.raises(NotConfigured, match="nothing provides Postman"):
        make_app().register("order", definition, providers={Shelf: shelf})


# ---- what would go wrong later -------------------------------------------------------------------------------------


def test_a_queue_feeds_one_workflow_and_no_handler() -> None:
    app = make_app()
    app.workflow(define(), bullmq=BullMQ(events=[PAID]))

    with pytest.raises(InvalidOption, match="'orders' feeds 'order'"):
        app.workflow(define(name="other"), bullmq=BullMQ(events=[PAID]))

    async def handle(job: Any) -> None: ...

    app.worker("mails", handle)
    with pytest.raises(InvalidOption, match="'mails' has one"):
        app.workflow(define(name="mails"), bullmq=BullMQ(events=[BullMQEvent(queue="mails", event=Event.PAY)]))


class Misspelt:
    @on_event("payed")
    async def write(self, entity: Order, payload: Any) -> Order:
        return entity


def test_lint_errors_refuse_and_warnings_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(
        DoubtfulDefinition, match=r"Misspelt\.write waits for payed, which is not an event of the workflow"
    ):
        make_app().workflow(define(actions=[Misspelt()]))

    lonely = [*transitions(), OrderTransition(event=Event.REOPEN, from_="lost", to=Status.NEW)]  # type: ignore[arg-type]  # words do too
    workflow = make_app().workflow(define(transitions=lonely))
    assert [finding.code for finding in workflow.findings] == ["unreachable-state"]
    assert "no event leads to state lost" in caplog.text
    with pytest.raises(DoubtfulDefinition, match="no event leads to state lost"):
        make_app().workflow(define(transitions=lonely), strict=True)


@pytest.mark.requirement("X-52")
async def test_access_without_versions_gets_a_lock_that_all_processes_see(caplog: pytest.LogCaptureFixture) -> None:
    app = make_app()
    locked = app.workflow(define(), bullmq=BullMQ(events=[PAID]))
    rabbit = Bullpen(settings=Settings.load(environ={}, workflows_transport="rabbitmq"))
    alone = rabbit.workflow(define(), events=neutral())

    assert type(locked._engine._locks).__name__ == "RedisLocks"
    assert alone._engine._locks is None
    assert "two processes may handle events of one entity at the same time" in caplog.text
    await app.aclose()
    await rabbit.aclose()


# ---- running -------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("W-11", "W-46", "W-47", "W-59")
async def test_the_app_runs_its_workflows() -> None:
    app, shelf = make_app(), Shelf()
    shelf.put()
    workflow = app.workflow(define(shelf, events=neutral()))
    await workflow.send(Event.PAY, "urn:1", {"amount": 5}, correlation_id="c-1")

    async def stop_when_moved() -> None:
        await heard.wait("delivery.settled")
        assert await workflow.is_healthy()
        await app.stop()

    import asyncio

    with listening() as heard:
        async with asyncio.TaskGroup() as group:
            group.create_task(stop_when_moved())
            await asyncio.wait_for(app.run(signals=False), 30)

    assert shelf.orders["urn:1"].status == Status.PAID
    assert heard.of("workflow.moved")[0]["correlation_id"] == "c-1"
    assert workflow.running == 0
