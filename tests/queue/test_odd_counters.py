"""Counters of job hashes as anybody may have written them: finite, bounded, and what is neither counts as used up."""

from __future__ import annotations

from typing import Any

import pytest

from bullpen.queue import Job
from tests.queue._kit import Kit, nothing
from tests.queue.test_locks_and_stalls import check_stalled

ODD = ["nan", "-nan", "inf", "-inf", "1e400", "1e308", "9" * 400, "9007199254740993", "many"]


@pytest.mark.requirement("X-101")
@pytest.mark.parametrize("made", [*ODD, "-1e15", "-5", "1", "2.5"])
@pytest.mark.parametrize("field", ["atm", "attemptsMade"])
async def test_an_odd_count_of_attempts_is_not_retried_for_ever(kit: Kit, field: str, made: str) -> None:
    """`attemptsMade` is the name that old releases used: nothing counts it any more."""
    count: dict[str, Any] = {field: made}
    kit.seed("odd", opts='{"attempts":3}', **count)
    runs = 0

    async def handle(job: Job) -> None:
        nonlocal runs
        runs += 1
        raise ValueError("no") if runs < 10 else AssertionError("for ever")

    told = await kit.work(handle, dead_letters=True)
    await kit.until(lambda: kit.has("failed"), "the job has failed")
    await told.worker.close()

    assert runs == (1 if made in [*ODD, "2.5"] else 2 if (field, made) == ("atm", "1") else 3)
    stored = kit.fields("odd")["atm"]
    assert stored.isdecimal()
    assert int(stored) < 2**53
    (letter,) = await kit.queue().dead_letters.list()
    assert letter.job_id == "odd"


@pytest.mark.parametrize("stalls", [*ODD, str(2**63 - 1)])
async def test_an_odd_count_of_stalls_harms_only_its_job(kit: Kit, stalls: str) -> None:
    kit.seed("odd", to="active", stc=stalls)
    kit.seed("good", to="active")

    recovered = check_stalled(kit)[1] + check_stalled(kit)[1]

    assert sorted(recovered) == ["good", "odd"]
    assert sorted(kit.ids("wait")) == ["good", "odd"]
    assert kit.fields("odd")["stc"].isdecimal()


@pytest.mark.parametrize("starts", ODD)
async def test_an_odd_count_of_starts_is_counted_anew(kit: Kit, starts: str) -> None:
    kit.seed("odd", ats=starts)

    await kit.drain(nothing, 1)

    assert kit.fields("odd")["ats"] == "1"
