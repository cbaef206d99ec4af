"""`bullpen outbox` and `bullpen migrate`, as somebody types them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bullpen.cli.commands import run
from bullpen.errors import InvalidOption, NotConfigured
from bullpen.ledger import Ledger, Retried, Settlement
from bullpen.settings import Settings
from tests.databases import item

Type = Callable[..., tuple[int, str, str]]


@pytest.fixture
def type_(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Type:
    monkeypatch.setenv("NO_COLOR", "1")

    def typed(*words: str) -> tuple[int, str, str]:
        code = run(list(words))
        out, err = capsys.readouterr()
        return code, out, err

    return typed


def store(url: str, *, dead: int, pending: int = 0) -> list[str]:
    """Rows, the first of them dead."""

    async def work() -> list[str]:
        async with Ledger(url, dead_letter_type=None) as ledger:
            stored = await ledger.outbox.enqueue_many([item(number) for number in range(dead + pending)])
            for row in await ledger.outbox.claim_due_batch("w", dead) if dead else []:
                await ledger.outbox.dead_letter(row, "the target answered 400", code="HTTP_400")
            return [str(entry.id) for entry in stored]

    return asyncio.run(work())


@pytest.mark.requirement("X-40")
def test_rows_are_listed_shown_redriven_and_discarded(sqlite_url: str, type_: Type) -> None:
    first, second, third, _ = store(sqlite_url, dead=3, pending=1)
    database = ("--database", sqlite_url)

    code, listed, _ = type_("outbox", "list", "--status", "dead", "--json", *database)
    assert code == 0
    assert [row["id"] for row in json.loads(listed)] == [first, second, third]
    code, table, _ = type_("outbox", "list", *database)
    assert first in table
    assert "HTTP_400" not in table

    code, shown, _ = type_("outbox", "show", first, "--json", *database)
    found = json.loads(shown)
    assert (found["status"], found["errorCode"], found["payload"]) == ("DEAD", "HTTP_400", {"orderId": 0})
    assert [entry["outcome"] for entry in found["attemptLog"]] == ["DEAD"]
    code, readable, _ = type_("outbox", "show", first, *database)
    assert "attempts:" in readable

    code, counted, _ = type_("outbox", "stats", "--json", *database)
    assert {entry["status"]: entry["count"] for entry in json.loads(counted)} == {"DEAD": 3, "PENDING": 1}
    assert "webhook:partnerX" in type_("outbox", "stats", *database)[1]

    assert type_("outbox", "redrive", first, *database)[:2] == (0, "redriven: 1\n")
    assert type_("outbox", "redrive", first, *database)[0] == 1
    assert type_("outbox", "redrive", "--all", "--code", "HTTP_500", *database)[1] == "redriven: 0\n"
    assert json.loads(type_("outbox", "discard", second, "--yes", "--json", *database)[1]) == {"discarded": 1}
    assert type_("outbox", "redrive", "--all", "--type", "webhook:partnerX", *database)[1] == "redriven: 1\n"


def test_a_row_that_failed_is_called_retrying(sqlite_url: str, type_: Type) -> None:
    """FAILED is the end of a run and of a message, and no end of a row. What programs read is what is stored."""

    async def fail() -> None:
        async with Ledger(sqlite_url) as ledger:
            await ledger.outbox.enqueue(item(1))
            (row,) = await ledger.outbox.claim_due_batch("w")
            await ledger.outbox.settle([Settlement(row, Retried("the target answered 503", "HTTP_503", 60_000), "w")])

    asyncio.run(fail())
    database = ("--database", sqlite_url)

    listed = type_("outbox", "list", "--status", "retrying", *database)[1]
    (row,) = json.loads(type_("outbox", "list", "--status", "failed", "--json", *database)[1])
    tables = [listed, type_("outbox", "stats", *database)[1], type_("outbox", "show", row["id"], *database)[1]]
    code, _, complaint = type_("outbox", "list", "--status", "lost", *database)

    assert row["status"] == "FAILED"
    assert all("RETRYING" in table for table in tables)
    assert not any("FAILED" in table.partition("attempts:")[0] for table in tables)
    assert code == 2 and "PENDING, CLAIMED, SENT, RETRYING, DEAD" in complaint


def test_a_dead_row_can_be_confirmed(sqlite_url: str, type_: Type) -> None:
    first, second = store(sqlite_url, dead=1, pending=1)
    database = ("--database", sqlite_url)

    code, out, _ = type_("outbox", "confirm", first, "--json", *database)
    assert (code, json.loads(out)) == (0, {"confirmed": 1})
    code, _, err = type_("outbox", "confirm", second, *database)
    assert (code, "not confirmed: 1" in err) == (1, True)
    assert type_("outbox", "confirm", *database)[0] == 2
    assert json.loads(type_("outbox", "show", first, "--json", *database)[1])["status"] == "SENT"


def test_a_destination_that_no_row_has_is_asked_back(sqlite_url: str, type_: Type) -> None:
    store(sqlite_url, dead=0, pending=1)

    right = type_("outbox", "destinations", "disable", "webhook:partnerX", "--database", sqlite_url)
    wrong = type_("outbox", "destinations", "disable", "webhook:partnrX", "--database", sqlite_url)

    assert right == (0, "disabled: webhook:partnerX\n", "")
    assert wrong[0] == 0, "it may be one that is to come"
    assert wrong[2] == "no row has this type yet; did you mean 'webhook:partnerX'?\n"


def test_destinations_are_switched_off_and_on(sqlite_url: str, type_: Type) -> None:
    database = ("--database", sqlite_url)

    assert "no destination has a problem" in type_("outbox", "destinations", "list", *database)[2]
    code, out, _ = type_("outbox", "destinations", "disable", "webhook:x", "--reason", "they [moved]", *database)
    assert (code, out) == (0, "disabled: webhook:x\n")
    (listed,) = json.loads(type_("outbox", "destinations", "list", "--json", *database)[1])
    assert (listed["integrationType"], listed["state"], listed["reason"]) == ("webhook:x", "disabled", "they [moved]")
    assert listed["disabledBy"].startswith("cli")
    assert "they [moved]" in type_("outbox", "destinations", "list", *database)[1]
    assert json.loads(type_("outbox", "destinations", "enable", "webhook:x", "--json", *database)[1]) == {
        "enabled": "webhook:x"
    }
    code, _, err = type_("outbox", "destinations", "enable", "webhook:x", *database)
    assert (code, "is not disabled" in err) == (1, True)


def test_a_broken_destination_is_listed_with_its_pause(sqlite_url: str, type_: Type) -> None:
    async def trip() -> None:
        async with Ledger(sqlite_url) as ledger:
            await ledger.destinations.trip("webhook:x", pause_ms=60_000, longest_ms=60_000)

    asyncio.run(trip())

    (listed,) = json.loads(type_("outbox", "destinations", "list", "--json", "--database", sqlite_url)[1])
    assert (listed["state"], listed["trips"], 0 < listed["brokenMs"] <= 60_000) == ("broken", 1, True)
    assert " s " in type_("outbox", "destinations", "list", "--database", sqlite_url)[1]


ROUTES = """
from bullpen import Bullpen
from bullpen.ports.channel import Accepted, ChannelHealth, Refused

class Echo:
    async def send(self, message):
        if message.payload == {"test": True}:
            return Accepted(f"{message.event_type} for {message.tenant_id}")
        return Refused(f"what is [{message.payload}]?", "ECHO")
    async def check(self):
        return ChannelHealth(True)
    async def aclose(self): ...

app = Bullpen()
app.use_outbox().route("echo:*", Echo())
"""


def test_a_test_message_shows_what_the_destination_answers(
    tmp_path: Path, type_: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BULLPEN_DATA_DIR", str(tmp_path / "data"))
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "routes_of_test.py").write_text(ROUTES)
    words = ("outbox", "destinations", "test", "echo:x", "--app", "routes_of_test")

    code, out, _ = type_(*words, "--tenant", "acme")
    assert (code, out) == (0, "Accepted bullpen.test.v1 for acme\n")
    code, out, err = type_(*words, "--payload", "[1]", "--json")
    assert (code, json.loads(out)) == (1, {"result": "Refused", "reason": "what is [[1]]?", "code": "ECHO"})
    code, _, err = type_(*words, "--payload", "[1]")
    assert (code, "was not delivered" in err) == (1, True)
    code, _, err = type_("outbox", "destinations", "test", "sms:x", "--app", "routes_of_test")
    assert (code, "no channel serves 'sms:x'" in err) == (2, True)
    assert type_(*words, "--payload", "{")[0] == 2


def test_history_is_sent_again(sqlite_url: str, type_: Type) -> None:
    ids = store(sqlite_url, dead=3)
    database = ("--database", sqlite_url)
    type_("outbox", "confirm", *ids, *database)  # as good as sent
    words = ("outbox", "destinations", "replay", "webhook:partnerX", "--label", "restored", "--yes", *database)

    assert json.loads(type_(*words, "--before", "2020-01-01", "--json")[1]) == {"replayed": 0}
    assert json.loads(type_(*words, "--since", "2020-01-01T00:00+02:00", "--limit", "2", "--json")[1]) == {
        "replayed": 2
    }
    assert type_(*words)[1] == "replayed: 1\n"
    assert type_(*words)[1] == "replayed: 0\n"
    listed = json.loads(type_("outbox", "list", "--status", "pending", "--json", *database)[1])
    assert len(listed) == 3
    code, _, err = type_(*words, "--since", "yesterday")
    assert (code, "is no time" in err) == (2, True)
    assert type_(*words[:5], "x" * 41, "--yes", *database)[0] == 2


def test_what_makes_no_sense_is_told(sqlite_url: str, type_: Type) -> None:
    database = ("--database", sqlite_url)

    assert type_("outbox", "list", "--status", "gone", *database)[0] == 2
    assert type_("outbox", "redrive", *database)[0] == 2
    assert type_("outbox", "discard", *database)[0] == 2
    code, _, err = type_("outbox", "show", "no-such-row", *database)
    assert (code, "there is no row" in err) == (1, True)
    assert "no such rows" in type_("outbox", "list", *database)[2]
    assert "nothing waits" in type_("outbox", "stats", *database)[2]


@pytest.mark.requirement("O-22")
def test_tables_are_made_and_may_be_made_again(sqlite_path: Path, type_: Type) -> None:
    database = ("--database", f"sqlite:///{sqlite_path}")

    assert "run `bullpen migrate`" in type_("outbox", "list", *database)[2]
    assert type_("migrate", *database)[0] == 0
    assert type_("migrate", *database)[0] == 0
    assert type_("outbox", "list", *database)[0] == 0


def test_without_a_database_the_projects_own_file_is_used(
    tmp_path: Path, type_: Type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BULLPEN_DATA_DIR", str(tmp_path / "data"))

    assert type_("migrate")[0] == 0

    assert (tmp_path / "data" / "ledger.sqlite3").exists()


def test_statements_can_be_printed(type_: Type) -> None:
    named = [word for duty in ("tenant", "worker", "service") for word in (f"--{duty}-role", f"shop_{duty}")]
    roles = (*named, "--create-roles")

    code, text, _ = type_("migrate", "--database", "postgresql://o@h/d", "--schema", "billing", "--print-sql", *roles)

    assert code == 0
    assert "CREATE TABLE IF NOT EXISTS billing.integration_outbox" in text
    assert "CREATE POLICY bullpen_tenant ON billing.integration_outbox TO shop_tenant, shop_worker " in text
    assert "GRANT EXECUTE ON FUNCTION billing.run_complete TO shop_worker, shop_service" in text
    assert type_("migrate", "--database", "postgresql://o@h/d", "--tenant-role", "t", "--print-sql")[0] == 2


def load(tmp_path: Path, **environ: str) -> Settings:
    return Settings.load(environ=environ, start=tmp_path)


@pytest.mark.requirement("O-60", "O-61", "O-63", "X-26")
def test_settings_have_their_names_and_defaults(tmp_path: Path) -> None:
    defaults = load(tmp_path)
    given = load(
        tmp_path,
        OUTBOX_CLAIM_BATCH_SIZE="7",
        OUTBOX_MAX_ATTEMPTS="3",
        OUTBOX_TICK_INTERVAL_MS="50",
        OUTBOX_DEADLETTER_TOPIC="kafka:dead",
        WEBHOOK_TIMEOUT_MS="900",
    )

    outbox = defaults.outbox
    assert (outbox.claim_batch_size, outbox.max_attempts, outbox.tick_interval_ms) == (100, 10, 1_000)
    assert (outbox.dead_letter_topic, outbox.dead_letter_type) == ("outbox.dead", "bullmq:outbox.dead")
    assert defaults.webhooks.timeout_ms == 5_000
    assert (given.outbox.claim_batch_size, given.outbox.max_attempts, given.outbox.tick_interval_ms) == (7, 3, 50)
    assert (given.outbox.dead_letter_type, given.webhooks.timeout_ms) == ("kafka:dead", 900)


@pytest.mark.requirement("X-26")
@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("OUTBOX_CLAIM_BATCH_SIZE", "0"),
        ("OUTBOX_MAX_ATTEMPTS", "abc"),
        ("OUTBOX_TICK_INTERVAL_MS", "-1"),
        ("OUTBOX_DEADLETTER_TOPIC", "x" * 101),
        ("WEBHOOK_TIMEOUT_MS", "5s"),
        ("BULLPEN_DATABASE_URL", "mysql://host/db"),
        ("BULLPEN_DATABASE_SCHEMA", "Bad Name"),
        ("BULLPEN_TENANT_ROLE", "a-b"),
    ],
)
def test_a_bad_value_names_its_variable(tmp_path: Path, variable: str, value: str) -> None:
    with pytest.raises(InvalidOption, match=f"environment variable {variable}"):
        load(tmp_path, **{variable: value})


@pytest.mark.requirement("O-64")
def test_the_password_of_the_database_is_never_shown(tmp_path: Path) -> None:
    settings = load(tmp_path, BULLPEN_DATABASE_URL="postgresql://ada:s3cret@db/shop")

    shown: dict[str, Any] = {setting.key: setting.value for setting in settings.describe()}

    assert settings.database_url() == "postgresql://ada:s3cret@db/shop"
    assert "s3cret" not in repr(settings) + str(shown)


def test_in_production_a_database_must_be_named(tmp_path: Path) -> None:
    with pytest.raises(NotConfigured, match="BULLPEN_DATABASE_URL"):
        load(tmp_path, BULLPEN_EMBEDDED="never").database_url()
