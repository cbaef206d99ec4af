"""A whole leap year on a clock that jumps: everybody gets one message, in its minute, at the right local time.

What is expected is computed here, from the offsets of the zones and without our calendar. The long form
(BULLPEN_TEST_LONG=1) has 100 000 people in 40 zones, on PostgreSQL.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, date, datetime, time, timedelta
from functools import cache
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from bullpen.ledger import Ledger
from bullpen.messages import Messages, MessageStatus, Occasion, Recipient
from bullpen.plugins.transports.memory import MemoryBroker, MemoryClient
from tests.databases import MakeLedger
from tests.messages.conftest import MakeMessages
from tests.messages.kit import QUICK, Provider, Told, set_clock

LONG = os.environ.get("BULLPEN_TEST_LONG") == "1"
YEAR = 2028
MINUTE = timedelta(minutes=1)
NINE = time(9)

pytestmark = pytest.mark.timeout(7_200 if LONG else 240)

FEW_ZONES = (
    "Europe/Paris",
    "America/New_York",
    "Australia/Lord_Howe",  # changes by half an hour
    "Asia/Kathmandu",  # 5:45 ahead
    "Pacific/Kiritimati",  # 14 hours ahead
    "Pacific/Pago_Pago",  # 11 hours behind, next door
    "Africa/Cairo",  # changes at midnight
    "America/Santiago",  # changes at midnight, in the south
)
MANY_ZONES = (
    *FEW_ZONES,
    *("Europe/London", "Europe/Dublin", "Europe/Lisbon", "Europe/Berlin", "Europe/Athens", "Europe/Istanbul"),
    *("America/Los_Angeles", "America/Denver", "America/Chicago", "America/St_Johns", "America/Sao_Paulo"),
    *("America/Havana", "America/Bogota", "America/Phoenix", "America/Anchorage", "Atlantic/Azores"),
    *("Africa/Casablanca", "Africa/Lagos", "Africa/Johannesburg", "Asia/Tokyo", "Asia/Kolkata", "Asia/Tehran"),
    *("Asia/Jerusalem", "Asia/Beirut", "Asia/Shanghai", "Australia/Sydney", "Australia/Adelaide"),
    *("Australia/Brisbane", "Pacific/Auckland", "Pacific/Chatham", "Pacific/Apia", "Pacific/Honolulu"),
)
CHANGE_DAYS = (date(YEAR, 3, 26), date(YEAR, 10, 29))
"""Days on which Europe changes its clocks, at 01:00 UTC."""


# ---- what must come of it --------------------------------------------------------------------------------------------


@cache
def offsets_around(zone: str, day: date) -> tuple[timedelta, ...]:
    """Offsets from UTC within two days of a local day, in the order of time."""
    noon = datetime.combine(day, time(12), UTC)
    hours = (noon + timedelta(hours=hour) for hour in range(-48, 49))
    found = [(moment.astimezone(ZoneInfo(zone)).utcoffset() or timedelta()) for moment in hours]
    return tuple(offset for offset, _ in itertools.groupby(found))


def expected_instant(zone: str, day: date, at: time) -> datetime:
    """The first instant at which clocks show it; if they never do, what the clocks before the change would call so."""
    wanted = datetime.combine(day, at, UTC)
    candidates = sorted(wanted - offset for offset in offsets_around(zone, day))
    for candidate in candidates:
        if candidate.astimezone(ZoneInfo(zone)).replace(tzinfo=UTC) == wanted:
            return candidate
    return wanted - offsets_around(zone, day)[0]


START, END = datetime(YEAR - 1, 12, 28, tzinfo=UTC), datetime(YEAR + 1, 1, 1, tzinfo=UTC)


def expected_between(zone: str, day: date, at: time) -> dict[str, datetime]:
    """By period. On the other side of the date line the next year begins before this one ends everywhere."""
    found = {}
    for year in (YEAR - 1, YEAR, YEAR + 1):
        if (day.month, day.day) == (2, 29) and year != YEAR:
            continue
        instant = expected_instant(zone, day.replace(year=year), at)
        if START < instant < END:
            found[str(year)] = instant
    return found


def people(count: int, zones: tuple[str, ...]) -> Iterator[tuple[Recipient, dict[str, datetime]]]:
    """People with birthdays spread over the year, and more on the days that are difficult."""
    difficult = [*CHANGE_DAYS, date(YEAR, 2, 29), date(YEAR, 1, 1), date(YEAR, 12, 31)]
    first = date(YEAR, 1, 1)
    step = 1 if LONG else 36
    for number in range(count):
        zone = zones[number % len(zones)]
        at = NINE
        if number % 5 == 0:
            day = difficult[number // 5 % len(difficult)]
            if day in CHANGE_DAYS and number % 2:
                at = time(2, 30)  # skipped in March and doubled in October, in Paris
        else:
            day = first + timedelta(days=(number // len(zones) * step + number) % 366 // step * step)
        born = date(1992 if (day.month, day.day) == (2, 29) else 1990, day.month, day.day)
        person = Recipient(
            id=f"p{number}",
            zone=zone,
            channel="email",
            address=f"p{number}@example.com",
            occasions={"birthday": Occasion(born, send_at=None if at == NINE else at)},
        )
        yield person, expected_between(zone, day, at)


# ---- the year --------------------------------------------------------------------------------------------------------


@pytest.fixture
def year_ledger(request: pytest.FixtureRequest, make_ledger: MakeLedger) -> Ledger:
    return make_ledger(request.getfixturevalue("postgres_url" if LONG else "sqlite_url"))


def ticks(expected: dict[datetime, int]) -> list[datetime]:
    """Minutes in which something must happen, and every minute of the hours around the changes."""
    around = {
        datetime.combine(day, time(0), UTC) + minute * MINUTE
        for day in CHANGE_DAYS
        for minute in range(0, 240, 1 if LONG else 15)
    }
    return sorted(around | expected.keys())


@pytest.mark.requirement("S-1", "S-16", "S-18", "S-19", "S-51", "X-58", "X-59", "X-72")
async def test_everybody_gets_one_message_in_its_minute(
    make_messages: MakeMessages, year_ledger: Ledger, broker: MemoryBroker, told: Told
) -> None:
    """Two schedulers share the work, and every tenth tick runs twice."""
    provider = Provider(ledger=year_ledger)
    client = MemoryClient(broker, policy=QUICK, concurrency=50)
    messages = make_messages(provider, ledger=year_ledger, client=client, scheduler_look_ahead_ms=0)
    expected: dict[tuple[str | None, str], datetime] = {}
    per_minute: dict[datetime, int] = defaultdict(int)
    set_clock(year_ledger, START)
    for batch in _batches(people(100_000 if LONG else 800, MANY_ZONES if LONG else FEW_ZONES)):
        await messages.recipients.save_many(person for person, _ in batch)
        for person, periods in batch:
            for period, instant in periods.items():
                expected[person.id, f"birthday-{period}"] = instant
                per_minute[instant] += 1
    await messages.sender().start()

    schedulers = [messages.scheduler(), messages.scheduler()]
    done, settled = 0, set[str]()
    for number, minute in enumerate(ticks(per_minute)):
        set_clock(year_ledger, minute)
        runs = schedulers if number % 10 == 0 else schedulers[number % 2 :][:1]
        await asyncio.gather(*(scheduler.run_once() for scheduler in runs))
        done += per_minute.get(minute, 0)
        # Written down before the clock goes on: a sender that is frozen for a day has lost its lease.
        while done and len(settled) < done:
            await told.wait("messages.settled")
            settled.update(fields["message_id"] for fields in told.take("messages.settled"))
        assert len(provider.delivered) == done, f"early at {minute}"

    await _check(messages, provider, expected)


async def _check(messages: Messages, provider: Provider, expected: dict[tuple[str | None, str], datetime]) -> None:
    assert len(provider.calls) == len(provider.delivered) == len(expected)
    for key, message in provider.delivered.items():
        instant = expected[message.user_id, message.source_event_id]
        assert timedelta(0) <= provider.at[key] - instant < MINUTE, (message.user_id, instant, provider.at[key])
    for row in await messages.store.find(limit=2 * len(expected)):
        if row.due_at >= END:
            continue  # planned for the next year already
        assert row.status is MessageStatus.SENT
        shown = row.due_at.astimezone(ZoneInfo(row.zone)).strftime("%Y-%m-%dT%H:%M")
        assert row.local_at == shown
        assert row.local_at.endswith(("T09:00", "T02:30")) or row.local_at in GAPS, row


GAPS = {f"{CHANGE_DAYS[0]}T03:30"}
"""Half past two in the night in which it did not exist in Paris."""


def _batches(given: Iterator[Any]) -> Iterator[list[Any]]:
    while batch := list(itertools.islice(given, 500)):
        yield batch
