"""The doctor finds what cannot go on by itself, says what to do, and changes nothing."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from bullpen import Bullpen, Connection, Job, Queue, Worker
from bullpen.ledger import Ledger, OutboxItem, tables
from bullpen.ops.alert_options import SymptomLimits
from bullpen.ops.doctor import Advice, Level, examine
from bullpen.ops.exporter import LedgerSource, ServerSource
from bullpen.ops.symptoms import RULES, queue_symptoms, signs_of_queue
from bullpen.outbox import EventRoutes
from bullpen.plugins.sources.sql import SqlEvents
from bullpen.ports.source import SourceEvent
from bullpen.settings import Settings
from bullpen.testing import RedisServer
from bullpen.testing.contracts.source import an_event
from tests.conftest import StartServer
from tests.databases import MakeLedger, item
from tests.flows._cli import cli
from tests.outbox.kit import SpyChannel


def worst(found: list[Advice], subject: str) -> dict[str, Advice]:
    return {advice.check: advice for advice in found if advice.subject == subject and advice.level > Level.GOOD}


async def ask(url: str, ledger: Ledger | None = None) -> list[Advice]:
    connection = Connection(url)
    try:
        return await examine(connection, "bull", ledger)
    finally:
        await connection.aclose()


@pytest.mark.requirement("W-75", "X-42")
@pytest.mark.leaves_queue_broken
async def test_what_cannot_go_on_is_found_with_its_fix(redis_url: str, redis_server: RedisServer) -> None:
    client: Any = redis_server.client()
    async with Queue("mails", connection=redis_url) as queue:
        await queue.add("mail")
        await queue.add("bad")
        client.hset("bull:mails:2", "data", "{not json")
        await queue.pause()
        client.lpush("bull:mails:active", "77")
        client.hset("bull:mails:77", mapping={"name": "mail", "data": "{}", "opts": "{}", "timestamp": "1"})
        client.zadd("bull:mails:waiting-children", {"88": 1})
        client.hset("bull:mails:99", mapping={"name": "mail", "data": "{}", "opts": "{}", "timestamp": "1"})
        client.hset("bull:mails:88", mapping={"name": "mail", "data": "{}", "opts": "{}", "timestamp": "1"})
    before = {key: client.dump(key) for key in client.scan_iter("bull:*")}

    found = await ask(redis_url)

    mails = worst(found, "queue mails")
    assert set(mails) == {
        *("paused", "workers", "lost jobs", "blocked parents", "jobs that can never run", "orphaned keys"),
    }
    assert "(99)" in mails["orphaned keys"].message
    assert "remove_orphans" in mails["orphaned keys"].fix
    assert mails["paused"].fix == "bullpen queues resume mails"
    assert "77" in mails["lost jobs"].message
    assert "88" in mails["blocked parents"].message
    assert "(2)" in mails["jobs that can never run"].message
    library = next(advice for advice in found if advice.check == "library")
    assert "last written by bullpen:" in library.message
    server = next(advice for advice in found if advice.check == "persistence")
    assert (server.level, server.fix) == (Level.WARNING, "Set `appendonly yes`")
    assert [advice for advice in found if advice.level > Level.GOOD and not advice.fix] == [], "each with its fix"
    assert {key: client.dump(key) for key in client.scan_iter("bull:*")} == before
    assert [advice.level for advice in found] == sorted((advice.level for advice in found), reverse=True)


async def test_a_queue_that_is_looked_after_is_good(redis_url: str) -> None:
    async def handle(job: Job) -> None: ...

    async with Queue("mails", connection=redis_url) as queue, Worker("mails", handle, connection=redis_url):
        await (await queue.add("mail")).result(timeout=20_000)
        found = await ask(redis_url)
    assert worst(found, "queue mails") == {}
    assert any(advice.check == "workers" and "1 connected" in advice.message for advice in found)


async def test_late_wakeups_are_told(redis_url: str, redis_server: RedisServer) -> None:
    async with Queue("mails", connection=redis_url) as queue:
        await queue.add("mail")
    notes = [f"{number} 1767225600000" for number in (3, 1, 2, 1)]
    for name, note in zip(("bplate", "bplateres", "bplaterun", "bplatecan"), notes, strict=True):
        redis_server.command("HSET", "bull:mails:meta", name, note)

    told = [advice for advice in await ask(redis_url) if advice.check == "late wake-ups"]

    assert sorted(advice.message for advice in told) == [
        "1 request to cancel was found only by a fallback poll of a worker, the last at 2026-01-01 00:00:00 UTC",
        "1 wait for a result was found only by a fallback poll, the last at 2026-01-01 00:00:00 UTC",
        "2 waits for a run were found only by a fallback poll, the last at 2026-01-01 00:00:00 UTC",
        "3 jobs were found only by a fallback poll of a worker, the last at 2026-01-01 00:00:00 UTC",
    ]
    assert all(advice.level is Level.WARNING and advice.fix for advice in told)


@pytest.mark.cuts_wakeups
async def test_late_wakeups_of_dispatcher_and_projector_are_told_too(
    redis_url: str, postgres_url: str, make_ledger: MakeLedger, tmp_path: Path
) -> None:
    """Rows and events of a program that does not notify, beside an app that relies on it. Whoever asks is another
    process, so a counter in memory does not help."""
    environ = {
        "BULLPEN_DATABASE_URL": postgres_url,
        "BULLPEN_REDIS_URL": redis_url,
        "BULLPEN_EMBEDDED": "never",
        "BULLPEN_OUTBOX_TICK_INTERVAL_MS": "300",
    }
    ledger, silent = make_ledger(postgres_url), make_ledger(postgres_url, notify=False)
    app, spy, routes = Bullpen(settings=Settings.load(environ=environ, start=tmp_path)), SpyChannel(), EventRoutes()
    app.use_outbox().route("webhook:*", spy)

    @routes.on("payment.completed.v1", to="webhook:shop", since="beginning")
    def paid(event: Any) -> dict[str, Any]:
        return {"number": event.data["number"]}

    app.projector(routes, source=SqlEvents(app.ledger, poll_ms=300))
    running = asyncio.create_task(app.run(signals=False))
    number = 0

    async def until_told(what: str, write: Callable[[Ledger, int], Awaitable[Any]]) -> None:
        """Nothing counts before the app listens, and only a notification shows that it does."""
        nonlocal number
        while True:
            for writer in (ledger, silent):
                number += 1
                await write(writer, number)
                await spy.until(number)
            await asyncio.sleep(1.2)  # a notification has a second to come
            found = [one.message for one in await ask(redis_url, ledger) if one.check == "late wake-ups"]
            if any(what in message for message in found):
                return

    try:
        async with asyncio.timeout(60):
            await until_told("fallback poll of the dispatcher", lambda by, n: by.outbox.enqueue(item(n)))
            await until_told(
                "fallback poll of the projector",
                lambda by, n: by.events.append(None, "payment-1", [an_event(n)]),
            )
    finally:
        await app.stop()
        await running


async def test_dead_letters_and_work_that_waits_too_long(redis_url: str, redis_server: RedisServer) -> None:
    async def handle(job: Job) -> None:
        raise ValueError("no")

    async with Queue("mails", connection=redis_url, attempts=1) as queue:
        async with Worker("mails", handle, connection=redis_url, dead_letters=True):
            with pytest.raises(Exception, match="no"):
                await (await queue.add("mail")).result(timeout=20_000)
        job = await queue.add("mail")
        client: Any = redis_server.client()
        client.hset(f"bull:mails:{job.id}", "timestamp", job.timestamp - 7_200_000)
        found = await ask(redis_url)
    (kept,) = [each.message for each in found if (each.subject, each.check) == ("queue mails-dlq", "library")]
    assert kept == "1 dead letter to be handled by a person"
    assert worst(found, "queue mails-dlq")["dead letters"].fix == "bullpen dead-letters list mails"
    assert "has waited 2h 00m" in worst(found, "queue mails")["workers"].message


async def test_jobs_that_wait_without_a_worker_are_a_problem_from_the_first_second(redis_url: str) -> None:
    """Whoever runs it after a deployment wants to know now, not after an hour. What is delayed is not late yet."""
    async with Queue("mails", connection=redis_url) as queue:
        await queue.add("later", delay=3_600_000)
        later = worst(await ask(redis_url), "queue mails")["workers"]
        await queue.add("now")
        now = worst(await ask(redis_url), "queue mails")["workers"]

    assert (later.level, now.level) == (Level.WARNING, Level.BROKEN)
    assert now.message.startswith("1 job waits and no worker is connected")
    assert now.fix == "start a worker: bullpen run MODULE:APP"


async def test_announcements_of_dead_rows_need_no_worker(redis_url: str) -> None:
    """With nothing configured each dead row is announced in `outbox.dead`, and nothing of ours works on it: to start a
    worker would be bad advice. The dead rows themselves are told of."""
    async with Queue("outbox.dead", connection=redis_url) as queue:
        await queue.add("outbox.dead.v1")
        assert "workers" not in worst(await ask(redis_url), "queue outbox.dead")
        assert [sign async for sign in signs_of_queue(queue, SymptomLimits(no_worker_ms=1, queue_late_ms=1))] == []


@pytest.mark.parametrize("rights", [("~bull:mails:*",), ("~*", "-scan"), ("~*", "-lrange", "-client|list")], ids=str)
async def test_what_may_not_be_asked_is_said_and_the_rest_is_asked(
    redis_url: str, redis_server: RedisServer, rights: tuple[str, ...], tmp_path: Path
) -> None:
    """A user that sees only its own queues still has to hear what is wrong with them."""
    client: Any = redis_server.client()
    async with Queue("mails", connection=redis_url) as mails, Queue("others", connection=redis_url) as others:
        await mails.add("mail")
        await others.add("secret")
    client.execute_command("ACL", "SETUSER", "guest", "reset", "on", ">word", "+@all", "&*", *rights)
    address = redis_url.replace("redis://", "redis://guest:word@")
    try:
        command = partial(cli, "doctor", "--redis", address, "--json", cwd=tmp_path, env={"BULLPEN_EMBEDDED": "never"})
        answer = await asyncio.to_thread(command)
    finally:
        client.execute_command("ACL", "DELUSER", "guest")

    found = {(each["subject"], each["check"]): each for each in json.loads(answer.out)}
    forbidden = {place for place, each in found.items() if "cannot be asked" in each["message"]}
    if rights == ("~bull:mails:*",):
        assert forbidden == set()  # what it may not read is no queue of its own, and not listed
        assert (found["queue mails", "workers"]["level"], answer.code) == ("broken", 1)
    elif "-scan" in rights:
        assert forbidden == {("all queues", "list")}
        assert answer.code == 0
    else:
        assert ("queue mails", "jobs that can never run") in forbidden
        assert found["queue mails", "workers"]["level"] == "unknown"
        assert ("queue mails", "library") in found


async def test_a_server_that_is_away_is_told_and_nothing_else_is_asked() -> None:
    found = await ask("redis://127.0.0.1:1")
    assert [advice.level for advice in found] == [Level.BROKEN]
    assert "BULLPEN_REDIS_URL" in found[0].fix


def test_why_a_server_is_away_is_said_once(tmp_path: Path) -> None:
    answer = cli("doctor", "--redis", "redis://127.0.0.1:1", cwd=tmp_path, env={"BULLPEN_EMBEDDED": "never"})

    assert answer.code == 1
    assert (answer.out + answer.err).count("cannot connect to 127.0.0.1:1") == 1


async def test_a_ledger_is_asked_too(redis_url: str, ledger: Ledger) -> None:
    assert worst(await ask(redis_url, ledger), f"ledger {ledger.database.address}") == {}
    item = OutboxItem(
        integration_type="webhook:shop", event_type="paid", payload={}, source_stream_id="orders", source_event_id="1"
    )
    await ledger.outbox.bury(item, "no route", code="PERMANENT", attempts=3)
    found = worst(await ask(redis_url, ledger), f"ledger {ledger.database.address}")
    assert "dead rows" in found


async def test_what_alerts_tell_of_the_doctor_finds_in_the_same_words(redis_url: str, ledger: Ledger) -> None:
    rows = [
        OutboxItem(
            integration_type=f"webhook:{name}", event_type="paid", source_stream_id="orders", source_event_id=name
        )
        for name in ("lost", "late")
    ]
    await ledger.outbox.enqueue_many(rows)
    await ledger.outbox.claim_due_batch("dies", 1, lease_ms=1_000)
    ledger.database.clock_offset_ms = 3_600_000
    due_at = datetime.now(UTC)
    message = (
        "INSERT INTO {messages} (id, recipient_id, occasion, period, channel, zone, local_at, due_at) VALUES "
        f"('{uuid.uuid4()}', 'ada', 'birthday', '2030', 'email', 'UTC', '2030-01-01T09:00', :due)"
    )
    await _execute(ledger, message, due=due_at if ledger.database.is_postgres else int(due_at.timestamp() * 1000))
    run = (
        "INSERT INTO {runs} (id, tenant_id, version_id, payload, status) VALUES "
        f"('{uuid.uuid4()}', 'acme', 'v1', '[]', 'RUNNING')"
    )
    await _execute(ledger, run)

    address = f"ledger {ledger.database.address}"
    found = {advice.check: advice for advice in await ask(redis_url, ledger) if advice.subject.startswith(address)}

    for rule in ("outbox_late", "outbox_claimed", "scheduler_late", "run_stuck"):
        advice = found[RULES[rule].check]
        assert (advice.level, bool(advice.fix)) == (Level.BROKEN, True), rule
    assert found["dispatcher"].subject == f"{address} webhook:late"
    assert found["dispatcher"].message.startswith("1 row waits, ")
    assert "`app.use_outbox()`" in found["dispatcher"].fix, "an app without it runs no dispatcher"


async def _execute(ledger: Ledger, statement: str, **values: Any) -> None:
    names = {"messages": tables.messages.name, "runs": tables.runs.name}
    text = statement.format(**{key: ledger.database.table(name) for key, name in names.items()})
    async with ledger.database.transaction() as connection:
        await connection.execute(sa.text(text), values)


async def test_tables_that_are_missing_are_broken(redis_url: str, tmp_path: Path) -> None:
    async with Ledger(f"sqlite:///{tmp_path / 'empty.sqlite3'}") as ledger:
        found = await ask(redis_url, ledger)
    (schema,) = [advice for advice in found if advice.check == "schema"]
    assert (schema.level, schema.fix) == (Level.BROKEN, "bullpen migrate")


async def test_the_command_shows_advice_and_its_exit_code_tells(redis_url: str, tmp_path: Path) -> None:
    env = {"BULLPEN_EMBEDDED": "never"}
    run = partial(cli, "doctor", "--redis", redis_url, cwd=tmp_path, env=env)
    shown = await asyncio.to_thread(partial(cli, "doctor", "--redis", redis_url, "--all", cwd=tmp_path, env=env))
    assert shown.code == 0
    assert "persistence" in shown.out
    assert "checks passed" in (await asyncio.to_thread(run)).out
    as_json = await asyncio.to_thread(partial(cli, "doctor", "--redis", redis_url, "--json", cwd=tmp_path, env=env))
    assert {"level", "subject", "check", "message", "fix"} == set(json.loads(as_json.out)[0])
    away = await asyncio.to_thread(partial(cli, "doctor", "--redis", "redis://127.0.0.1:1", cwd=tmp_path, env=env))
    assert away.code == 1


async def test_with_strict_a_warning_is_a_failure_too(redis_url: str, tmp_path: Path) -> None:
    """The test server has no persistence: a warning."""
    run = partial(cli, "doctor", "--redis", redis_url, cwd=tmp_path, env={"BULLPEN_EMBEDDED": "never"})
    codes = [(await asyncio.to_thread(run)).code]
    codes.append((await asyncio.to_thread(partial(run.func, *run.args, "--strict", **run.keywords))).code)

    assert codes == [0, 1]


async def test_the_level_that_outlives_a_failover_is_told_from_the_replicas(start_server: StartServer) -> None:
    """One replica of two may have the job, and the other be promoted."""
    primary = start_server("valkey", args=("--repl-diskless-sync-delay", "0"))
    assert "replicas" not in {advice.check for advice in await ask(primary.url)}
    for _ in range(2):
        start_server("valkey", args=("--replicaof", f"127.0.0.1 {primary.port}"))
    async with asyncio.timeout(30):
        while primary.command("INFO", "replication")["connected_slaves"] != 2:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.02)

    (fits,) = [advice for advice in await ask(primary.url) if advice.check == "replicas"]
    primary.command("CONFIG", "SET", "min-replicas-to-write", "1")
    (warns,) = [advice for advice in await ask(primary.url) if advice.check == "replicas"]

    assert (fits.level, "Durability.replicated(2)" in fits.message) == (Level.GOOD, True)
    assert (warns.level, warns.fix) == (
        Level.WARNING,
        "Add with `Durability.replicated(2)` data that must survive a failover",
    )


@pytest.mark.requirement("Q-46")
async def test_what_stays_of_finished_jobs_is_told_and_too_much_of_it_is_a_warning(
    redis_url: str, redis_server: RedisServer
) -> None:
    async with Queue("mails", connection=redis_url) as queue:
        await queue.add("mail")
    told = next(advice for advice in await ask(redis_url) if advice.check == "retention")
    assert (told.level, told.subject) == (Level.GOOD, "queue mails")
    assert "1000 completed jobs are kept for 24 h, failed ones with a dead letter for 7 days" in told.message

    client: Any = redis_server.client()
    pipeline = client.pipeline(transaction=False)
    for number in range(10_001):
        pipeline.zadd("bull:mails:completed", {f"old-{number}": number + 1})
        pipeline.hset(f"bull:mails:old-{number}", mapping={"name": "n", "finishedOn": number + 1, "returnvalue": "1"})
    pipeline.execute()
    told = worst(await ask(redis_url), "queue mails")["retention"]
    assert told.message.startswith("10001 completed and 0 failed jobs are stored")
    assert "remove_on_complete" in told.fix


async def test_alerts_and_exporter_do_not_wait_for_a_reader_of_announcements(redis_url: str) -> None:
    """Nobody must read them: neither doctor, nor alerts, nor the exporter may call that broken."""
    connection = Connection(redis_url)
    async with Queue("outbox.dead", connection=connection) as queue:
        await queue.add("outbox.dead.v1", {"outboxId": "1"})
        late = SymptomLimits(queue_late_ms=1, no_worker_ms=1)
        await asyncio.sleep(0.01)

        found = await ask(redis_url)
        signs = await queue_symptoms(connection, "bull", late)
        exported = {metric.name: metric.samples for metric in await ServerSource(connection, "bull").read()}
    await connection.aclose()

    assert worst(found, "queue outbox.dead") == {}
    assert signs == []
    assert [sample.value for sample in exported["bullpen_queue_oldest_waiting_seconds"]] == [0.0]
    assert list(exported["bullpen_queue_workers"]) == []


async def test_destinations_that_get_nothing_and_parked_events_are_told(
    redis_url: str, ledger: Ledger, tmp_path: Path
) -> None:
    await ledger.outbox.enqueue(item(integration_type="webhook:off"))
    await ledger.destinations.disable("webhook:off", by="ada")
    await ledger.destinations.trip("webhook:broken", pause_ms=60_000, longest_ms=60_000)
    event = SourceEvent("e-1", "payment-1", "payment.made", 0, 1, datetime.now(UTC), b"{}", b"{}")
    async with ledger.database.transaction() as connection:
        await ledger.parked.park(connection, "default", event, "KeyError: 'x'", tries=5, route="partner")

    found = {(each.subject, each.check): each for each in await ask(redis_url, ledger)}
    exported = {metric.name: metric.samples for metric in await LedgerSource(ledger).read()}

    off, broken = found["destination webhook:off", "disabled"], found["destination webhook:broken", "broken"]
    assert (off.level, "1 row to deliver" in off.message) == (Level.WARNING, True)
    assert (broken.level, "opened 1 time since it last worked" in broken.message) == (Level.WARNING, True)
    parked = found[f"ledger {ledger.database.address}", "parked events"]
    assert (parked.level, parked.fix) == (Level.WARNING, "bullpen projectors parked list")
    is_broken = exported["bullpen_outbox_destination_broken"]
    assert {each.labels["integration_type"]: each.value for each in is_broken} == {
        "webhook:broken": 1.0,
        "webhook:off": 0.0,
    }
    assert [each.value for each in exported["bullpen_outbox_destination_disabled"]] == [1.0]
    assert [each.value for each in exported["bullpen_projector_parked_events"]] == [1.0]
    url = ledger.database.url.render_as_string(hide_password=False)
    overview = await asyncio.to_thread(
        partial(cli, "dead-letters", "stats", "--redis", redis_url, cwd=tmp_path, env={"BULLPEN_DATABASE_URL": url})
    )
    assert "parked events of projectors: 1; bullpen projectors parked list" in overview.err


async def test_many_queues_are_examined_with_few_commands(redis_url: str, redis_server: RedisServer) -> None:
    """Each queue was asked for everything by itself, and walked over the keys of the whole server: 118 commands with
    five jobs that wait, more with more. Commands within scripts are counted too, one for each of the five."""
    client: Any = redis_server.client()
    connection = Connection(redis_url)
    queues = [Queue(f"q{number}", connection=connection) for number in range(20)]
    for queue in queues:
        await queue.add_many([("mail", {})] * 5)
    await examine(connection, "bull")  # its scripts are known from here on
    client.config_resetstat()

    found = await examine(connection, "bull")

    stats: Any = client.info("commandstats")
    calls = sum(figures["calls"] for name, figures in stats.items() if "info" not in name and "resetstat" not in name)
    assert {advice.subject for advice in found} >= {f"queue {queue.name}" for queue in queues}
    assert calls <= 20 * len(queues), stats
    for queue in queues:
        await queue.close()
    await connection.aclose()


async def test_data_that_is_long_is_read_too(redis_url: str, redis_server: RedisServer) -> None:
    """It is left out of the sample, and asked for by itself."""
    client: Any = redis_server.client()
    async with Queue("mails", connection=redis_url) as queue:
        await queue.add("good", {"p": "x" * 300_000})
        await queue.add("bad", {"p": "x" * 300_000})
        client.hset("bull:mails:2", "data", "{" + "x" * 300_000)

        found = await ask(redis_url)

        assert (
            "1 job whose data no reader understands (2)"
            in worst(found, "queue mails")["jobs that can never run"].message
        )
        client.hset("bull:mails:2", "data", "{}")
