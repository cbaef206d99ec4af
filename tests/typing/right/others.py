"""Right programs: transports, workflows, runs, messages, the blocking queue, errors, testing."""

from __future__ import annotations

from datetime import time, timedelta
from enum import StrEnum
from typing import Any, assert_type

from bullpen import (
    Backoff,
    Bullpen,
    BullpenError,
    Cancelled,
    ConnectionLost,
    DeadLetterFilter,
    DeadLetterPolicy,
    EntityNotFound,
    Flow,
    InvalidOption,
    Job,
    JobFailed,
    JobState,
    NotConfigured,
    Principal,
    ResultTimeout,
    RetryPolicy,
    RunFailed,
    Tokens,
    inspect_server,
    runs_api,
)
from bullpen.channels import Message
from bullpen.messages import Late, Messages, Recipient
from bullpen.queue import FlowNode, LaneInfo
from bullpen.runs import CircuitBreaker, Provider, Run, RunPayload, Runs
from bullpen.sync import Job as BlockingJob
from bullpen.sync import Queue as BlockingQueue
from bullpen.testing import HttpReceiver, RedisServer
from bullpen.transports import (
    BullMQClient,
    Delivery,
    KafkaClient,
    MemoryClient,
    Messaging,
    Outgoing,
    QueueSpec,
    RabbitMQClient,
    Topology,
)
from bullpen.workflow import (
    AnyEvent,
    AnyTransport,
    BullMQ,
    BullMQEvent,
    Definition,
    InlineEntities,
    States,
    Transition,
    Workflow,
    step,
)

app = Bullpen("redis://localhost:6379", prefix="shop")


class Status(StrEnum):
    NEW = "new"
    PAID = "paid"
    FAILED = "failed"


class Event(StrEnum):
    PAY = "pay"


# ---- transports -----------------------------------------------------------------------------------------------------


async def on_delivery(delivery: Delivery) -> None:
    assert_type(delivery.event.urn, str)


def in_a_thread(delivery: Delivery) -> str:
    return delivery.event.name


async def memory() -> None:
    client = MemoryClient(concurrency=5, close_timeout=timedelta(seconds=1))
    await client.consume("orders", on_delivery, ordered=True)
    await client.produce("orders", "paid", {"urn": "urn:order:1", "payload": {"n": 1}}, idempotency_key="k")
    await client.close()


async def bullmq() -> Job:
    client = BullMQClient(
        "redis://localhost", worker_options={"lock": 1_000}, job_options={"keep_logs": 5}, publish_deadline=500
    )
    return await client.produce("orders", "paid", {"urn": "urn:order:1", "payload": None}, priority=3, delay=500)


async def rabbitmq() -> RabbitMQClient:
    policy = RetryPolicy(attempts=3, backoff=Backoff.fixed(100), dead_letters=DeadLetterPolicy(store="queue"))
    topology = Topology(queues=(QueueSpec(name="orders", routing_keys=("paid",), delivery_limit=10),))
    client = RabbitMQClient(["amqp://a", "amqp://b"], policy=policy, topology=topology, concurrency=5)
    await client.consume("orders", in_a_thread, concurrency=2, timeout=timedelta(seconds=5))
    return client


async def kafka() -> None:
    client = KafkaClient("localhost:9092", workflow="orders", retry="park", session_timeout=6_000, schemas={"a": int})
    await client.produce_keyed("orders", "urn:order:1", {"n": 1})


async def any_client(client: Messaging[Any]) -> int:
    one = Outgoing(name="paid", data={"urn": "urn:order:1", "payload": 1}, delay=500)
    return len(await client.produce_many("orders", [one], attempts=3, headers={"a": "b"}))


# ---- workflows ------------------------------------------------------------------------------------------------------


class Order:
    def __init__(self, urn: str) -> None:
        self.urn, self.status = urn, Status.NEW


def a_definition(entities: InlineEntities[Order, Status]) -> Definition[Order, dict[str, Any], Event, Status]:
    return Definition(
        name="orders",
        entity=entities,
        states=States(finals=[Status.PAID], idles=[Status.NEW], failed=Status.FAILED),
        transitions=[Transition(event=Event.PAY, from_=[Status.NEW], to=Status.PAID)],
    )


def a_workflow(definition: Definition[Order, dict[str, Any], Event, Status]) -> None:
    workflow = app.workflow(definition, bullmq=BullMQ(events=[BullMQEvent(queue="orders", event=Event.PAY)]))
    assert_type(workflow, Workflow[Order, dict[str, Any], Event, Status])


def on_any_transport(definition: Definition[Order, dict[str, Any], Event, Status]) -> None:
    events = AnyTransport(events=[AnyEvent(source="orders", event=Event.PAY, job_name="pay")])
    app.workflow(definition, events=events, strict=True, locks=False, name="orders-2")


async def an_event(workflow: Workflow[Order, dict[str, Any], Event, Status]) -> Status:
    order = await workflow.emit(Event.PAY, "urn:order:1", {"n": 1}, idempotency_key="k", tenant_id="acme")
    await workflow.send(Event.PAY, "urn:order:2", delay=timedelta(minutes=1), priority=2)
    return order.status


def from_an_action(order: Order) -> None:
    step().enqueue(integration_type="webhook:x", event_type="order.paid.v1", tenant_id="acme", delay=5)
    step().follow_up(Event.PAY)


# ---- runs -----------------------------------------------------------------------------------------------------------


def runs() -> Runs:
    runs = app.use_runs()
    runs.configure(concurrency=5, providers={"model": Provider()}, breaker=CircuitBreaker(), lock=timedelta(minutes=1))
    return runs


async def execute(run: Run) -> dict[str, str]:
    receipt = await run.step("charge", charge)
    return {"receipt": receipt}


async def charge(key: str) -> str:
    return key


async def submitted(runs: Runs, payload: RunPayload) -> object:
    submitted = await runs.service.submit(payload, cost=5, is_test_run=True, actor="ada")
    await runs.service.enqueue_run(submitted.run.id, payload, payload_in_job=False)
    try:
        return await runs.service.result("acme", submitted.run.id, timeout=5_000)
    except RunFailed as failed:
        return failed.reason


def over_http(runs: Runs) -> object:
    return runs_api(runs.service, Tokens({"token": Principal(tenant_id="acme", actor="ada")}))


def a_worker_of_runs(runs: Runs) -> object:
    return runs.worker(name="w", drain_delay=500)


# ---- messages -------------------------------------------------------------------------------------------------------


async def messages() -> Messages:
    messages = app.use_messages()
    messages.occasion("birthday", text="Happy birthday, {name|friend}!", send_at=time(9), late=Late.send())
    ada = Recipient(
        id="ada", zone="UTC", channel="email", address="a@example.com", occasions={"birthday": "1990-03-14"}
    )
    await messages.recipients.save(ada)
    await messages.import_csv(["id,zone"], channel="email", dry_run=True)
    return messages


async def send_email(message: Message) -> str:
    return message.idempotency_key


# ---- without an event loop ------------------------------------------------------------------------------------------


def blocking() -> object:
    with BlockingQueue("mails", attempts=3, connection="redis://localhost", durability="memory") as queue:
        job = queue.add("welcome", {"to": "ada"}, delay=timedelta(seconds=1), job_id="ada", replace_finished=True)
        assert_type(job, BlockingJob)
        assert_type(job.state(), JobState)
        assert_type(queue.jobs(JobState.WAITING, count=5), list[BlockingJob])
        assert_type(next(queue.iter_jobs()).progress(50), None)
        assert_type(queue.counts().waiting, int)
        assert_type(queue.get_job("1"), BlockingJob | None)
        assert_type(queue.cancel(job, "not wanted"), Cancelled)
        assert_type(queue.add_flow(Flow("sum", queue=queue)), FlowNode[BlockingJob])
        assert_type(queue.lanes.list(), list[LaneInfo])
        assert_type(queue.dead_letters.depth(), int)
        return job.result(timeout=500)


def plain_handler(job: Job[dict[str, int]]) -> int:
    assert_type(job.sync, BlockingJob[dict[str, int]])
    assert_type(job.sync.logs(), list[str])
    return job.sync.data["n"]


# ---- errors, dead letters, tests ------------------------------------------------------------------------------------


async def what_went_wrong(job: Job) -> str:
    try:
        return str(await job.result())
    except JobFailed as error:
        return str(error.reason)
    except ResultTimeout as error:
        return str(error.state)
    except (ConnectionLost, EntityNotFound, NotConfigured):
        return "away"
    except InvalidOption as error:
        return error.option
    except BullpenError:
        return "ours"


async def dead_letters() -> None:
    console = await app.dead_letters(tenant_id="acme")
    await console.redrive_many(DeadLetterFilter(error="timed out"), by="ada", rate=50, dry_run=True)


async def checks() -> list[str]:
    return [f"{finding.check}: {finding.verdict}" for finding in await inspect_server(app.connection)]


async def a_test() -> str:
    with RedisServer.start("valkey") as server:
        async with HttpReceiver() as receiver:
            return server.url + receiver.url
