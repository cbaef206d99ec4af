"""Addresses and names of brokers come from the environment, and wrong ones stop the start."""

from __future__ import annotations

from pathlib import Path

import pytest

from bullpen.errors import InvalidOption
from bullpen.plugins.transports.rabbitmq import RabbitMQClient, Topology
from bullpen.settings import Settings


def load(tmp_path: Path, **environ: str) -> Settings:
    return Settings.load(environ=environ, start=tmp_path)


@pytest.mark.requirement("S-38", "S-39", "S-40", "X-26")
def test_defaults_are_those_of_scheduled_messages(tmp_path: Path) -> None:
    told = load(tmp_path).rabbitmq

    assert told.urls == ["amqp://guest:guest@localhost:5672"]
    assert (told.queue_name, told.dlq_name) == ("birthday.messages.queue", "birthday.messages.dlq")
    assert (told.exchange_name, told.dlx_name) == ("birthday.messages", "birthday.messages.dlx")
    assert load(tmp_path).kafka.brokers == "localhost:9092"


@pytest.mark.requirement("S-38", "S-39", "S-40", "S-41", "S-42", "X-26")
def test_the_environment_describes_the_pipeline(tmp_path: Path) -> None:
    """What settings hold is what the client of scheduled messages takes."""
    settings = load(
        tmp_path,
        RABBITMQ_URL="amqp://u:p@a:5672, amqp://u:p@b:5672",
        RABBITMQ_QUEUE_NAME="mails",
        RABBITMQ_DLQ_NAME="mails.dead",
        RABBITMQ_EXCHANGE_NAME="mail",
        RABBITMQ_DLX_NAME="mail.dlx",
        QUEUE_MAX_RETRIES="2",
        QUEUE_RETRY_DELAY="100",
        QUEUE_RETRY_BACKOFF="linear",
    )
    broker, messages = settings.rabbitmq, settings.messages
    topology = Topology.scheduled_messages(
        exchange_name=broker.exchange_name,
        dlx_name=broker.dlx_name,
        queue_name=broker.queue_name,
        dlq_name=broker.dlq_name,
    )

    client = RabbitMQClient.for_scheduled_messages(
        broker.urls,
        topology=topology,
        max_retries=messages.max_retries,
        retry_delay_ms=messages.retry_delay_ms,
        retry_backoff=messages.retry_backoff,
        concurrency=messages.concurrency,
    )

    assert client.policy.attempts == messages.max_attempts == 3
    assert client.policy.dead_letters.queue_for("mails") == "mails.dead"
    assert "p@" not in str([setting.value for setting in settings.describe() if setting.key == "rabbitmq.url"])


@pytest.mark.requirement("X-26")
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("RABBITMQ_URL", "localhost:5672"),
        ("RABBITMQ_URL", "amqp://a,http://b"),
        ("RABBITMQ_QUEUE_NAME", "a\x01b"),
        ("KAFKA_BROKERS", "a:9092,,b:9092"),
        ("QUEUE_RETRY_BACKOFF", "random"),
    ],
)
def test_a_wrong_value_names_its_variable(tmp_path: Path, variable: str, value: str) -> None:
    with pytest.raises(InvalidOption, match=variable):
        load(tmp_path, **{variable: value})
