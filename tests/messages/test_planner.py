"""Recipients and their occasions become messages: once per period, moved with them, cancelled with them."""

from __future__ import annotations

import asyncio
from datetime import date, time
from typing import Any

import pytest

from bullpen.errors import InvalidOption
from bullpen.ledger import Ledger
from bullpen.messages import Late, Messages, MessageStatus, Occasion
from bullpen.messages.occasions import OccasionKind, Occasions, message_id
from tests.databases import ROLES, MakeLedger
from tests.messages.conftest import MakeMessages
from tests.messages.kit import at, person, rows, set_clock


async def planned(messages: Messages) -> list[tuple[str, str, str, str]]:
    """What stands in the table: who, which, when, status."""
    await messages.planner().run_until_done()
    return [
        (row.recipient_id, f"{row.occasion} {row.period}", f"{row.due_at:%Y-%m-%d %H:%M}", str(row.status))
        for row in await rows(messages)
    ]


async def sent(messages: Messages) -> None:
    """Play the sender: everything that is planned counts as sent."""
    async with messages.store.database.transaction() as connection:
        table = messages.store.database.table("bullpen_messages")
        await connection.exec_driver_sql(f"UPDATE {table} SET status = 'SENT' WHERE status = 'CREATED'")


# ---- planning --------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("S-16", "S-19", "X-72")
async def test_messages_are_created_within_the_horizon_at_the_local_time(
    make_messages: MakeMessages, both_ledgers: Ledger
) -> None:
    messages = make_messages(ledger=both_ledgers)
    set_clock(both_ledgers, at("2026-03-12 12:00"))
    zones = {"paris": "Europe/Paris", "york": "America/New_York", "apia": "Pacific/Apia", "far": "Europe/Paris"}
    await messages.recipients.save_many(
        person(name, zone=zone, occasions={"birthday": "1990-04-14" if name == "far" else "1990-03-14"})
        for name, zone in zones.items()
    )

    found = await planned(messages)
    (paris,) = await rows(messages, recipient_id="person-paris")

    assert found == [
        ("person-apia", "birthday 2026", "2026-03-13 20:00", "CREATED"),
        ("person-paris", "birthday 2026", "2026-03-14 08:00", "CREATED"),
    ]
    assert (paris.local_at, paris.zone, paris.number) == ("2026-03-14T09:00", "Europe/Paris", 36)
    set_clock(both_ledgers, at("2026-03-12 14:00"))
    assert ("person-york", "birthday 2026", "2026-03-14 13:00", "CREATED") in await planned(messages)


@pytest.mark.many
@pytest.mark.requirement("S-51", "X-16")
async def test_planning_again_and_by_many_creates_each_message_once(
    make_messages: MakeMessages, both_ledgers: Ledger
) -> None:
    messages = make_messages(ledger=both_ledgers)
    set_clock(both_ledgers, at("2026-03-13 12:00"))
    await messages.recipients.save_many(person(number) for number in range(300))
    planners = [messages.planner() for _ in range(4)]
    for planner in planners:
        planner._batch = 20

    await asyncio.gather(*(planner.run_until_done() for planner in planners))
    # A second set of the same people, as if nothing had been planned yet.
    await messages.recipients.save_many(person(number) for number in range(300))
    await asyncio.gather(*(planner.run_until_done() for planner in planners))

    found = await rows(messages)
    assert len(found) == len({row.recipient_id for row in found}) == 300


@pytest.mark.requirement("X-59")
async def test_what_passed_while_no_planner_ran_is_planned_all_the_same(
    make_messages: MakeMessages, ledger: Ledger
) -> None:
    """Three monthly occurrences went by; each has its message, and its lateness is for its policy to judge."""
    messages = make_messages()
    messages.occasion("rent", text="Rent is due", repeats="monthly", late=Late.send())
    set_clock(ledger, at("2026-01-20 12:00"))
    await messages.recipients.save(person(occasions={"rent": "2025-01-31"}, zone="UTC"))
    set_clock(ledger, at("2026-04-02 12:00"))

    found = await planned(messages)

    assert [(period, when) for _, period, when, _ in found] == [
        ("rent 2026-01", "2026-01-31 09:00"),
        ("rent 2026-02", "2026-02-28 09:00"),
        ("rent 2026-03", "2026-03-31 09:00"),
    ]


async def test_saving_everybody_every_night_forgets_nothing(make_messages: MakeMessages, ledger: Ledger) -> None:
    """An occurrence that passed unplanned, because no planner ran, survives an import of the same data."""
    messages = make_messages()
    set_clock(ledger, at("2026-03-10 12:00"))
    await messages.recipients.save(person(zone="UTC"))
    set_clock(ledger, at("2026-03-16 12:00"))

    await messages.recipients.save(person(zone="UTC", name="Another name"))

    assert [(period, when) for _, period, when, _ in await planned(messages)] == [("birthday 2026", "2026-03-14 09:00")]


async def test_a_one_off_is_planned_once(make_messages: MakeMessages, ledger: Ledger) -> None:
    messages = make_messages()
    messages.occasion("reminder", text="Remember", repeats="once", send_at="17:30")
    set_clock(ledger, at("2026-03-13 12:00"))
    await messages.recipients.save(person(occasions={"reminder": "2026-03-14"}, zone="UTC"))

    first = await planned(messages)
    set_clock(ledger, at("2027-03-14 18:00"))

    assert [each[:3] for each in first] == [("person-1", "reminder 2026-03-14", "2026-03-14 17:30")]
    assert len(await planned(messages)) == 1


async def test_kinds_that_this_program_does_not_know_are_left_to_others(
    make_messages: MakeMessages, ledger: Ledger
) -> None:
    one, other = make_messages(), make_messages()
    one.occasion("namesday", text="Hello")
    set_clock(ledger, at("2026-03-13 12:00"))
    await one.recipients.save(person(occasions={"namesday": "--03-14", "birthday": "1990-03-14"}))

    by_other = await planned(other)
    by_one = await planned(one)

    assert [each[1] for each in by_other] == ["birthday 2026"]
    assert sorted(each[1] for each in by_one) == ["birthday 2026", "namesday 2026"]


async def test_several_dates_of_one_kind_need_labels(make_messages: MakeMessages, ledger: Ledger) -> None:
    messages = make_messages()
    set_clock(ledger, at("2026-03-13 12:00"))
    both = [Occasion(date(2010, 3, 14), "wedding"), Occasion(date(2020, 3, 15), "house", time(7))]

    await messages.recipients.save(person(zone="UTC", occasions={"anniversary": both}))

    await planned(messages)
    found = await rows(messages)
    assert [(row.label, row.number, row.local_at) for row in found] == [
        ("wedding", 16, "2026-03-14T09:00"),
        ("house", 6, "2026-03-15T07:00"),
    ]
    with pytest.raises(InvalidOption, match="a label for each of several dates"):
        person(occasions={"anniversary": ["2010-03-14", "2020-03-15"]})


# ---- changes ---------------------------------------------------------------------------------------------------------


@pytest.mark.requirement("X-72", "S-19")
async def test_who_moves_takes_the_message_along(make_messages: MakeMessages, both_ledgers: Ledger) -> None:
    messages = make_messages(ledger=both_ledgers)
    set_clock(both_ledgers, at("2026-03-13 12:00"))
    await messages.recipients.save(person())
    (before,) = await planned(messages)

    await messages.recipients.save(person(zone="America/New_York"))
    (after,) = await planned(messages)
    (row,) = await rows(messages)

    assert (before[2], after[2]) == ("2026-03-14 08:00", "2026-03-14 13:00")
    assert (row.zone, row.local_at, row.late_at) == ("America/New_York", "2026-03-14T09:00", at("2026-03-15 13:00"))


@pytest.mark.requirement("X-72", "S-51")
async def test_who_moves_after_the_message_was_sent_gets_no_second_one(
    make_messages: MakeMessages, ledger: Ledger
) -> None:
    """It is nine o'clock again where they live now: the same birthday, the same year, one message."""
    messages = make_messages()
    set_clock(ledger, at("2026-03-14 07:00"))
    await messages.recipients.save(person())
    await planned(messages)
    await sent(messages)
    set_clock(ledger, at("2026-03-14 10:00"))

    await messages.recipients.save(person(zone="America/Los_Angeles"))

    assert [each[3] for each in await planned(messages)] == ["SENT"]


@pytest.mark.requirement("X-72")
async def test_who_moves_east_over_their_own_morning_is_late_and_not_forgotten(
    make_messages: MakeMessages, ledger: Ledger
) -> None:
    messages = make_messages()
    set_clock(ledger, at("2026-03-14 02:00"))
    await messages.recipients.save(person(zone="America/New_York"))
    await planned(messages)

    await messages.recipients.save(person(zone="Asia/Tokyo"))

    assert [each[2:] for each in await planned(messages)] == [("2026-03-14 00:00", "CREATED")]


async def test_a_corrected_date_moves_the_message_or_ends_it(make_messages: MakeMessages, ledger: Ledger) -> None:
    messages = make_messages()
    set_clock(ledger, at("2026-03-13 12:00"))
    await messages.recipients.save_many([person(1), person(2)])
    await planned(messages)

    await messages.recipients.save(person(1, occasions={"birthday": "1990-03-20"}))
    await messages.recipients.save(person(2, occasions={"birthday": "1990-01-02"}))

    assert await planned(messages) == [
        ("person-2", "birthday 2026", "2026-03-14 08:00", "CANCELLED"),
        ("person-1", "birthday 2026", "2026-03-20 08:00", "CREATED"),
    ]
    assert (await rows(messages, recipient_id="person-2"))[0].error_code == "DATE_PASSED"


async def test_an_occasion_that_is_gone_takes_its_message_with_it(make_messages: MakeMessages, ledger: Ledger) -> None:
    messages = make_messages()
    set_clock(ledger, at("2026-03-13 12:00"))
    await messages.recipients.save(person(occasions={"birthday": "1990-03-14", "anniversary": "2010-03-14"}))
    await planned(messages)

    await messages.recipients.save(person(occasions={"anniversary": "2010-03-14"}))

    found = {row.occasion: (row.status, row.error_code) for row in await rows(messages)}
    assert found == {
        "birthday": (MessageStatus.CANCELLED, "OCCASION_GONE"),
        "anniversary": (MessageStatus.CREATED, None),
    }


async def test_a_recipient_who_goes_and_comes_back(make_messages: MakeMessages, both_ledgers: Ledger) -> None:
    """Cancelled with them, alive again with them, and still the same message."""
    messages = make_messages(ledger=both_ledgers)
    set_clock(both_ledgers, at("2026-03-13 12:00"))
    await messages.recipients.save(person())
    await planned(messages)
    (before,) = await rows(messages)

    removed = await messages.recipients.remove(["person-1", "nobody"])
    gone = await planned(messages)
    known = await messages.recipients.get("person-1")
    await messages.recipients.save(person())
    back = await planned(messages)
    (after,) = await rows(messages)

    assert (removed, known) == (1, None)
    assert [each[3] for each in gone] == ["CANCELLED"]
    assert [each[3] for each in back] == ["CREATED"]
    assert (after.id, after.error_code) == (before.id, None)
    assert after.fence > before.fence


async def test_replanning_follows_new_rules(make_messages: MakeMessages, ledger: Ledger) -> None:
    """After an update of the time zone database, or when the kind is sent at another time."""
    messages = make_messages()
    set_clock(ledger, at("2026-03-13 12:00"))
    await messages.recipients.save_many(person(number) for number in range(3))
    await planned(messages)
    messages.occasion("birthday", text="Hello", send_at="10:30")

    done = await messages.recipients.replan()

    assert done == 3
    assert {each[2] for each in await planned(messages)} == {"2026-03-14 09:30"}


async def test_a_zone_whose_rules_changed_since_is_computed_anew(make_messages: MakeMessages, ledger: Ledger) -> None:
    """The stored instant is a hint; the period and the rules of today decide."""
    messages = make_messages()
    set_clock(ledger, at("2026-03-13 12:00"))
    await messages.recipients.save(person())
    async with ledger.database.transaction() as connection:  # stored under rules that were an hour different
        await connection.exec_driver_sql("UPDATE bullpen_occasions SET next_due = next_due + 3600000")

    found = await planned(messages)

    assert [each[1:3] for each in found] == [("birthday 2026", "2026-03-14 08:00")]


# ---- what is stored --------------------------------------------------------------------------------------------------


async def test_a_recipient_is_read_back_as_it_was_saved(make_messages: MakeMessages, both_ledgers: Ledger) -> None:
    messages = make_messages(ledger=both_ledgers)
    given = person(
        locale="de-AT",
        attributes={"city": "Wien ✨", "points": 7},
        occasions={
            "birthday": [Occasion(date(4, 2, 29))],
            "anniversary": [Occasion(date(2010, 3, 14), "wedding", time(7, 30))],
        },
    )

    await messages.recipients.save(given)

    assert await messages.recipients.get("person-1") == given


async def test_recipients_are_listed_page_by_page(make_messages: MakeMessages, ledger: Ledger) -> None:
    messages = make_messages()
    await messages.recipients.save_many(person(number, tenant_id=f"t{number % 2}") for number in range(6))

    first = await messages.recipients.find(limit=4)
    rest = await messages.recipients.find(limit=4, after=first[-1].key)

    assert [one.id for one in first + rest] == ["person-0", "person-2", "person-4", "person-1", "person-3", "person-5"]
    assert [one.id for one in await messages.recipients.find(tenant_id="t1")] == ["person-1", "person-3", "person-5"]


async def test_an_unknown_kind_is_refused_before_anything_is_saved(make_messages: MakeMessages, ledger: Ledger) -> None:
    messages = make_messages()

    with pytest.raises(InvalidOption, match="occasion: expected one of birthday, anniversary, got 'divorce'"):
        await messages.recipients.save_many([person(1), person(2, occasions={"divorce": "2010-03-14"})])

    assert await messages.recipients.find() == []


@pytest.mark.parametrize(
    "changes",
    [
        {"id": ""},
        {"id": "x" * 121},
        {"zone": "Paris"},
        {"address": "a\nb"},
        {"channel": ""},
        {"name": 5},
        {"attributes": {"a": [1]}},
        {"attributes": {"a": "\0"}},
        {"attributes": "plan"},
        {"occasions": "birthday"},
        {"attributes": {"a": "x" * 30_000}},
        {"occasions": {"birthday": "14.3.1990"}},
        {"occasions": {"birthday": Occasion.__new__}},
    ],
)
def test_a_recipient_is_checked_when_it_is_made(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        person(**changes)


def test_the_id_of_a_message_tells_everything_apart() -> None:
    parts = ("t", "ada", "birthday", "", "2026")
    different = {
        message_id(*parts),
        message_id("", "tada", "birthday", "", "2026"),
        message_id("t", "ad", "abirthday", "", "2026"),
        message_id("t", "ada", "birthday", "2", "026"),
        message_id("t", "ada", "birthday", "", "2027"),
    }

    assert len(different) == 5
    assert message_id(*parts) == message_id(*parts)


@pytest.mark.parametrize("name", ["", "Birthday", "dlq", "a.b", "x" * 61, 5])
def test_the_name_of_a_kind_is_also_a_routing_key(name: Any) -> None:
    with pytest.raises(InvalidOption, match="not 'dlq'"):
        OccasionKind(name=name)
    with pytest.raises(InvalidOption, match="one of birthday, anniversary"):
        Occasions().get(name)


async def test_row_level_security_keeps_tenants_apart(
    postgres_server: Any, guarded_database: str, make_ledger: MakeLedger, make_messages: MakeMessages
) -> None:
    """A process with the tenant role sees, changes and removes its own people, and nobody else's."""
    service = make_messages(ledger=make_ledger(postgres_server.url(guarded_database, role=ROLES.service), roles=ROLES))
    tenant_ledger = make_ledger(postgres_server.url(guarded_database, role=ROLES.tenant), roles=ROLES, duty="tenant")
    tenant = make_messages(ledger=tenant_ledger)
    for each in (service.store.database, tenant_ledger.database):
        each.clock_offset_ms = 0
    await service.recipients.save(person("theirs", tenant_id="other"))
    await tenant.recipients.save(person("mine", tenant_id="own"))

    await tenant.recipients.remove(["person-theirs"], tenant_id="own")

    assert [one.id for one in await tenant.recipients.find(tenant_id="own")] == ["person-mine"]
    assert await tenant.recipients.find(tenant_id="own", ids=["person-theirs"]) == []
    assert {one.id for one in await service.recipients.find()} == {"person-mine", "person-theirs"}
