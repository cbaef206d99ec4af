"""Seeded schedules of all kinds of faults: nothing is lost, nothing fails without cause, what fails is made small."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullpen.testing import RedisServer
from tests.chaos import schedules
from tests.chaos.arena import LONG, note, scaled
from tests.chaos.schedules import FAULTS, Fault, Scene, Schedule, draw, play, shrink

FAULTS_DRAWN = st.builds(Fault, st.integers(0, 100), st.sampled_from(sorted(FAULTS)), st.integers(0, 5_000))


@given(st.builds(Schedule, st.integers(0, 10**9), st.integers(1, 10**6), st.lists(FAULTS_DRAWN).map(tuple)))
def test_a_schedule_is_one_line_that_can_be_played_again(schedule: Schedule) -> None:
    """What a failed run prints is all that somebody else needs."""
    assert Schedule.parse(str(schedule)) == schedule


def test_a_seed_means_the_same_schedule_every_time() -> None:
    assert draw(7, 300, 5, sorted(FAULTS)) == draw(7, 300, 5, sorted(FAULTS))
    assert draw(7, 300, 5, sorted(FAULTS)) != draw(8, 300, 5, sorted(FAULTS))


def test_a_fault_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="no fault is called 'flood'"):
        Schedule.parse("1 10 5:flood")


async def test_a_schedule_that_fails_is_made_as_small_as_it_can_be() -> None:
    """Of ten faults the two that matter stay, the one that holds as short as it still fails."""
    tried = []

    async def fails(schedule: Schedule) -> bool:
        tried.append(schedule)
        kinds = [fault.kind for fault in schedule.faults]
        return "kill" in kinds and any(fault.kind == "stall" and fault.ms >= 200 for fault in schedule.faults)

    rest = tuple(Fault(at, "reset") for at in range(0, 80, 10))
    large = Schedule(1, 100, (*rest[:3], Fault(33, "kill"), *rest[3:6], Fault(66, "stall", 900), *rest[6:]))

    small = await shrink(large, fails)

    assert small.faults == (Fault(33, "kill"), Fault(66, "stall", 225))
    assert len(tried) < 60


@pytest.mark.requirement("W-6", "X-13")
@pytest.mark.parametrize("seed", range(scaled(2, 60)))
async def test_nothing_is_lost_whatever_comes_together(seed: int, durable_server: RedisServer, tmp_path: Path) -> None:
    """Of all kinds of faults in one run. In the long form a schedule that fails is played again, smaller each time."""
    schedule = draw(seed, scaled(200, 600), scaled(6, 12), sorted(FAULTS))

    tally = await play(schedule, durable_server, tmp_path)

    back_ms = max(tally.recovery_ms, default=0)
    note(f"{schedule}: {tally.again} ran again, {len(tally.late)} late, back within {back_ms} ms")
    wrong = tally.lost or tally.failed or tally.accepted != schedule.jobs
    smallest = await _smallest(schedule) if wrong and LONG else schedule
    assert not wrong, f'{tally}\npython -m tests.chaos.schedules --of bullpen --play "{smallest}"'


async def _smallest(schedule: Schedule) -> Schedule:
    async def fails(smaller: Schedule) -> bool:
        with (
            RedisServer.start("valkey", persistent=True, args=("--appendfsync", "always")) as server,
            tempfile.TemporaryDirectory() as directory,
        ):
            tally = await play(smaller, server, Path(directory))
        return bool(tally.lost or tally.failed)

    return await shrink(schedule, fails)


@pytest.mark.leaves_jobs_active
async def test_a_job_that_somebody_takes_away_is_seen(
    durable_server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Books that never find anything would prove nothing."""

    async def remove_one(scene: Scene, _: float) -> None:
        await scene.arena.add(scene.queue, 1, ms=0)
        scene.arena.server.command("DEL", *(scene.arena.base + place for place in ("wait", "active")))

    monkeypatch.setitem(schedules.FAULTS, "theft", remove_one)
    schedule = Schedule(3, 120, (Fault(20, "pause", 100), Fault(30, "theft")))

    tally = await play(schedule, durable_server, tmp_path, patience_s=3)

    assert tally.lost
