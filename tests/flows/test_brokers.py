"""What the command line tells of events that travel on RabbitMQ."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from bullpen.plugins.transports.rabbitmq import RabbitMQClient
from bullpen.ports.dead_letters import DeadLetter
from bullpen.testing import free_port
from bullpen.testing.rabbitmq import RabbitServer
from tests.flows._cli import Answer, child, cli, cli_process

SHOP = """
from bullpen import Bullpen
from bullpen.ports.bindings import AnyTransport, AnyEvent
from bullpen.workflow import Definition, InlineEntities, States, Transition

app = Bullpen()
app.workflow(Definition(
    name="orders",
    states=States(idles=["new"], finals=["paid"], failed="lost"),
    transitions=[Transition(event="paid", from_="new", to="paid")],
    entity=InlineEntities(new=lambda: "new", load=str, update=lambda e, s: s, status=str, urn=str),
    events=AnyTransport(events=[AnyEvent(source="QUEUE", event="paid")]),
))
"""


class Shop:
    """A program whose events travel on RabbitMQ, one of them dead, and no Redis."""

    def __init__(self, path: Path, rabbit: RabbitServer) -> None:
        self.queue, self.path = f"orders-{os.urandom(4).hex()}", path
        self.module = self.queue.replace("-", "_")
        (path / f"{self.module}.py").write_text(SHOP.replace("QUEUE", self.queue))
        self.env = {
            "BULLPEN_TRANSPORT": "rabbitmq",
            "BULLPEN_RABBITMQ_URL": rabbit.url,
            "BULLPEN_EMBEDDED": "never",
            "BULLPEN_DATABASE_URL": f"sqlite:///{path / 'ledger.sqlite3'}",
        }
        assert cli("migrate", cwd=path, env=self.env).code == 0

        async def fail() -> None:
            client = RabbitMQClient(rabbit.url)
            letter = DeadLetter(
                id="dl-1-1",
                source=self.queue,
                message_id="1",
                name="paid",
                data={"urn": "urn:order:1"},
                error_message="no such order",
                failed_at="2030-01-01T00:00:00.000Z",
                entry={"originalJobId": "1", "originalJobName": "paid", "error": {"message": "no such order"}},
            )
            await client.transport.dead_letters(self.queue).put(letter)
            await client.close()

        asyncio.run(fail())

    def type_(self, *words: str, program: bool = True) -> Answer:
        given = ["--app", self.module] if program else []
        sys.modules.pop(self.module, None)  # each command is a process of its own, elsewhere than in tests
        return cli(*words, *given, cwd=self.path, env=self.env)


@pytest.fixture
def shop(tmp_path: Path, rabbit: RabbitServer) -> Shop:
    return Shop(tmp_path, rabbit)


@pytest.mark.requirement("X-5")
def test_dead_letters_on_rabbitmq_are_counted_listed_and_sent_back_with_the_program(shop: Shop) -> None:
    store = f"{shop.queue}-dlq"

    overview = shop.type_("dead-letters", "stats", "--json")
    listed = shop.type_("dead-letters", "list", store, "--json")
    shown = shop.type_("dead-letters", "show", shop.queue, "dl-1-1", "--json")
    missing = shop.type_("dead-letters", "show", shop.queue, "dl-2-1")
    tried = shop.type_("dead-letters", "redrive", store, "--all", "--dry-run", "--json")
    done = shop.type_("dead-letters", "redrive", store, "dl-1-1", "--json")
    after = shop.type_("dead-letters", "stats", "--json")

    assert json.loads(overview.out)[store] == 1, overview
    assert [each["originalJobName"] for each in json.loads(listed.out)] == ["paid"], listed
    assert json.loads(shown.out)["id"] == "dl-1-1", shown
    assert missing.code == 1
    assert json.loads(tried.out)["matched"] == 1
    assert json.loads(done.out)["redriven"] == 1, done
    assert json.loads(after.out)[store] == 0


@pytest.mark.requirement("X-5")
def test_without_the_program_nobody_says_that_there_are_none(shop: Shop) -> None:
    told = shop.type_("dead-letters", "stats", program=False)

    assert told.code == 0, told
    assert "dead letters of workflows on rabbitmq are not included" in told.err
    assert "anywhere" not in told.err


@pytest.mark.requirement("X-5")
def test_a_broker_that_is_away_does_not_hide_the_dead_letters_of_others(shop: Shop) -> None:
    """Outages are when people look."""
    shop.env["BULLPEN_RABBITMQ_URL"] = f"amqp://guest:guest@127.0.0.1:{free_port()}"

    told = shop.type_("dead-letters", "stats", "--json")
    for_people = shop.type_("dead-letters", "stats")

    assert (told.code, for_people.code) == (3, 3)
    assert json.loads(told.out) == {"integration_outbox": 0}, told
    assert f"{shop.queue}-dlq cannot be counted: connection to RabbitMQ" in told.err
    assert "anywhere" not in for_people.err


def test_doctor_knows_the_broker_and_its_dead_letters(shop: Shop) -> None:
    with_program = json.loads(shop.type_("doctor", "--json").out)
    by_settings = json.loads(shop.type_("doctor", "--json", program=False).out)
    # In a process of its own: the driver forgets a coroutine when nobody listens, which a test would be blamed for.
    nowhere = {**shop.env, "BULLPEN_RABBITMQ_URL": "amqp://guest:guest@127.0.0.1:1"}
    away = cli_process("doctor", "--json", cwd=shop.path, env=nowhere)

    def about(found: list[dict[str, str]], subject: str) -> list[str]:
        return [each["level"] for each in found if each["subject"] == subject]

    assert about(with_program, "workflow orders") == ["good"], with_program
    assert about(with_program, f"store {shop.queue}-dlq") == ["warning"]
    assert about(by_settings, "transport RabbitMQ") == ["good"]
    assert about(json.loads(away.out), "transport RabbitMQ") == ["broken"]
    assert away.code == 1


def test_the_first_line_names_the_broker_of_a_workflow(shop: Shop) -> None:
    with child("run", shop.module, cwd=shop.path, env=shop.env) as command:
        line = command.wait_for("taking jobs from workflow orders")

    assert "on RabbitMQ amqp://***@" in line


def test_the_broker_of_messages_is_known_by_settings_alone(tmp_path: Path, rabbit: RabbitServer) -> None:
    name = f"greetings-{os.urandom(4).hex()}"
    env = {
        "BULLPEN_MESSAGES_TRANSPORT": "rabbitmq",
        "BULLPEN_RABBITMQ_URL": rabbit.url,
        "BULLPEN_RABBITMQ_QUEUE_NAME": f"{name}.queue",
        "BULLPEN_RABBITMQ_DLQ_NAME": f"{name}.dlq",
        "BULLPEN_RABBITMQ_EXCHANGE_NAME": name,
        "BULLPEN_RABBITMQ_DLX_NAME": f"{name}.dlx",
        "BULLPEN_EMBEDDED": "never",
        "BULLPEN_DATABASE_URL": f"sqlite:///{tmp_path / 'ledger.sqlite3'}",
    }
    assert cli("migrate", cwd=tmp_path, env=env).code == 0

    overview = cli("dead-letters", "stats", "--json", cwd=tmp_path, env=env)
    doctor = cli("doctor", "--json", cwd=tmp_path, env=env)

    assert json.loads(overview.out) == {"integration_outbox": 0, f"{name}.dlq": 0}
    assert [each["level"] for each in json.loads(doctor.out) if each["subject"] == "messages"] == ["good"]
