"""Wrong programs: each marked line is an error for every checker."""

from __future__ import annotations

from typing import Any

from bullpen import Bullpen, Settings
from bullpen.channels import KafkaChannel, Message, Slack, Webhook
from bullpen.messages import Recipient
from bullpen.outbox import Outbox, OutboxFields, OutboxItem, Route
from bullpen.runs import Run, RunPayload, Runs
from bullpen.sources import EventMetadata
from bullpen.sync import Queue
from bullpen.transports import BullMQClient, Delivery, KafkaClient, MemoryClient, RabbitMQClient
from bullpen.workflow import BullMQ, Workflow

app = Bullpen(prefx="shop")  # error


async def enqueued(outbox: Outbox, session: object) -> None:
    await outbox.enqueue(session, integration_type="a:b", event_type="c", tenant="t")  # error
    await outbox.enqueue(session, integration_type="a:b", event_type="c", delay="5 s")  # error
    await outbox.enqueue(session, integration_type="a:b")  # error
    await outbox.enqueue(session, integration_type="a:b", event_type="c", attempts=3)  # error
    await outbox.add_in_transaction(session, "mails", "welcome", {}, attemps=5)  # error
    await outbox.add_in_transaction(session, "mails", "welcome", {}, add_deadline=5)  # error
    outbox.enqueue_sync(session, integration_type="a:b", event_type="c", header={})  # error
    fields: OutboxFields = {"tenant": "t"}  # error
    await outbox.replay("a:b", by="ada", label="x", sinse=None)  # error
    await outbox.send_test("a:b", user_id="u")  # error
    print((await outbox.receipt("1")).status, fields)  # error
    OutboxItem(integration_type="a:b", event_type="c", source_stream_id="s")  # error


def routed(outbox: Outbox, hook: Webhook) -> None:
    outbox.route("webhook:*", hook, concurency=5)  # error
    outbox.route("webhook:*", hook, strategy="later")  # error
    outbox.route("webhook:*", "https://x.example")  # error
    outbox.workers(worker_options={"lokc": 5})  # error
    Route(chanel=hook)  # error


def channels() -> None:
    Webhook("https://x.example", secrt="whsec_AAAA")  # error
    Webhook("https://x.example", body="all")  # error
    Slack("https://x.example", timeout=5)  # error
    KafkaChannel("localhost:9092", key="order")  # error
    KafkaChannel("localhost:9092", pasword="p")  # error
    app.channels.webhook("https://x.example", timeout="5")  # error
    app.channels.email(sendr="a@example.com")  # error
    app.channels.sms(account=5)  # error
    app.channels.kafka(brokers="localhost")  # error


async def on_delivery(delivery: Delivery) -> None:
    print(delivery.tries)  # error


async def transports() -> None:
    client = MemoryClient(concurency=5)  # error
    await client.consume("orders", on_delivery, orderd=True)  # error
    await client.produce("orders", "paid", {"urn": "a", "payload": 1}, prioritty=3)  # error
    await client.produce("orders", "paid", {"payload": 1, "url": "a"})  # error
    BullMQClient("redis://localhost", worker_options={"lokc": 5})  # error
    BullMQClient("redis://localhost", job_options={"attemps": 5})  # error
    KafkaClient("localhost:9092")  # error
    KafkaClient("localhost:9092", workflow="a", retry="later")  # error
    RabbitMQClient(max_retries=5)  # error


async def workflows(workflow: Workflow[Any, Any, str, str]) -> None:
    await workflow.emit("pay", "urn:1", idempotency="k")  # error
    await workflow.send("pay", "urn:1", prioritty=3)  # error
    BullMQ(events=[], conection="redis://localhost")  # error


async def runs(runs: Runs, run: Run, payload: RunPayload, message: Message) -> None:
    runs.configure(concurency=5)  # error
    runs.worker(concurency=5)  # error
    await runs.service.submit(payload, costs=5)  # error
    await runs.service.enqueue_run("1", payload, is_test="yes")  # error
    await run.step("charge")  # error
    print(message.idempotencyKey)  # error


def blocking() -> None:
    queue = Queue("mails", attemps=3)  # error
    queue.add("x", {}, prioritty=3)  # error
    queue.add("x", {}, delay="5 s").result()  # error
    queue.jobs(starts=3)  # error
    print(queue.counts().waitin)  # error
    queue.clean(state="nowhere", limt=3)  # error
    queue.lanes.set("acme", wieght=3)  # error


async def apps() -> None:
    await app.run(concurency=5)  # error
    app.use_outbx()  # error
    print(app.outbox.enque)  # error
    app.use_messages().occasion("birthday", txt="Happy")  # error
    await app.use_messages().import_csv([], dry=True)  # error
    Recipient(id="ada", zone="UTC", chanel="email", address="a")  # error
    EventMetadata(correlation="c", source="shop")  # error
    print(Settings.load().redis.urll)  # error
