"""The server's time between replies."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bullpen._kernel.clock import ServerClock

EPOCH_MS = 1_800_000_000_000


class Machine:
    """A local machine whose two clocks are moved by hand."""

    def __init__(self, *, wall: float = EPOCH_MS / 1000) -> None:
        self.now = 1_000.0
        self.wall_offset = wall - self.now
        self.clock = ServerClock(monotonic=lambda: self.now, wall=lambda: self.now + self.wall_offset)

    def call(self, server_ms: float, *, round_trip: float) -> None:
        """One call to a server that reads its clock in the middle of the round trip."""
        sent = self.now
        self.now += round_trip
        self.clock.observe(server_ms, sent, self.now)


def test_before_the_first_reply_the_wall_clock_is_the_guess() -> None:
    """There is nothing better yet, and it says so."""
    machine = Machine()

    assert machine.clock.now_ms() == pytest.approx(EPOCH_MS, abs=1)
    assert not machine.clock.is_synchronised
    assert math.isinf(machine.clock.error_ms)


def test_after_a_reply_the_servers_time_goes_on_with_the_monotonic_clock() -> None:
    """Timers and cron run between replies."""
    machine = Machine()
    machine.call(EPOCH_MS + 5_000, round_trip=0.002)

    machine.now += 10

    assert machine.clock.is_synchronised
    assert machine.clock.now_ms() == pytest.approx(EPOCH_MS + 15_001, abs=2)


def test_a_step_of_the_local_wall_clock_changes_nothing() -> None:
    """NTP or a person may set it at any time."""
    machine = Machine()
    machine.call(EPOCH_MS, round_trip=0.001)
    before = machine.clock.now_ms()

    machine.wall_offset += 3_600

    assert machine.clock.now_ms() == before


def test_a_slow_reply_does_not_spoil_a_good_measurement() -> None:
    """A reply that took a second says little about when the server read its clock."""
    machine = Machine()
    machine.call(EPOCH_MS, round_trip=0.001)
    good = machine.clock.now_ms()

    sent = machine.now
    machine.now += 1.0
    machine.clock.observe(EPOCH_MS + 1, sent, machine.now)  # read at the very beginning of that second

    assert machine.clock.now_ms() == pytest.approx(good + 1_000, abs=1)


def test_a_measurement_grows_old_and_is_replaced_by_a_worse_one() -> None:
    """Clocks drift apart; after an hour a slightly slower reply knows better."""
    machine = Machine()
    machine.call(EPOCH_MS, round_trip=0.001)

    machine.now += 3_600
    machine.call(EPOCH_MS + 3_600_300, round_trip=0.050)

    assert machine.clock.now_ms() == pytest.approx(EPOCH_MS + 3_600_325, abs=2)


def test_a_step_of_the_servers_clock_is_followed_even_on_a_slow_reply() -> None:
    """Two measurements that exclude each other: another server answers, or its clock was set."""
    machine = Machine()
    machine.call(EPOCH_MS, round_trip=0.001)

    machine.call(EPOCH_MS + 60_000, round_trip=0.200)

    assert machine.clock.now_ms() == pytest.approx(EPOCH_MS + 60_100, abs=2)


@pytest.mark.parametrize(("ahead_s", "is_large"), [(0.5, False), (-0.5, False), (1.5, True), (-3_600, True)])
def test_skew_is_told_when_it_exceeds_a_second(ahead_s: float, is_large: bool) -> None:
    """Node producers use their own clocks; an operator should hear of a wrong one."""
    machine = Machine()

    machine.call(EPOCH_MS + ahead_s * 1000, round_trip=0.001)

    assert machine.clock.skew_ms == pytest.approx(ahead_s * 1000, abs=2)
    assert machine.clock.has_large_skew == is_large


def test_sleeping_until_an_instant_of_the_server() -> None:
    """The time left, and nothing when it has passed."""
    machine = Machine()
    machine.call(EPOCH_MS, round_trip=0.0)

    assert machine.clock.seconds_until(EPOCH_MS + 2_500) == pytest.approx(2.5, abs=0.002)
    assert machine.clock.seconds_until(EPOCH_MS - 1) == 0.0


@given(
    st.lists(st.tuples(st.floats(0.0001, 2.0), st.floats(0, 1), st.floats(0, 100)), min_size=1, max_size=20),
    st.integers(-(10**7), 10**7),
)
def test_the_true_time_lies_within_the_told_error(calls: list[tuple[float, float, float]], ahead_ms: int) -> None:
    """Whatever the round trips, and wherever in them the server looked at its clock."""
    machine = Machine()
    for round_trip, share, pause in calls:
        read_at = machine.now + round_trip * share
        sent, machine.now = machine.now, machine.now + round_trip
        machine.clock.observe(math.floor(read_at * 1000 + ahead_ms), sent, machine.now)
        machine.now += pause

    true_ms = machine.now * 1000 + ahead_ms

    assert abs(machine.clock.now_ms() - true_ms) <= machine.clock.error_ms + 1.01


def test_the_real_clocks_are_the_default() -> None:
    """Production passes nothing."""
    clock = ServerClock()
    sent = clock.monotonic()

    clock.observe(EPOCH_MS, sent, clock.monotonic())

    assert clock.now_ms() == pytest.approx(EPOCH_MS, abs=1_000)
