"""Alerts through our own channels: real receivers, several watchers, and a watcher that dies at every step."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest

from bullpen import Bullpen, InvalidOption, Job, NotConfigured, Queue, Worker
from bullpen.app import ROLES as PARTS
from bullpen.ledger import EndpointState, Ledger, OutboxItem, OutboxRow
from bullpen.ledger.incidents import IncidentVerdict
from bullpen.ops.alert_options import AlertTiming, SymptomLimits
from bullpen.ops.alerts import ALERT_EVENT, Seen, Target, Watcher
from bullpen.ops.incidents import judge
from bullpen.ops.symptoms import RULES, Symptom, ledger_symptoms, queue_symptoms
from bullpen.ports.dead_letters import DeadLetter
from bullpen.redis import Connection
from bullpen.settings import Settings
from bullpen.testing import RedisServer
from bullpen.testing.postgres import PostgresServer
from bullpen.testing.receivers import Answer, HttpReceiver, SmtpReceiver
from tests.databases import ROLES, item
from tests.flows._cli import child, cli

HOOK = Target("webhook:ops")
SIGN = Symptom("dead_letters", "mails-dlq", 3, "3 dead letters need attention", "bullpen dead-letters list mails")
SIGN_KEY = (SIGN.rule, SIGN.subject)
ALL_SOURCES = frozenset(rule.source for rule in RULES.values())


class Eyes:
    """A look that a test decides."""

    def __init__(self, *signs: Symptom) -> None:
        self.seen = Seen(signs, ALL_SOURCES)
        self.looks = 0
        self.before: Any = None

    async def __call__(self) -> Seen:
        self.looks += 1
        if self.before is not None:
            await self.before()
        return self.seen


def watcher(ledger: Ledger, eyes: Eyes, **options: Any) -> Watcher:
    telling = AlertTiming(resolve_after_ms=0, hold_ms=0)
    return Watcher(ledger, eyes, options.pop("targets", [HOOK]), **{"telling": telling, "every_ms": 1_000, **options})


async def rows_of(ledger: Ledger) -> list[OutboxRow]:
    return [row for row in await ledger.outbox.find() if row.event_type == ALERT_EVENT]


async def told(ledger: Ledger) -> list[tuple[str, str]]:
    return [(row.payload["alert"], row.payload["state"]) for row in await rows_of(ledger)]


async def eventually(holds: Callable[[], bool], within_s: float = 15.0) -> None:
    async with asyncio.timeout(within_s):
        while not holds():  # noqa: ASYNC110 - the receiver tells nobody
            await asyncio.sleep(0.02)


def later(ledger: Ledger, ms: int) -> None:
    ledger.database.clock_offset_ms += ms


# Watching -----------------------------------------------------------------------------------------------------------


async def test_an_incident_is_stored_with_the_message_that_tells_of_it(ledger: Ledger) -> None:
    eyes = Eyes(SIGN)
    one = watcher(ledger, eyes, label="production")

    await one.watch()
    (row,) = await rows_of(ledger)
    (incident,) = await ledger.incidents.open()
    metrics = await one.collect()

    assert row.payload["text"] == (
        "[bullpen production] dead_letters\nmails-dlq: 3 dead letters need attention\n"
        "fix: bullpen dead-letters list mails"
    )
    (shown,) = row.payload["incidents"]
    assert (shown["subject"], shown["value"], shown["number"], shown["resolvedAt"]) == ("mails-dlq", 3, 1, None)
    assert (incident.rule, incident.message) == ("dead_letters", SIGN.message)
    (sample,) = metrics[0].samples
    assert (metrics[0].name, sample.labels) == ("bullpen_incidents", {"rule": "dead_letters", "subject": "mails-dlq"})
    eyes.seen = Seen([], ALL_SOURCES)
    later(ledger, 1_000)
    await one.watch()
    assert await told(ledger) == [("dead_letters", "open"), ("dead_letters", "resolved")]
    assert await ledger.incidents.open() == []
    assert (await one.collect())[0].samples == []


@pytest.mark.requirement("D-91")
async def test_a_silenced_incident_is_told_again_only_when_the_time_is_up(ledger: Ledger) -> None:
    """Not when it lasts, grows or ends; the next incident of the kind is told. Who silenced it stands in the audit."""
    eyes, one_hour = Eyes(SIGN), timedelta(hours=1)
    one = watcher(ledger, eyes, telling=AlertTiming(resolve_after_ms=0, hold_ms=0, repeat_ms=60_000, growth=10))
    await one.watch()
    until = datetime.now(UTC) + one_hour
    assert await ledger.incidents.silence(*SIGN_KEY, until=until, by="ada", reason="partner knows")
    assert not await ledger.incidents.silence("dead_letters", "nobody", until=until, by="ada")

    eyes.seen = Seen([replace(SIGN, value=5_000)], ALL_SOURCES)
    later(ledger, 600_000)
    await one.watch()
    (incident,) = await ledger.incidents.open()
    assert (incident.silenced_by, incident.silence_reason, incident.value) == ("ada", "partner knows", 5_000)
    assert await told(ledger) == [("dead_letters", "open")]

    later(ledger, 3_600_000)
    await one.watch()
    assert await told(ledger) == [("dead_letters", "open"), ("dead_letters", "repeated")]

    assert await ledger.incidents.silence(*SIGN_KEY, until=until + 9 * one_hour, by="ada")
    assert await ledger.incidents.silence(*SIGN_KEY, until=None, by="bo")
    assert await ledger.incidents.silence(*SIGN_KEY, until=until + 9 * one_hour, by="ada")
    eyes.seen = Seen([], ALL_SOURCES)
    later(ledger, 600_000)
    await one.watch()
    assert await ledger.incidents.open() == []
    eyes.seen = Seen([SIGN], ALL_SOURCES)
    later(ledger, 1_000)
    await one.watch()
    (again,) = await ledger.incidents.open()
    assert (again.number, again.silenced_until) == (2, None)
    assert [state for _, state in await told(ledger)] == ["open", "repeated", "open"]
    entries = [entry for entry in await ledger.audit.read() if entry.action.startswith("incident.")]
    assert [(entry.actor, entry.action) for entry in entries][::-1] == [
        ("ada", "incident.silence"),
        ("ada", "incident.silence"),
        ("bo", "incident.unsilence"),
        ("ada", "incident.silence"),
    ]
    assert entries[-1].subject == "dead_letters/mails-dlq"


@pytest.mark.requirement("D-91")
async def test_a_silence_that_begins_while_a_watcher_looks_stays(ledger: Ledger) -> None:
    """What it writes was read before."""
    eyes = Eyes(SIGN)
    one = watcher(ledger, eyes)
    await one.watch()

    async def silence() -> None:
        until = datetime.now(UTC) + timedelta(hours=1)
        await ledger.incidents.silence(*SIGN_KEY, until=until, by="ada")

    eyes.before = silence
    later(ledger, 1_000)
    await one.watch()
    (incident,) = await ledger.incidents.open()
    assert incident.silenced_by == "ada"


async def test_three_watchers_tell_once(ledger: Ledger) -> None:
    eyes = Eyes(SIGN)
    watchers = [watcher(ledger, eyes) for _ in range(3)]

    for _ in range(4):
        await asyncio.gather(*(each.watch() for each in watchers))
        later(ledger, 1_000)

    assert eyes.looks == 4, "they take turns: three look as often as one"
    assert await told(ledger) == [("dead_letters", "open")]


async def test_a_clock_that_was_set_back_does_not_blind_the_watch(ledger: Ledger) -> None:
    eyes = Eyes()
    later(ledger, 3_600_000)
    await watcher(ledger, eyes).watch()
    later(ledger, -3_600_000)
    await watcher(ledger, eyes).watch()
    assert eyes.looks == 2


async def test_a_watcher_that_dies_while_it_looks_is_replaced(ledger: Ledger) -> None:
    """Its turn is lost, its incident is not: the next turn sees the same sign."""
    eyes = Eyes(SIGN)

    async def die() -> None:
        raise asyncio.CancelledError

    eyes.before = die
    with suppress(asyncio.CancelledError):
        await watcher(ledger, eyes).watch()
    assert await told(ledger) == []
    eyes.before = None
    assert await watcher(ledger, eyes).watch() is None, "not before the turn is over"
    later(ledger, 1_000)
    await watcher(ledger, eyes).watch()
    assert await told(ledger) == [("dead_letters", "open")]


async def test_incident_and_message_are_stored_together_or_not_at_all(ledger: Ledger) -> None:
    """Dying between the two would be an incident that counts as told and that nobody heard of."""
    eyes = Eyes(SIGN)
    turn = await ledger.incidents.take_turn(1_000)
    assert turn is not None

    def dies_between(known: Any, now: datetime) -> IncidentVerdict:
        judged = judge(None, SIGN, now, AlertTiming())
        assert judged.incident is not None
        return IncidentVerdict([judged.incident], [], [cast("OutboxItem", "cannot be stored")])

    with pytest.raises(InvalidOption, match="OutboxItem"):
        await ledger.incidents.apply(turn, dies_between)

    assert (await ledger.incidents.open(), await told(ledger)) == ([], [])
    later(ledger, 1_000)
    await watcher(ledger, eyes).watch()
    assert await told(ledger) == [("dead_letters", "open")]


async def test_who_was_overtaken_writes_nothing(ledger: Ledger) -> None:
    slow, quick = Eyes(SIGN), Eyes()

    async def be_overtaken() -> None:
        later(ledger, 1_000)
        await watcher(ledger, quick).watch()

    slow.before = be_overtaken
    assert await watcher(ledger, slow).watch() is None
    assert await told(ledger) == []


async def test_what_could_not_be_read_is_not_over(ledger: Ledger) -> None:
    eyes = Eyes(SIGN, Symptom("outbox_dead", "outbox", 1, "1 delivery failed finally", "look"))
    await watcher(ledger, eyes).watch()
    eyes.seen = Seen([], frozenset({"redis", "ledger"}))
    later(ledger, 60_000)
    await watcher(ledger, eyes).watch()

    assert [incident.rule for incident in await ledger.incidents.open()] == ["dead_letters"]
    assert ("outbox_dead", "resolved") in await told(ledger)


async def test_many_at_once_are_one_message(ledger: Ledger) -> None:
    signs = [replace(SIGN, subject=f"q{number:03}-dlq") for number in range(50)]
    await watcher(ledger, Eyes(*signs), targets=[Target("sms:ops", "+4930123456"), HOOK]).watch()

    sms, hook = sorted(await rows_of(ledger), key=lambda row: row.integration_type)
    assert (hook.payload["count"], len(hook.payload["incidents"])) == (50, 20)
    assert "and 30 more" in hook.payload["text"]
    assert sms.payload["to"] == "+4930123456"
    assert len(sms.payload["text"]) <= 480


# What is looked at --------------------------------------------------------------------------------------------------


@pytest.fixture
async def connection(redis_url: str) -> AsyncIterator[Connection]:
    made = Connection(redis_url)
    yield made
    await made.aclose()


DAY_MS = 86_400_000
OFF = SymptomLimits(
    dead_letters=0,
    queue_late_ms=0,
    no_worker_ms=0,
    outbox_late_ms=0,
    outbox_claimed_ms=0,
    endpoints_off=0,
    scheduler_late_ms=0,
    run_stuck_ms=0,
)


async def test_queues_show_their_signs_at_their_limits(
    redis_url: str, connection: Connection, redis_server: RedisServer
) -> None:
    async def signs(**limits: int) -> list[tuple[str, str]]:
        found = await queue_symptoms(connection, "bull", replace(OFF, **limits))
        return [(sign.rule, sign.subject) for sign in found]

    client: Any = redis_server.client()
    async with Queue("mails", connection=redis_url) as queue:
        job = await queue.add("mail")
        client.hset(f"bull:mails:{job.id}", "timestamp", job.timestamp - 60_000)
        assert await signs() == []
        assert await signs(no_worker_ms=59_000) == [("no_worker", "mails")]
        assert await signs(no_worker_ms=90_000) == []
        assert await signs(queue_late_ms=59_000) == [("queue_late", "mails")]
        assert await signs(queue_late_ms=90_000) == []
        assert await signs(queue_late_ms=59_000, no_worker_ms=59_000) == [("no_worker", "mails")], "one cause, one sign"
        await queue.pause()
        (late,) = await queue_symptoms(connection, "bull", replace(OFF, queue_late_ms=1_000))
        assert (late.fix, "paused" in late.message) == ("bullpen queues resume mails", True)
        store = queue.dead_letters
        for number in range(2):
            letter = DeadLetter(id=f"dl-{number}-1", source="mails", message_id=str(number), name="mail", data={})
            await store.put(letter)
        assert await signs(dead_letters=2) == [("dead_letters", "mails-dlq")]
        assert await signs(dead_letters=3) == []
        await queue.resume()
        gate = asyncio.Event()

        async def handle(job: Job) -> None:
            await gate.wait()

        async with Worker("mails", handle, connection=redis_url) as worker:
            taken = asyncio.Event()
            worker.on("active", lambda *_: taken.set())
            await asyncio.wait_for(taken.wait(), 15)
            assert await signs(no_worker_ms=1, queue_late_ms=1) == []
            gate.set()


async def test_the_ledger_shows_its_signs_at_their_limits(ledger: Ledger) -> None:
    async def signs(**limits: int) -> list[tuple[str, str]]:
        return [(sign.rule, sign.subject) for sign in await ledger_symptoms(ledger, replace(OFF, **limits))]

    await ledger.outbox.enqueue_many([item(1)])
    (row,) = await ledger.outbox.claim_due_batch("w", lease_ms=1_000)
    later(ledger, 61_000)
    assert await signs() == []
    assert await signs(outbox_claimed_ms=59_000) == [("outbox_claimed", "outbox")]
    assert await signs(outbox_claimed_ms=70_000) == []
    await ledger.outbox.dead_letter(row, "no", code="HTTP_400")
    assert await signs(dead_letters=1) == [("outbox_dead", "outbox")]
    assert await signs(dead_letters=2) == []
    await ledger.outbox.enqueue_many([item(2)])
    later(ledger, 61_000)
    late = await signs(outbox_late_ms=59_000)
    assert ("outbox_late", row.integration_type) in late
    assert await signs(outbox_late_ms=200_000) == []
    await ledger.destinations.disable(row.integration_type, by="ada")
    assert ("outbox_late", row.integration_type) not in await signs(outbox_late_ms=59_000), "somebody wants it so"
    await ledger.destinations.enable(row.integration_type, by="ada")
    await ledger.destinations.trip(row.integration_type, pause_ms=600_000, longest_ms=600_000)

    async def why() -> tuple[str, str]:
        found = await ledger_symptoms(ledger, replace(OFF, outbox_late_ms=59_000))
        (sign,) = [each for each in found if each.subject == row.integration_type]
        return sign.message.rpartition(" ago, and ")[2], sign.command

    reason, command = await why()
    assert reason.startswith("the breaker is open")
    assert command == "bullpen outbox destinations list", "no worker is missing"
    later(ledger, 700_000)
    reason, command = await why()
    assert "since the breaker's pause ended" in reason
    assert command.startswith("bullpen run")


async def test_endpoints_that_were_switched_off_are_a_sign_for_a_day(ledger: Ledger) -> None:
    """And what customers do not take raises no alarm about the service."""
    tenant = {"tenant_id": "acme", "url": "https://example.com/", "events": "[]", "secrets": "[]"}
    gone, broken, _ = [
        (await ledger.endpoints.add({**tenant, "id": f"{name}"}, by="ada", most=10))[0] for name in ("a", "b", "c")
    ]
    await ledger.outbox.enqueue_many(
        [item(n, integration_type=f"endpoint:{name}", tenant_id="acme") for n, name in enumerate("abc")]
    )
    row, *_ = await ledger.outbox.claim_due_batch("w", 1)
    await ledger.outbox.dead_letter(row, "no", code="HTTP_400")
    await ledger.destinations.trip(f"endpoint:{broken.id}", pause_ms=DAY_MS, longest_ms=DAY_MS)
    later(ledger, 61_000)

    async def signs(**limits: int) -> list[tuple[str, str]]:
        return [(sign.rule, sign.subject) for sign in await ledger_symptoms(ledger, replace(OFF, **limits))]

    assert await signs(dead_letters=1, endpoints_off=1) == []
    late = await ledger_symptoms(ledger, replace(OFF, outbox_late_ms=60_000))
    (sign,) = [each for each in late if each.subject == "endpoint:*"]
    assert sign.message.startswith("1 row waits"), "of the one that could be called: no dispatcher runs"
    await ledger.endpoints.note_failure(gone, "HTTP_410", gone=True, after_ms=None, least=1)
    (sign,) = await ledger_symptoms(ledger, replace(OFF, endpoints_off=1))
    assert (sign.rule, sign.value, "a of acme" in sign.message) == ("endpoints_off", 1, True)
    assert await signs(endpoints_off=2) == []
    await ledger.endpoints.set_state("acme", broken.id, EndpointState.DISABLED, by="ada", reason="")
    assert await signs(endpoints_off=2) == [], "somebody wants it so"
    later(ledger, DAY_MS + 61_000)
    assert await signs(endpoints_off=1) == []


# The application ----------------------------------------------------------------------------------------------------


async def test_an_incident_and_its_end_reach_webhook_and_mail(redis_url: str, sqlite_url: str) -> None:
    async with HttpReceiver() as hook, SmtpReceiver() as mail:
        settings = Settings.load(
            redis_url=redis_url,
            ledger_url=sqlite_url,
            smtp_url=f"smtp+plain://127.0.0.1:{mail.port}",
            smtp_sender="Bullpen <bullpen@example.com>",
            alerts_webhook_url=hook.url,
            alerts_email="ops@example.com",
            alerts_label="production",
            alerts_every_ms=100,
            alerts_resolve_after_ms=100,
            outbox_tick_interval_ms=50,
        )
        apps = [Bullpen(redis_url, settings=settings) for _ in range(2)]
        store = apps[0].queue("mails").dead_letters
        await store.put(
            DeadLetter(id="dl-1-1", source="mails", message_id="1", name="mail", data={}, error_message="x")
        )
        runs = [asyncio.create_task(app.run(signals=False, only=["alerts"])) for app in apps]

        (first,) = await hook.until(1)
        await store.discard("dl-1-1")
        (_, second) = await hook.until(2)
        await eventually(lambda: len(mail.mails) == 2)
        await asyncio.gather(*(app.stop() for app in apps))
        await asyncio.gather(*runs)

    begun, over = json.loads(first.body), json.loads(second.body)
    assert (begun["alert"], begun["state"], begun["incidents"][0]["subject"]) == ("dead_letters", "open", "mails-dlq")
    assert (over["state"], over["incidents"][0]["number"]) == ("resolved", begun["incidents"][0]["number"])
    assert first.headers["webhook-id"] != second.headers["webhook-id"]
    assert len(hook.requests) == 2, "two instances, one alert per incident and target"
    assert [each.recipient for each in mail.mails] == ["ops@example.com"] * 2
    assert str(mail.mails[0].message["Subject"]) == "[bullpen production] dead_letters"
    assert "bullpen dead-letters list mails" in mail.mails[0].content.decode()
    assert str(mail.mails[1].message["Subject"]) == "[bullpen production] resolved: dead_letters"


async def test_slack_and_text_messages_get_their_form(redis_url: str, sqlite_url: str) -> None:
    async with HttpReceiver(Answer(body=b"ok")) as slack, HttpReceiver(Answer(201, body=b'{"sid": "S1"}')) as sms:
        settings = Settings.load(
            redis_url=redis_url,
            ledger_url=sqlite_url,
            sms_url=sms.url,
            sms_account="AC1",
            sms_token="t",
            sms_sender="Shop",
            alerts_slack_url=slack.url,
            alerts_sms="+4930123456",
            outbox_tick_interval_ms=50,
        )
        async with Bullpen(redis_url, settings=settings) as app:
            await app.prepare()
            ids = await app.use_alerts().send_test("ada")
            run = asyncio.create_task(app.run(signals=False, only=["alerts"]))
            (post,) = await slack.until(1)
            (text,) = await sms.until(1)
            await app.stop()
            await run

    assert len(ids) == 2
    assert json.loads(post.body) == {"text": "[bullpen] this is a test, sent by ada"}
    assert b"this+is+a+test" in text.body
    assert b"4930123456" in text.body


async def test_a_watcher_that_is_killed_loses_no_alert(redis_url: str, sqlite_url: str, tmp_path: Path) -> None:
    """Two processes watch; the one that was killed may have stored and not delivered, or not even looked."""
    (tmp_path / "shop.py").write_text("from bullpen import Bullpen\napp = Bullpen()\n")
    async with HttpReceiver() as hook, Queue("mails", connection=redis_url) as queue:
        env = {
            "BULLPEN_REDIS_URL": redis_url,
            "BULLPEN_DATABASE_URL": sqlite_url,
            "BULLPEN_ALERTS_WEBHOOK_URL": hook.url,
            "BULLPEN_ALERTS_EVERY_MS": "200",
            "BULLPEN_ALERTS_RESOLVE_AFTER_MS": "200",
            "OUTBOX_TICK_INTERVAL_MS": "100",
        }
        arguments = ("run", "shop:app", "--only", "alerts")
        with child(*arguments, cwd=tmp_path, env=env) as first, child(*arguments, cwd=tmp_path, env=env) as second:
            store = queue.dead_letters
            letter = DeadLetter(id="dl-1-1", source="mails", message_id="1", name="mail", data={}, error_message="x")
            await store.put(letter)
            await hook.until(1, within_s=30)
            await all_sent(sqlite_url)  # a kill in mid-delivery would make the next one wait for the end of its lease
            first.kill()
            await store.discard("dl-1-1")
            await hook.until(2, within_s=30)
            await store.put(replace(letter, id="dl-1-2"))
            await hook.until(3, within_s=30)
            second.kill()
    states = [json.loads(request.body)["state"] for request in hook.requests]
    unique = list(dict.fromkeys((r.headers["webhook-id"], s) for r, s in zip(hook.requests, states, strict=True)))
    assert [state for _, state in unique] == ["open", "resolved", "open"]


async def all_sent(url: str) -> None:
    async with Ledger(url) as ledger, asyncio.timeout(20):
        while any(row.status != "SENT" for row in await rows_of(ledger)):  # noqa: ASYNC110 - in other processes
            await asyncio.sleep(0.05)


async def test_a_server_that_is_away_is_told_of_without_it(sqlite_url: str) -> None:
    """The alert must not need what it tells of: it leaves from the database, straight."""
    async with HttpReceiver() as hook:
        settings = Settings.load(
            redis_url="redis://127.0.0.1:1",
            ledger_url=sqlite_url,
            alerts_webhook_url=hook.url,
            alerts_every_ms=50,
            alerts_hold_ms=1,
            outbox_tick_interval_ms=50,
        )
        async with Bullpen(settings=settings) as app:
            run = asyncio.create_task(app.run(signals=False, only=["alerts"]))
            (request,) = await hook.until(1)
            await app.stop()
            await run
    assert json.loads(request.body)["alert"] == "redis_down"
    assert "127.0.0.1:1 does not answer" in json.loads(request.body)["text"]


async def test_workers_work_although_nobody_can_watch(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings.load(
        redis_url=redis_url,
        ledger_url="postgresql://app@127.0.0.1:1/shop",
        alerts_webhook_url="https://example.com/hook",
    )
    app = Bullpen(redis_url, settings=settings)

    @app.handler("mails")
    async def handle(job: Job) -> str:
        return "sent"

    run = asyncio.create_task(app.run(signals=False))
    assert await (await app.queue("mails").add("mail")).result(timeout=20_000) == "sent"
    await eventually(lambda: "nothing is watched until the database answers again" in caplog.text)
    assert (await app.health.report()).checks["ledger"], "and /readyz says why"
    await app.stop()
    await run


async def test_a_process_that_sees_one_tenant_does_not_watch(
    redis_url: str, guarded_database: str, postgres_server: PostgresServer
) -> None:
    settings = Settings.load(
        redis_url=redis_url,
        ledger_url=postgres_server.url(guarded_database, role=ROLES.tenant),
        ledger_tenant_role=ROLES.tenant,
        ledger_worker_role=ROLES.worker,
        ledger_service_role=ROLES.service,
        ledger_duty="tenant",
        alerts_webhook_url="https://example.com/hook",
    )
    async with Bullpen(redis_url, settings=settings) as app:
        with pytest.raises(NotConfigured, match="alerts cover all tenants"):
            await app.run(signals=False, only=["alerts"])


def test_the_part_has_a_name_and_its_settings_are_checked() -> None:
    assert "alerts" in PARTS
    for name, wrong in (("email", "nobody"), ("sms", "12"), ("webhook_url", "ftp://x"), ("repeat_ms", 0)):
        with pytest.raises(InvalidOption, match=f"alerts_{name}"):
            Settings.load(environ={}, start=None, **{f"alerts_{name}": wrong})
    hidden = {each.key: each.value for each in Settings.load(alerts_slack_url="https://hooks/secret").describe()}
    assert hidden["alerts.slack_url"] == "***"


async def test_the_command_lists_incidents_and_sends_a_test(redis_url: str, sqlite_url: str, tmp_path: Path) -> None:
    env = {"BULLPEN_REDIS_URL": redis_url, "BULLPEN_DATABASE_URL": sqlite_url}

    async def run(*arguments: str, **more: str) -> Any:
        return await asyncio.to_thread(lambda: cli("alerts", *arguments, cwd=tmp_path, env={**env, **more}))

    assert (await run("list")).err.startswith("no incident is open; ")
    nobody = await run("test")
    assert (nobody.code, "set BULLPEN_ALERTS_WEBHOOK_URL" in nobody.err) == (2, True)
    stored = await run("test", "--json", "--by", "ada", BULLPEN_ALERTS_WEBHOOK_URL="https://example.com/hook")
    assert len(json.loads(stored.out)) == 1
    async with Ledger(sqlite_url) as ledger:
        await watcher(ledger, Eyes(SIGN)).watch()
        assert (await rows_of(ledger))[0].payload["text"] == "[bullpen] this is a test, sent by ada"
    (shown,) = json.loads((await run("list", "--json")).out)
    assert (shown["rule"], shown["subject"], shown["fix"]) == ("dead_letters", "mails-dlq", SIGN.fix)
    assert "3 dead letters need attention" in (await run("list")).out
