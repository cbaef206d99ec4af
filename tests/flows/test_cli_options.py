"""Options that narrow or change what a command does: each test fails when its option does nothing."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from bullpen.cli.workers import _by_process
from bullpen.errors import PermanentError
from bullpen.ledger import Ledger
from bullpen.messages import Messages
from bullpen.ops.overview import ConnectedWorker
from bullpen.plugins.transports.memory import MemoryClient
from bullpen.ports.source import SourceEvent
from bullpen.queue import Job, Queue
from bullpen.worker import Worker
from tests.databases import item
from tests.flows._cli import Answer, cli
from tests.messages.kit import person

pytestmark = pytest.mark.requirement("X-40")

Type = Callable[..., Any]


@pytest.fixture
def type_(sqlite_url: str, tmp_path: Path) -> Iterator[Type]:
    """Types a command and returns what it says in JSON."""
    known = {*sys.modules}

    def typed(*words: str) -> Any:
        answer: Answer = cli(*words, "--json", cwd=tmp_path, env={"BULLPEN_DATABASE_URL": sqlite_url})
        assert (answer.code, answer.err) == (0, ""), answer
        return json.loads(answer.out)

    yield typed
    for name in {"shop_of_options"} - known:
        sys.modules.pop(name, None)


def act(url: str, work: Callable[[Ledger], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with Ledger(url, dead_letter_type=None) as ledger:
            return await work(ledger)

    return asyncio.run(main())


def ids(rows: list[dict[str, Any]]) -> list[str]:
    return [row["id"] for row in rows]


# Dead letters -------------------------------------------------------------------------------------------------------


@pytest.fixture
def letters(redis_url: str) -> list[str]:
    """Entries of jobs that failed: two of acme, one of zeta, one of nobody, one that names its tenant in no text."""

    async def refuse(job: Job) -> None:
        raise PermanentError("refused")

    async def main() -> list[str]:
        async with Queue("mails", connection=redis_url) as queue:
            for number, data in enumerate(
                ({"tenantId": "acme"}, {"tenantId": "acme"}, {"tenantId": "zeta"}, {}, {"tenantId": ["acme"]})
            ):
                await queue.add("mail", data, job_id=f"m{number}")
            async with Worker("mails", refuse, connection=redis_url, dead_letters=True, concurrency=1):
                async with asyncio.timeout(20):
                    while await queue.dead_letters.depth() < 5:  # noqa: ASYNC110 - nobody tells
                        await asyncio.sleep(0.02)
            return [letter.id async for letter in queue.dead_letters]

    return asyncio.run(main())


@pytest.mark.requirement("X-41")
def test_dead_letters_are_those_of_one_tenant(
    letters: list[str], type_: Type, redis_url: str, tmp_path: Path, sqlite_url: str
) -> None:
    """All others are not there: not counted, not listed, not shown, not sent back, not thrown away."""
    acme, zeta = letters[:2], letters[2]
    where = ("--redis", redis_url, "--tenant")

    assert type_("dead-letters", "stats", *where, "acme")["mails-dlq"] == 2
    assert [group["count"] for group in type_("dead-letters", "groups", *where, "zeta")] == [1]
    assert ids(type_("dead-letters", "list", "mails", *where, "acme")) == acme[::-1], "newest first"
    assert type_("dead-letters", "show", "mails", zeta, *where, "zeta")["id"] == zeta
    for words in (("show", "mails", zeta), ("redrive", "mails", zeta), ("discard", "mails", zeta)):
        env = {"BULLPEN_DATABASE_URL": sqlite_url}
        refused = cli("dead-letters", *words, *where, "acme", cwd=tmp_path, env=env)
        assert refused.code == 1 and zeta in refused.err, refused
    assert type_("dead-letters", "redrive", "mails", acme[0], *where, "acme")["redriven"] == 1
    assert type_("dead-letters", "redrive", "mails", "--all", *where, "acme")["redriven"] == 1
    assert type_("dead-letters", "discard", "mails", "--all", "--yes", *where, "zeta")["discarded"] == 1
    assert ids(type_("dead-letters", "list", "mails", "--redis", redis_url)) == letters[3:][::-1]


# Outbox -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def dead(sqlite_url: str) -> list[str]:
    """Three dead rows: another type, another code, another tenant."""

    async def work(ledger: Ledger) -> list[str]:
        stored = await ledger.outbox.enqueue_many(
            [item(1, integration_type="webhook:other"), item(2), item(3, tenant_id="acme")]
        )
        for row in await ledger.outbox.claim_due_batch("w", 3):
            await ledger.outbox.dead_letter(row, "no", code="HTTP_410" if row.id == str(stored[1].id) else "HTTP_400")
        return [str(each.id) for each in stored]

    found: list[str] = act(sqlite_url, work)
    return found


def test_rows_are_listed_by_type_code_and_tenant(dead: list[str], type_: Type) -> None:
    other, gone, acme = dead

    assert ids(type_("outbox", "list")) == dead
    assert ids(type_("outbox", "list", "--type", "webhook:other")) == [other]
    assert ids(type_("outbox", "list", "--code", "HTTP_410")) == [gone]
    assert ids(type_("outbox", "list", "--tenant", "acme")) == [acme]
    assert ids(type_("outbox", "list", "--limit", "1")) == [other]


def test_rows_are_redriven_by_type_code_and_tenant(dead: list[str], type_: Type) -> None:
    assert type_("outbox", "redrive", "--all", "--tenant", "acme") == {"redriven": 1}
    assert type_("outbox", "redrive", "--all", "--code", "HTTP_410") == {"redriven": 1}
    assert type_("outbox", "redrive", "--all", "--type", "webhook:nobody") == {"redriven": 0}
    assert type_("outbox", "redrive", "--all", "--type", "webhook:other") == {"redriven": 1}


def test_history_is_sent_again_for_one_tenant_and_with_new_keys(dead: list[str], type_: Type, sqlite_url: str) -> None:
    type_("outbox", "confirm", *dead)
    words = ("outbox", "destinations", "replay", "webhook:partnerX", "--yes", "--label")

    assert type_(*words, "first", "--tenant", "acme") == {"replayed": 1}
    assert type_(*words, "second", "--tenant", "acme", "--new-key") == {"replayed": 1}

    rows = act(sqlite_url, lambda ledger: ledger.outbox.find(tenant_id="acme"))
    sent, same, new = (row.idempotency_key for row in rows)
    assert same == sent
    assert new != sent


def test_parked_events_are_listed_by_projector(sqlite_url: str, type_: Type) -> None:
    async def park(ledger: Ledger) -> None:
        async with ledger.database.transaction() as connection:
            for number, projector in enumerate(("default", "default", "audit")):
                event = SourceEvent(
                    id=f"e-{number}", type="paid", stream="s", position=number, version=1, data_bytes=b"{}",
                    metadata_bytes=b"{}", recorded_at=datetime.now(UTC),
                )  # fmt: skip
                await ledger.parked.park(connection, projector, event, "no", tries=1)

    act(sqlite_url, park)

    assert len(type_("projectors", "parked", "list")) == 3
    assert len(type_("projectors", "parked", "list", "--limit", "2")) == 2
    assert [each["id"] for each in type_("projectors", "parked", "list", "--projector", "audit")] == ["e-2"]


# Messages -----------------------------------------------------------------------------------------------------------


def messages(url: str, work: Callable[[Messages], Awaitable[Any]]) -> Any:
    async def main(ledger: Ledger) -> Any:
        opened = Messages(ledger, MemoryClient())
        try:
            return await work(opened)
        finally:
            await opened.aclose()

    return act(url, main)


@pytest.fixture
def people(sqlite_url: str) -> None:
    """Two of one company, one of another, with messages planned for a year."""

    async def work(opened: Messages) -> None:
        for number, tenant in ((1, "acme"), (2, "acme"), (3, "other")):
            await opened.recipients.save(person(number, tenant_id=tenant))
        await opened.planner().run_until_done()

    messages(sqlite_url, work)


def test_recipients_are_listed_and_removed_by_tenant(people: None, type_: Type) -> None:
    def listed(*options: str) -> list[str]:
        return ids(type_("messages", "recipients", "list", *options))

    assert listed() == ["person-1", "person-2", "person-3"]
    assert listed("--tenant", "other") == ["person-3"]
    assert listed("--limit", "2") == ["person-1", "person-2"]
    assert type_("messages", "recipients", "remove", "person-1", "--tenant", "acme") == {"removed": 1}
    assert listed("--tenant", "acme") == ["person-2"]


def test_a_preview_is_one_tenants_and_as_long_as_asked(people: None, type_: Type) -> None:
    words = ("messages", "recipients", "preview", "person-3", "--tenant", "other", "--days")

    assert len(type_(*words, "1100")) == 3
    assert len(type_(*words, "370")) == 1


def test_lint_looks_as_far_as_it_is_told(sqlite_url: str, type_: Type) -> None:
    """Nobody is inside a gap tomorrow; within thirty years somebody born on such a day is."""
    from bullpen.messages import Occasion
    from bullpen.messages.calendar import read_date, read_time

    on = [Occasion(read_date("on", "1990-03-28"), "", read_time("send_at", "02:30"))]
    messages(sqlite_url, lambda opened: opened.recipients.save(person(occasions={"birthday": on})))

    assert type_("messages", "lint", "--days", "1") == []
    assert type_("messages", "lint", "--days", "10960") != []


def test_kinds_of_a_program_are_previewed_and_linted(sqlite_url: str, type_: Type, tmp_path: Path) -> None:
    (tmp_path / "shop_of_options.py").write_text(
        "from bullpen import Bullpen\napp = Bullpen()\napp.use_messages().occasion('namesday', text='Hello {name}')\n"
    )
    (tmp_path / "people.csv").write_text("id,zone,address,namesday,birthday\nada,UTC,ada@x,1990-03-14,1990-03-15\n")
    program = ("--app", "shop_of_options")

    imported = type_(
        "messages", "recipients", "import", "people.csv", "--channel", "email", "--tenant", "acme", *program
    )
    (saved,) = type_("messages", "recipients", "list")
    with_it = type_("messages", "recipients", "preview", "ada", "--tenant", "acme", "--days", "366", *program)
    env = {"BULLPEN_DATABASE_URL": sqlite_url}
    without = cli("messages", "recipients", "preview", "ada", "--tenant", "acme", cwd=tmp_path, env=env)
    unlinted = cli("messages", "lint", cwd=tmp_path, env=env)

    assert imported["saved"] == 1
    assert (saved["channel"], saved["tenantId"]) == ("email", "acme")
    assert {each["occasion"] for each in with_it} == {"namesday", "birthday"}
    linted = cli("messages", "lint", "--json", *program, cwd=tmp_path, env=env)
    (doubt,) = json.loads(linted.out)
    assert linted.code == 1
    assert (doubt["code"], "{name}" in doubt["text"]) == ("unknown-name", True), "and no day that does not exist"
    assert without.code == unlinted.code == 2, "nobody knows what a namesday is"


def test_messages_are_listed_by_recipient_occasion_and_tenant(sqlite_url: str, type_: Type) -> None:
    tomorrow = f"1990-{datetime.now(UTC) + timedelta(days=1):%m-%d}"

    async def work(opened: Messages) -> None:
        await opened.recipients.save(person(1, zone="UTC", occasions={"birthday": tomorrow}, tenant_id="acme"))
        await opened.recipients.save(person(2, zone="UTC", occasions={"anniversary": tomorrow}))
        await opened.planner().run_until_done()

    messages(sqlite_url, work)

    def listed(*options: str) -> list[str]:
        return sorted(row["recipientId"] for row in type_("messages", "list", *options))

    assert listed() == ["person-1", "person-2"]
    assert listed("--recipient", "person-2") == ["person-2"]
    assert listed("--occasion", "birthday") == ["person-1"]
    assert listed("--tenant", "acme") == ["person-1"]
    assert len(listed("--limit", "1")) == 1


def test_a_worker_of_ours_names_its_library_and_no_path_for_a_host() -> None:
    """The server knows of a worker what its connection says: its name, and an address."""
    seen = [ConnectedWorker("mails", "web-1-4711-0a1b2c", "/run/redis.sock:0", 5, 1, "")]
    seen += [ConnectedWorker("mails", "own", "/run/redis.sock:0", 5, 1, "")]
    seen += [ConnectedWorker("mails", "", "10.0.0.7:51234", 5, 1, "ioredis 5.4")]

    shown = [(each["host"], each["pid"], each["name"], each["library"]) for each in _by_process(seen, Counter())]

    assert shown == [
        ("web-1", 4711, None, "bullpen"),
        ("(unix socket)", None, "own", None),
        ("10.0.0.7", None, None, "ioredis 5.4"),
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("queues limits set emails --rate 100", "'100'; write jobs and time, such as 100/1m, or 'none'"),
        ("queues limits set emails --concurrency 0", "'0'; write a whole number of at least 1, or 'none'"),
        ("queues lanes set emails a", "pass --weight, --concurrency, --rate or --size"),
        ("jobs add emails hi --replace-finished", "--replace-finished goes with --id"),
    ],
)
def test_a_wrong_value_is_told_what_may_stand_there(redis_url: str, tmp_path: Path, words: str, said: str) -> None:
    answer = cli(*words.split(), "--redis", redis_url, cwd=tmp_path)

    assert (answer.code, answer.out) == (2, "")
    assert said in " ".join(answer.err.split())
