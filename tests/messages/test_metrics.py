"""The numbers of the pipeline under the names that dashboards know."""

from __future__ import annotations

from typing import Any

import pytest

from bullpen.ledger import Ledger
from bullpen.messages import MessageStatus
from bullpen.messages.metrics import MessageMetrics
from bullpen.plugins.metrics import MessagingMetrics
from bullpen.ports.channel import Refused, Unavailable
from bullpen.ports.metrics import Metric, Sample
from tests.messages.conftest import MakeMessages
from tests.messages.kit import Provider, due_now, until_status
from tests.messages.rabbit import rabbit_client, rabbit_names

NAMES = {
    "queue_message_publish_duration_seconds": "histogram",
    "queue_message_consume_duration_seconds": "histogram",
    "queue_wait_time_seconds": "histogram",
    "queue_message_ack_total": "counter",
    "queue_message_nack_total": "counter",
    "queue_message_redelivery_total": "counter",
    "queue_depth_messages": "gauge",
    "queue_consumers_active": "gauge",
    "queue_connection_status": "gauge",
    "queue_channel_opens_total": "counter",
    "queue_channel_closes_total": "counter",
}


def by_name(metrics: list[Metric]) -> dict[str, list[Sample]]:
    return {metric.name: list(metric.samples) for metric in metrics}


@pytest.mark.requirement("S-9", "S-32", "S-33", "S-34", "S-35", "S-36", "S-37")
async def test_the_pipeline_on_rabbitmq_fills_all_of_them(
    make_messages: MakeMessages, ledger: Ledger, rabbit: Any
) -> None:
    names = rabbit_names()
    client = rabbit_client(rabbit.url, names)
    provider = Provider(Unavailable("away", "503"), ledger=ledger)
    metrics = MessagingMetrics(lambda: [client])
    messages = make_messages(provider, client=client, queue=names["queue_name"])
    await due_now(messages, ledger, 3)
    await messages.sender().start()
    await messages.scheduler().run_once()
    await until_status(messages, 3)

    found = by_name(await metrics.collect())
    kinds = {metric.name: metric.kind for metric in await metrics.collect()}
    await client.close()
    closed = by_name(await metrics.collect())
    metrics.close()

    queue = {"transport": "rabbitmq", "queue": names["queue_name"]}
    assert kinds.items() >= NAMES.items()
    assert [(sample.labels, sample.count) for sample in found["queue_message_publish_duration_seconds"]] == [(queue, 3)]
    assert found["queue_message_consume_duration_seconds"][0].count == 4
    assert found["queue_wait_time_seconds"][0].count == 4
    assert found["queue_wait_time_seconds"][0].buckets[-1] == (float("inf"), 4)
    assert found["queue_message_ack_total"] == [Sample(queue, 3)]
    assert found["queue_message_nack_total"] == [Sample(queue, 1)]
    assert found["queue_message_redelivery_total"] == [Sample(queue, 1)]
    assert found["queue_depth_messages"] == [Sample(queue, 0)]
    assert found["queue_consumers_active"] == [Sample(queue, 1)]
    assert found["queue_connection_status"] == [Sample({"transport": "rabbitmq"}, 1)]
    assert sum(sample.value for sample in found["queue_channel_opens_total"]) >= 2
    assert closed["queue_connection_status"] == [Sample({"transport": "rabbitmq"}, 0)]
    assert sum(sample.value for sample in closed["queue_channel_closes_total"]) >= 2


async def test_outcomes_and_lateness_are_counted_by_occasion_and_channel(
    make_messages: MakeMessages, ledger: Ledger
) -> None:
    provider = Provider(Refused("no such address", "550"), ledger=ledger)
    messages = make_messages(provider)
    metrics = MessageMetrics(lambda: [("birthday", "email"), ("birthday", "sms")])
    await due_now(messages, ledger, 3)
    await messages.sender().start()
    await messages.scheduler().run_once()
    await until_status(messages, 2)
    await until_status(messages, 1, MessageStatus.FAILED)

    found = by_name(list(await metrics.collect()))
    metrics.close()

    counted = {tuple(sample.labels.values()): sample.value for sample in found["bullpen_messages_outcomes_total"]}
    assert counted["birthday", "email", "sent"] == 2
    assert counted["birthday", "email", "failed"] == 1
    assert {key[2] for key in counted} == {"sent", "failed", "parked", "expired", "skipped", "cancelled"}
    assert counted["birthday", "sms", "sent"] == 0  # from 0 on: the first one is an increase
    lateness = {tuple(sample.labels.values()): sample for sample in found["bullpen_messages_lateness_seconds"]}
    assert lateness["birthday", "email"].count == 2
    assert lateness["birthday", "email"].value >= 0
    assert lateness["birthday", "sms"].count == 0
