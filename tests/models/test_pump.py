"""The worker's pump in every order of what may happen around it: nothing sleeps beside work, nothing is taken too much.

The pump is the real one. Each guard that is taken out of it is missed, so the worlds are large enough to see what it is
for.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.models.checker import Counterexample, explore
from tests.models.pump_world import PumpWorld, without

ONE = {"jobs": 2}
TWO_LANES = {"slots": (2,), "lanes": 2, "jobs": 3}
TWO_WORKERS = {"slots": (1, 1), "jobs": 2, "thefts": 1}
ONE_OF_TWO_CLOSES = {"slots": (1, 1), "jobs": 1, "closes": 1}
ONE_OF_TWO_PAUSES = {"slots": (1, 1), "jobs": 1, "pauses": 1}
PAUSED_AND_CLOSED = {"slots": (2,), "jobs": 2, "pauses": 1, "closes": 1}
RESIZED = {"slots": (2,), "jobs": 2, "pauses": 1, "resizes": 1}
NO_RIGHT_TO_UNBLOCK = {"slots": (2,), "jobs": 2, "closes": 1, "may_unblock": False}
DUE = {"slots": (2,), "jobs": 1, "delayed": 1}
DUE_IN_ONE_SLOT = {"jobs": 1, "delayed": 1}
DUE_PAUSED = {"jobs": 1, "delayed": 1, "pauses": 1}

LARGE = [
    {"slots": (1, 1), "jobs": 2, "closes": 1},
    {"slots": (1, 1), "jobs": 2, "pauses": 1},
    {"slots": (1, 1), "jobs": 2, "closes": 1, "may_unblock": False},
    {"slots": (1, 1), "jobs": 1, "delayed": 1},
    {"slots": (1, 1), "jobs": 0, "delayed": 1, "closes": 1},
    {"slots": (1, 1), "jobs": 1, "delayed": 1, "may_unblock": False},
    {"slots": (2,), "lanes": 2, "jobs": 3, "pauses": 1, "closes": 1},
    {"slots": (1,), "jobs": 1, "delayed": 1, "pauses": 1, "closes": 1},
]


def names(size: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in size.items())


@pytest.mark.parametrize(
    "size",
    [
        *(ONE, TWO_LANES, TWO_WORKERS, ONE_OF_TWO_CLOSES, ONE_OF_TWO_PAUSES, PAUSED_AND_CLOSED, RESIZED),
        *(NO_RIGHT_TO_UNBLOCK, DUE, DUE_IN_ONE_SLOT, DUE_PAUSED),
        *(pytest.param(size, marks=pytest.mark.long) for size in LARGE),
    ],
    ids=names,
)
def test_no_work_sleeps_and_no_job_is_lost_in_any_order(size: dict[str, Any]) -> None:
    """No blocked read ends by its time limit here: a notification that is lost is work that sleeps."""
    explored = explore(PumpWorld(**size))

    assert explored.states > 100


GUARDS = [
    pytest.param(
        *(
            "            if not has_marker:\n                break",
            "            break",
            ONE_OF_TWO_PAUSES,
            "nothing leads",
        ),
        id="a marker that was taken and cannot be used is passed on",
    ),
    pytest.param(
        *("self.called()._replace(has_marker=True)", "self.called()", ONE_OF_TWO_PAUSES, "nothing leads"),
        id="a marker is remembered",
    ),
    pytest.param(
        *("load.running - self.asked", "load.running", TWO_LANES, "holds 3 jobs in 2 slots"),
        id="what calls in flight may bring is counted",
    ),
    pytest.param(
        *("(self.is_closing or self.is_paused or", "(self.is_paused or", PAUSED_AND_CLOSED, "nothing leads"),
        id="who closes takes nothing",
    ),
    pytest.param(
        *("(self.is_closing or self.is_paused or", "(self.is_closing or", PAUSED_AND_CLOSED, "nothing leads"),
        id="who is paused takes nothing",
    ),
    pytest.param(
        *("Read.LENT and (should_poll or asked", "Read.LENT and (asked", DUE_IN_ONE_SLOT, "nothing leads"),
        id="a slot that is needed is taken back from the read",
    ),
    pytest.param(
        *("not (state.in_flight or load", "not (load", ONE_OF_TWO_CLOSES, "has ended and holds work"),
        id="nobody ends while a call is in flight",
    ),
    pytest.param(
        *(
            "due_ms=due_ms, poll_at=min(self.poll_at, at) if self.poll_at else at",
            "due_ms=due_ms",
            DUE,
            "nothing leads",
        ),
        id="a due time sets the timer",
    ),
    pytest.param(
        *("return self.due_ms if self.poll_at else 0", "return 0"),
        *({"slots": (1, 1), "jobs": 0, "delayed": 1, "closes": 1}, "nothing leads"),
        marks=pytest.mark.long,
        id="who leaves tells others of the due time",
    ),
]


@pytest.mark.parametrize(("guard", "instead", "size", "what"), GUARDS)
def test_a_guard_that_is_taken_out_is_missed(guard: str, instead: str, size: dict[str, Any], what: str) -> None:
    """A world that finds nothing when a guard is gone would prove nothing while it is there."""
    with pytest.raises(Counterexample, match=what):
        explore(PumpWorld(pump=without(guard, instead), **size))
