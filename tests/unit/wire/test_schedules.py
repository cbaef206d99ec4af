"""When schedulers run, without a server: options at the door, the next time, overlap and catch-up."""

import dataclasses
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from bullpen.errors import InvalidOption
from bullpen.wire.schedules import (
    Schedule,
    ScheduleArguments,
    SchedulerRule,
    make_schedule,
    next_runs,
    read_rule,
    read_scheduler,
)

MINUTE = 60_000
HOUR = 60 * MINUTE
NOON = round(datetime(2026, 3, 4, 12, tzinfo=UTC).timestamp() * 1000)
"""A Wednesday."""


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"every": 1_500}, 1_500),
        ({"every": timedelta(seconds=2)}, 2_000),
        ({"every": "90s"}, 90_000),
        ({"every": "5m"}, 300_000),
        ({"every": "2h"}, 7_200_000),
        ({"every": "1d"}, 86_400_000),
        ({"every": "250"}, 250),
    ],
)
def test_an_interval_has_a_unit_or_is_in_milliseconds(given: dict[str, Any], expected: int) -> None:
    assert make_schedule(given).every_ms == expected


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({}, "every"),
        ({"every": 1, "cron": "* * * * *"}, "every"),
        ({"every": 0}, "every"),
        ({"every": "soon"}, "every"),
        ({"every": True}, "every"),
        ({"cron": "nine o'clock"}, "cron"),
        ({"cron": "0 0 30 2 *"}, "cron"),
        ({"every": 1, "immediately": True}, "immediately"),
        ({"overlap": "skip"}, "overlap"),
        ({"jitter": "1s", "limit": 2}, "jitter"),
        ({"cron": 7}, "cron"),
        ({"cron": "@daily", "tz": "Mars/Olympus"}, "tz"),
        ({"every": 1, "tz": "UTC"}, "tz"),
        ({"every": 1_000, "offset": 1_000}, "offset"),
        ({"cron": "@daily", "offset": 1}, "offset"),
        ({"every": 1, "limit": 0}, "limit"),
        ({"every": 1, "start": datetime(2026, 1, 1)}, "start"),  # noqa: DTZ001 - that is the mistake
        ({"every": 1, "end": "tomorrow"}, "end"),
        ({"every": 1, "start": datetime(2026, 1, 2, tzinfo=UTC), "end": datetime(2026, 1, 1, tzinfo=UTC)}, "end"),
        ({"cron": "@daily", "immediately": 1}, "immediately"),
        ({"cron": "@daily", "immediately": True, "start": datetime(2026, 1, 2, tzinfo=UTC)}, "immediately"),
        ({"every": 9, "immediately": True, "offset": 1}, "immediately"),
        ({"every": 1, "overlap": "wait"}, "overlap"),
        ({"every": 1, "catch_up": "all"}, "catch_up"),
        ({"every": 1, "catch_up": 0}, "catch_up"),
        ({"every": 1, "catch_up": True}, "catch_up"),
        ({"every": 1, "grace": 5}, "grace"),
        ({"every": 1, "jitter": -1}, "jitter"),
    ],
)
def test_a_wrong_rule_names_its_option(given: dict[str, Any], option: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        make_schedule(given)

    assert caught.value.option == option


def test_a_wrong_name_tells_the_nearest_right_one() -> None:
    with pytest.raises(InvalidOption, match="did you mean 'overlap'"):
        make_schedule({"every": 1, "overlaps": "skip"})


@pytest.mark.parametrize("name", ScheduleArguments.__annotations__)
def test_every_part_of_a_rule_refuses_what_is_nothing_of_it(name: str) -> None:
    with pytest.raises(InvalidOption):
        make_schedule({"every": 1_000, name: object()})


def test_what_editors_read_is_what_is_checked() -> None:
    written = {"every": "every_ms", "cron": "pattern", "tz": "zone", "start": "start_ms", "end": "end_ms"}
    written |= {"offset": "offset_ms", "grace": "grace_ms", "jitter": "jitter_ms"}

    assert {written.get(name, name) for name in ScheduleArguments.__annotations__} == {
        field.name for field in dataclasses.fields(Schedule)
    }


def test_a_pattern_of_ours_names_its_zone() -> None:
    """Without one a Node worker would take that of its machine."""
    assert make_schedule({"cron": "@daily"}).fields == {"pattern": "@daily", "tz": "UTC"}


def test_the_fields_are_bullmqs_and_the_policies_ours() -> None:
    schedule = make_schedule(
        {
            "every": "1m",
            "start": datetime(2026, 1, 1, tzinfo=UTC),
            "end": datetime(2027, 1, 1, tzinfo=UTC),
            "limit": 9,
            "offset": "5s",
            "overlap": "skip",
            "catch_up": "skip",
            "grace": "10s",
            "jitter": 250,
        }
    )

    start_ms, end_ms = 1_767_225_600_000, 1_798_761_600_000
    wire = {"every": MINUTE, "startDate": start_ms, "endDate": end_ms, "limit": 9}
    ours = {"bpoverlap": "skip", "bpcatchup": "skip", "bpgrace": 10_000, "bpjitter": 250}
    assert schedule.fields == wire | ours
    assert schedule.repeat == wire | {"offset": 5_000}


def runs_after(after_ms: int, count: int, **options: Any) -> list[int]:
    """`next_runs` in ms."""
    after = datetime.fromtimestamp(after_ms / 1000, UTC)
    return [round(run.timestamp() * 1000) for run in next_runs(after=after, count=count, **options)]


class TestPreview:
    def test_an_interval_begins_now_at_its_start_or_at_its_offset(self) -> None:
        assert runs_after(NOON + 5, 2, every="1h") == [NOON + 5, NOON + 5 + HOUR]
        start = datetime(2026, 3, 5, tzinfo=UTC)
        assert runs_after(NOON, 1, every="1h", start=start) == [NOON + 12 * HOUR]
        assert runs_after(NOON, 2, every="1h", offset="5m") == [
            NOON + 5 * MINUTE,
            NOON + HOUR + 5 * MINUTE,
        ]

    def test_a_pattern_follows_its_zone_over_a_clock_change(self) -> None:
        runs = runs_after(NOON + 24 * 24 * HOUR, 2, cron="0 9 * * *", tz="Europe/Berlin")

        shown = [datetime.fromtimestamp(run / 1000, UTC).isoformat() for run in runs]
        assert shown == ["2026-03-29T07:00:00+00:00", "2026-03-30T07:00:00+00:00"]
        before = runs_after(NOON, 1, cron="0 9 * * *", tz="Europe/Berlin")
        assert datetime.fromtimestamp(before[0] / 1000, UTC).hour == 8

    def test_limit_and_end_bound_it(self) -> None:
        assert len(runs_after(NOON, 10, every=1_000, limit=3)) == 3
        end = datetime.fromtimestamp(NOON / 1000, UTC) + timedelta(hours=2, minutes=1)
        assert len(runs_after(NOON, 10, cron="0 * * * *", end=end)) == 2

    def test_immediately_comes_first(self) -> None:
        assert runs_after(NOON + 1, 2, cron="@hourly", immediately=True) == [
            NOON + 1,
            NOON + HOUR,
        ]

    def test_an_end_before_the_first_run_is_refused(self) -> None:
        end = datetime.fromtimestamp(NOON / 1000, UTC) + timedelta(minutes=1)
        with pytest.raises(InvalidOption, match="end"):
            runs_after(NOON, 1, cron="@hourly", end=end)


class TestPlan:
    def test_the_next_interval_follows_the_slot_and_not_the_clock(self) -> None:
        assert SchedulerRule(every_ms=HOUR).plan(NOON, NOON + 7, iteration=2).next_ms == NOON + HOUR

    def test_missed_intervals_are_left_out_but_for_the_one_that_was_taken(self) -> None:
        plan = SchedulerRule(every_ms=HOUR, offset_ms=0).plan(NOON, NOON + 3 * HOUR + 7, iteration=2)

        assert plan.next_ms == NOON + 4 * HOUR and not plan.is_missed

    def test_a_job_that_was_run_before_its_time_does_not_come_again(self) -> None:
        rule = SchedulerRule(pattern="0 9 * * *", zone="UTC")

        assert rule.plan(NOON + 21 * HOUR, NOON, iteration=2).next_ms == NOON + 45 * HOUR

    @pytest.mark.parametrize("rule", [SchedulerRule(every_ms=HOUR), SchedulerRule(pattern="@hourly", zone="UTC")])
    def test_limit_and_end_end_it(self, rule: SchedulerRule) -> None:
        limited = SchedulerRule(every_ms=rule.every_ms, pattern=rule.pattern, zone=rule.zone, limit=3)
        ended = SchedulerRule(every_ms=rule.every_ms, pattern=rule.pattern, zone=rule.zone, ends_ms=NOON - 1)

        assert limited.plan(NOON, NOON, iteration=3).next_ms == NOON + HOUR
        assert limited.plan(NOON, NOON, iteration=4).next_ms is None
        assert ended.plan(NOON - HOUR, NOON, iteration=2).next_ms is None

    @pytest.mark.parametrize("rule", [{"every_ms": HOUR}, {"pattern": "@hourly", "zone": "UTC"}])
    @pytest.mark.parametrize(
        ("late_h", "most", "is_missed", "next_h"),
        [
            (0, 3, False, 1),
            (2, 3, False, 1),
            (3, 3, True, 1),
            (5, 3, True, 3),
            (500, 3, True, 498),
            (500, 1, True, 500),
            (500, 1000, False, 1),
        ],
    )
    def test_so_many_of_the_newest_missed_ones_run(
        self, rule: dict[str, Any], late_h: int, most: int, is_missed: bool, next_h: int
    ) -> None:
        """Of the slots from 0 h to `late_h`, the newest `most`; whatever is older is left out."""
        plan = SchedulerRule(**rule, catch_up=most).plan(NOON, NOON + late_h * HOUR + 5 * MINUTE, iteration=2)

        assert (plan.is_missed, plan.next_ms) == (is_missed, NOON + next_h * HOUR)

    def test_catching_up_goes_on_step_by_step_to_the_present(self) -> None:
        rule, slot, now = SchedulerRule(pattern="0 * * * *", zone="UTC", catch_up=4), NOON, NOON + 10 * HOUR + 1
        runs = []
        while slot <= now:
            plan = rule.plan(slot, now, iteration=2)
            runs += [] if plan.is_missed else [slot]
            assert plan.next_ms is not None
            slot = plan.next_ms

        assert runs == [NOON + hours * HOUR for hours in (7, 8, 9, 10)]
        assert slot == NOON + 11 * HOUR

    def test_a_bursty_pattern_is_caught_up_too(self) -> None:
        """Every second of one minute a day: windows of the first distance hold none of them."""
        rule = SchedulerRule(pattern="* 0 3 * * *", zone="UTC", catch_up=5)
        three = NOON - 9 * HOUR

        plan = rule.plan(three, NOON + 48 * HOUR, iteration=2)

        assert plan.is_missed and plan.next_ms == three + 48 * HOUR + 55_000

    def test_what_is_too_late_is_left_out_where_missed_ones_are_skipped(self) -> None:
        rule = SchedulerRule(every_ms=HOUR, catch_up="skip", grace_ms=MINUTE, jitter_ms=1_000)

        assert not rule.plan(NOON, NOON + MINUTE + 1_000, iteration=2).is_missed
        late = rule.plan(NOON, NOON + MINUTE + 1_001, iteration=2)
        assert late.is_missed and late.next_ms == NOON + HOUR

    def test_a_time_that_is_taken_is_passed_over(self) -> None:
        assert (
            SchedulerRule(every_ms=HOUR).plan(NOON, NOON, iteration=2, after_ms=NOON + HOUR).next_ms == NOON + 2 * HOUR
        )

    def test_resuming_keeps_a_time_to_come_and_leaves_out_what_passed(self) -> None:
        every, cron = SchedulerRule(every_ms=HOUR, offset_ms=0), SchedulerRule(pattern="@hourly", zone="UTC")
        for rule in (every, cron):
            assert rule.resume_at(NOON, NOON - 1) == NOON
            assert rule.resume_at(NOON, NOON + 2 * HOUR + 1) == NOON + 3 * HOUR
        assert SchedulerRule(every_ms=HOUR, ends_ms=NOON).resume_at(NOON, NOON + 1) is None


def test_a_rule_is_read_from_the_record_and_then_from_the_job() -> None:
    rule = read_rule(
        "s", {"bpoverlap": "one", "bpcatchup": "7"}, {"every": "5000", "limit": 2, "endDate": "2030"}, None
    )

    assert (rule.every_ms, rule.limit, rule.overlap, rule.catch_up) == (5_000, 2, "one", 7)


def test_a_record_that_anybody_wrote_can_be_shown() -> None:
    record = read_scheduler("s", b"17e3", [b"name", b"\xff", b"every", b"x", b"bpcatchup", b"lots", b"data", b"{"])

    assert (record.next_ms, record.every_ms, record.catch_up, record.data) == (17_000, 0, "once", "{")
    assert record.next_runs(3) == [datetime.fromtimestamp(17, UTC)]


def test_a_schedule_without_policies_stores_none() -> None:
    assert Schedule(every_ms=5).fields == {"every": 5}
