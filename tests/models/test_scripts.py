"""Numbered calls, locks and fences in every order of what a network and a clock may do, with the real scripts.

A job is lost or ended twice only in orders that nobody thinks of: a copy that arrives after the next call, a lock that
ends between two checks. Each guard that is taken out of a script is missed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from bullpen.testing import RedisServer
from tests.models.checker import Counterexample, explore
from tests.models.script_world import ScriptWorld

LATE_COPIES = {"jobs": 2, "copies": 1}
LOCK_ENDS = {"lock_ends": 1, "checks": 2}
LOCKS_END = {"lock_ends": 2, "checks": 2}

LARGE = [
    {"copies": 1, "lock_ends": 1, "checks": 2},
    {"jobs": 2, "lock_ends": 1, "checks": 2},
    {"copies": 1, "deaths": 1, "lock_ends": 1, "checks": 2},
    {"copies": 2, "lock_ends": 2, "checks": 2},
]


@pytest.fixture(scope="module")
def client() -> Iterator[redis.Redis]:
    """Of a server of its own: it is emptied all the time."""
    with RedisServer.start("valkey") as server:
        yield redis.Redis.from_url(server.url)


def names(size: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in size.items())


@pytest.mark.parametrize(
    "size",
    [LATE_COPIES, LOCK_ENDS, LOCKS_END, *(pytest.param(size, marks=pytest.mark.long) for size in LARGE)],
    ids=names,
)
@pytest.mark.timeout(1_800)
def test_no_job_is_lost_or_ended_twice_in_any_order(client: redis.Redis, size: dict[str, Any]) -> None:
    """Whatever arrives late, twice or never."""
    explored = explore(ScriptWorld(client, **size))

    assert explored.states > 500


GUARDS = [
    pytest.param(
        *("exchange", "  if number == call_number then", "  if false then"),
        *(LATE_COPIES, "nothing leads"),
        id="a call that is repeated is answered from its record",
    ),
    pytest.param(
        "exchange",
        "  elseif #number > #call_number or (#number == #call_number and number > call_number) then",
        "  elseif false then",
        *(LATE_COPIES, "nothing leads"),
        id="a copy that comes after the next call is refused",
    ),
    pytest.param(
        *("exchange", 'redis.call("GET", job_key .. ":lock") == token and read_taken(job_key)', "read_taken(job_key)"),
        *(LOCK_ENDS, "the same fence"),
        id="a repeated call gives no job that was lost meanwhile",
    ),
    pytest.param(
        *("exchange", "elseif lock ~= ARGV[at + 1] then", "elseif false then"),
        *(LOCK_ENDS, "an earlier run"),
        id="only the holder of the lock settles",
    ),
    pytest.param(
        *("renew", 'redis.pcall("HGET", base .. job_id, "ats") == ARGV[arg + 2]', "true"),
        *(LOCKS_END, "an earlier run"),
        id="a lock is taken again by the latest run only",
    ),
    pytest.param(
        *("check_stalled", 'redis.call("EXISTS", job_key .. ":lock") == 0 and redis.call("LREM"', 'redis.call("LREM"'),
        *(LOCK_ENDS, "though no lock has ended"),
        id="a job whose lock holds is not stalled",
    ),
]


@pytest.mark.parametrize(("script", "guard", "instead", "size", "what"), GUARDS)
def test_a_guard_that_is_taken_out_of_a_script_is_missed(
    client: redis.Redis, script: str, guard: str, instead: str, size: dict[str, Any], what: str
) -> None:
    """A world that finds nothing when a guard is gone would prove nothing while it is there."""
    with pytest.raises(Counterexample, match=what):
        explore(ScriptWorld(client, changed={script: (guard, instead)}, **size))
