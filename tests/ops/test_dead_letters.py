"""One console over several stores: a queue's dead letters, its failed set, and dead rows of an outbox."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bullpen import Bullpen, InvalidOption, Queue
from bullpen.errors import DeadLetterNotFound
from bullpen.ledger import Ledger
from bullpen.ops.dead_letters import DeadLetterConsole
from bullpen.outbox.dead_letters import OutboxDeadLetters
from bullpen.ports.dead_letters import DeadLetter, DeadLetterFilter, DeadLetterStore, RedriveReport, fingerprint
from bullpen.settings import Settings
from tests.flows._cli import Answer, cli


def letter(number: int, error: str, **fields: Any) -> DeadLetter:
    made = DeadLetter(
        id=f"dl-{number}-1",
        source="mails",
        message_id=f"m{number}",
        name="send",
        data={"n": number},
        error_message=error,
        failed_at=f"2030-01-01T00:00:{number:02d}.000Z",
        attempts_made=3,
    )
    return replace(made, **fields)


@pytest.fixture
async def stores(redis_url: str, ledger: Ledger) -> AsyncIterator[list[DeadLetterStore]]:
    async with Queue("mails", connection=redis_url) as queue:
        found: list[DeadLetterStore] = [queue.dead_letters, OutboxDeadLetters(ledger.outbox)]
        for number in range(3):
            await found[0].put(letter(number, f"no user {number} at 0x7f{number}a"))
        await found[0].put(letter(3, "disk full, password=hunter2hunter2"))
        await found[1].put(letter(4, "no route to 'host'", source="webhook:shop", tenant_id="acme"))
        await found[1].put(letter(5, "no route to 'other'", source="webhook:shop", tenant_id="zeta"))
        yield found


@pytest.mark.requirement("X-5", "X-40")
async def test_all_stores_are_one_view_grouped_by_what_went_wrong(stores: list[DeadLetterStore]) -> None:
    console = DeadLetterConsole(stores)

    assert await console.depths() == {"mails-dlq": 4, "integration_outbox": 2}
    assert len([found async for found in console.find()]) == 6
    groups = await console.groups()
    assert [(group.store, group.count) for group in groups] == [
        ("mails-dlq", 3),
        ("integration_outbox", 2),
        ("mails-dlq", 1),
    ]
    assert groups[0].error == "no user 2 at 0x7f2a"
    assert groups[0].first_at < groups[0].last_at
    assert "hunter2" not in groups[2].error
    by_kind = [found async for found in console.find(DeadLetterFilter(fingerprint=groups[0].fingerprint))]
    assert {found.letter.message_id for found in by_kind} == {"m0", "m1", "m2"}


@pytest.mark.parametrize(
    ("where", "ids"),
    [
        (DeadLetterFilter(error="DISK"), {"m3"}),
        (DeadLetterFilter(name="send", failed_before=datetime(2030, 1, 1, 0, 0, 1, tzinfo=UTC)), {"m0"}),
        (DeadLetterFilter(failed_after=datetime(2030, 1, 1, 0, 0, 2, 500_000, tzinfo=UTC)), {"m3"}),
        (DeadLetterFilter(name="other"), set()),
    ],
    ids=["error", "before", "after", "name"],
)
async def test_letters_are_found_by_what_is_asked(
    stores: list[DeadLetterStore], where: DeadLetterFilter, ids: set[str]
) -> None:
    console = DeadLetterConsole(stores)
    assert {found.letter.message_id async for found in console.find(where, store="mails-dlq")} == ids


@pytest.mark.requirement("X-40", "X-41")
async def test_one_is_sent_back_or_thrown_away_and_somebody_did_it(
    stores: list[DeadLetterStore], redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    noted: list[tuple[str, str, str]] = []

    async def audit(action: str, store: str, found: DeadLetter | None, by: str, detail: Mapping[str, Any]) -> None:
        noted.append((action, store if found is None else found.message_id, by))

    console = DeadLetterConsole(stores, audit=audit)
    with caplog.at_level(logging.WARNING, "bullpen.dead_letters"):
        assert await console.redrive("mails-dlq", "dl-1-1", by="ada") == "m1"
        await console.discard("mails-dlq", "dl-2-1", by="ada")
    with pytest.raises(DeadLetterNotFound):
        await console.redrive("mails-dlq", "dl-1-1", by="ada")
    with pytest.raises(DeadLetterNotFound):
        await console.discard("mails-dlq", "dl-2-1", by="ada")
    with pytest.raises(InvalidOption, match="the name of the person or program that acts"):
        await console.redrive("mails-dlq", "dl-0-1", by=" ")
    with pytest.raises(InvalidOption, match="one of integration_outbox, mails-dlq"):
        await console.get("typo", "dl-0-1")
    with pytest.raises(InvalidOption, match="one of integration_outbox, mails-dlq"):
        await console.groups(store="typo")

    assert noted == [("redrive", "m1", "ada"), ("discard", "m2", "ada")]
    assert [
        record.getMessage().split(": ")[-1] for record in caplog.records if record.name == "bullpen.dead_letters"
    ] == [
        "redrive by ada",
        "discard by ada",
    ]
    async with Queue("mails", connection=redis_url) as queue:
        assert (await queue.counts()).waiting == 1


async def test_many_are_sent_back_counted_and_what_cannot_stays(stores: list[DeadLetterStore]) -> None:
    console = DeadLetterConsole(stores)
    told: list[RedriveReport] = []

    dry = await console.redrive_many(store="mails-dlq", by="ada", dry_run=True)
    assert (dry.matched, dry.done) == (4, 0)
    some = await console.redrive_many(store="mails-dlq", by="ada", limit=1, on_progress=told.append)
    assert (some.matched, some.done, [report.done for report in told]) == (1, 1, [1])
    rest = await console.redrive_many(store="mails-dlq", by="ada", rate=1_000)
    assert (rest.matched, rest.done, rest.skipped) == (3, 3, ())
    gone = await console.discard_many(store="integration_outbox", by="ada")
    assert gone.done == 2
    assert await console.depths() == {"mails-dlq": 0, "integration_outbox": 0}
    with pytest.raises(InvalidOption, match="rate"):
        await console.redrive_many(by="ada", rate=0)
    with pytest.raises(InvalidOption, match="limit"):
        await console.discard_many(by="ada", limit=0)


async def test_one_that_cannot_be_sent_keeps_nobody_else(stores: list[DeadLetterStore], redis_url: str) -> None:
    async with Queue("mails", connection=redis_url) as queue:
        await queue.add("send", job_id="m1")  # a job of that id waits: its letter cannot be redriven now
    report = await DeadLetterConsole(stores).redrive_many(store="mails-dlq", by="ada")

    assert (report.matched, report.done + len(report.skipped)) == (4, 4)
    assert report.done >= 3


@pytest.mark.requirement("X-41")
async def test_a_tenant_sees_and_touches_its_own_only(stores: list[DeadLetterStore]) -> None:
    acme = DeadLetterConsole(stores, tenant_id="acme")

    assert [found.letter.tenant_id async for found in acme.find()] == ["acme"]
    assert await acme.depths() == {"mails-dlq": 0, "integration_outbox": 1}
    (foreign,) = [found async for found in DeadLetterConsole(stores).find() if found.letter.tenant_id == "zeta"]
    for act in (acme.get(foreign.store, foreign.letter.id), acme.redrive(foreign.store, foreign.letter.id, by="eve")):
        with pytest.raises(DeadLetterNotFound):
            await act
    with pytest.raises(DeadLetterNotFound):
        await acme.discard(foreign.store, foreign.letter.id, by="eve")
    report = await acme.redrive_many(by="eve")
    assert report.done == 1


def test_two_stores_of_one_name_are_refused(stores: list[DeadLetterStore]) -> None:
    with pytest.raises(InvalidOption, match="one store of each name"):
        DeadLetterConsole([stores[0], stores[0]])


def test_a_fingerprint_forgets_what_varies() -> None:
    same = [
        "user 17 not found at 2030-01-01T10:00:00",
        "user 18 not found at 2031-01-01T11:30:00",
    ]
    assert len({fingerprint(letter(1, text)) for text in same}) == 1
    assert fingerprint(letter(1, "user 17 not found")) != fingerprint(letter(1, "user 17 is blocked"))
    assert fingerprint(letter(1, "away", name="a")) != fingerprint(letter(1, "away", name="b"))


async def test_letters_that_go_while_they_are_read_hide_no_others(redis_url: str) -> None:
    async with Queue("mails", connection=redis_url) as queue:
        store = queue.dead_letters
        for number in range(450):
            await store.put(letter(number, "away", failed_at="2030-01-01T00:00:00.000Z"))
        met: list[str] = []
        async for found in DeadLetterConsole([store]).find():
            met.append(found.letter.message_id)
            if int(found.letter.message_id[1:]) < 100:
                await store.discard(found.letter.id)
            await asyncio.sleep(0)
        assert sorted(met) == sorted(f"m{number}" for number in range(450))


@pytest.mark.requirement("X-5", "X-40", "X-42")
async def test_an_app_finds_all_stores_and_the_command_shows_them(
    redis_url: str, sqlite_url: str, tmp_path: Path
) -> None:
    settings = Settings.load(redis_url=redis_url, ledger_url=sqlite_url)
    async with Bullpen(redis_url, settings=settings) as app:
        await app.queue("mails").dead_letters.put(letter(1, "no user 7"))
        await app.queue("mails").dead_letters.put(letter(2, "no user 8"))
        await OutboxDeadLetters(app.ledger.outbox).put(letter(3, "no route", source="webhook:shop"))
        console = await app.dead_letters()
        assert await console.depths() == {"mails-dlq": 2, "integration_outbox": 1}
        other = app.queue("extra").dead_letters
        app.add_dead_letters(other)
        assert "extra-dlq" in await (await app.dead_letters()).depths()

    env = {"BULLPEN_REDIS_URL": redis_url, "BULLPEN_DATABASE_URL": sqlite_url}

    def run(*arguments: str) -> Answer:
        return cli("dead-letters", *arguments, cwd=tmp_path, env=env)

    assert json.loads((await asyncio.to_thread(run, "stats", "--json")).out) == {
        "mails-dlq": 2,
        "integration_outbox": 1,
    }
    shown = await asyncio.to_thread(run, "stats")
    assert shown.out.index("mails-dlq") < shown.out.index("integration_outbox")
    (group,) = json.loads((await asyncio.to_thread(run, "groups", "--store", "mails-dlq", "--json")).out)
    assert (group["count"], group["name"]) == (2, "send")
    assert "no route" in (await asyncio.to_thread(run, "groups")).out
    wrong = await asyncio.to_thread(run, "groups", "--store", "typo")
    assert (wrong.code, "expected one of integration_outbox, mails-dlq" in wrong.err) == (2, True)


async def test_without_any_the_command_says_so(redis_url: str, tmp_path: Path) -> None:
    env = {"BULLPEN_REDIS_URL": redis_url, "BULLPEN_EMBEDDED": "never"}
    for command in ("stats", "groups"):
        answer = await asyncio.to_thread(partial(cli, "dead-letters", command, cwd=tmp_path, env=env))
        assert (answer.code, answer.err.strip()) == (0, "no dead letters anywhere")
