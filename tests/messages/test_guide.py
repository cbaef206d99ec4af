"""The page about scheduled messages says all that an operator must know, with the names that the code has."""

from __future__ import annotations

from pathlib import Path

import pytest

from bullpen.messages import MessageStatus
from bullpen.settings import Settings
from tests.messages.test_metrics import NAMES

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "guides" / "scheduled-messages.md").read_text().split())


@pytest.mark.requirement("S-53")
@pytest.mark.parametrize(
    "part",
    [
        "## How it works",
        "## Topology on RabbitMQ",
        "## Errors",
        "## Metrics and health",
        "## Configuration",
        "## Design decisions",
        "## Failure scenarios",
        "## Performance",
    ],
)
def test_every_part_is_there(part: str) -> None:
    assert part in PAGE


@pytest.mark.requirement("S-14", "S-53", "X-17")
@pytest.mark.parametrize(
    "said",
    [
        "Production needs at least three RabbitMQ nodes",
        "latency is higher than that of a classic queue",
        "One node is fine for development",
        "The promise is *at least once*; a message is effectively sent once where the provider honours the key",
    ],
)
def test_what_users_must_know_is_said(said: str) -> None:
    assert said in PAGE


@pytest.mark.requirement("S-53")
def test_names_on_the_page_are_those_of_the_code() -> None:
    settings = Settings()
    names = [
        *NAMES,
        *(
            name
            for setting in settings.describe()
            if setting.key.startswith(("messages.", "rabbitmq."))
            for name in (setting.variable, setting.general)
        ),
        settings.rabbitmq.exchange_name,
        settings.rabbitmq.dlx_name,
        settings.rabbitmq.queue_name,
        settings.rabbitmq.dlq_name,
        *(status.value for status in (MessageStatus.CREATED, MessageStatus.QUEUED, MessageStatus.SENDING)),
        *(status.value for status in (MessageStatus.SENT, MessageStatus.FAILED, MessageStatus.PARKED)),
    ]

    assert [name for name in names if name is not None and name not in PAGE] == []
