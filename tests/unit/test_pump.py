"""What a worker does next, as a table: no server, no loop, no clock.

A row is a story: what happens, with what the worker has at hand then, and all that it does about it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from bullpen.worker.pump import MOST_JOBS, Act, Action, Load, Read, Reply, SendExchange, State, WatchLimits, decide

IDLE = Load()
NOTHING_NEW, MORE = Reply(), Reply(has_more=True)
LISTEN, RELEASE, HAND_ON, RETAKE, END = Act.LISTEN, Act.RELEASE, Act.HAND_ON, Act.RETAKE, Act.END
Event = Callable[[State, Load], State]


def call(settle: int, take: int, *, polls: int = 0, is_fallback: bool = False, listens: bool = False) -> SendExchange:
    return SendExchange(settle, take, polls, is_fallback, listens)


def answer(sent: SendExchange, reply: Reply = NOTHING_NEW) -> Event:
    return lambda state, _: state.answered(sent, reply)


def read(*, can_end: bool = True) -> Event:
    return lambda state, load: state.began_to_read(load, can_end=can_end)


def polled(reply: Reply = NOTHING_NEW, *, rests: bool = False) -> Event:
    return lambda state, _: state.read_answered(reply, rests=rests)


def time_came(state: State, load: Load) -> State:
    return state.time_came(load)


def changed(state: State, _: Load) -> State:
    """Only the load is another."""
    return state


def does(name: str, **given: Any) -> Event:
    return lambda state, _: getattr(state, name)(**given)


@dataclass(frozen=True)
class Then:
    """What happens, the load at that moment, and what is done."""

    event: Event
    load: Load
    actions: list[Action]


@dataclass(frozen=True)
class Row:
    name: str
    state: State
    steps: list[Then]
    end: Callable[[State], bool] = lambda state: True


NEW = State(slots=1)
QUIET = State(slots=1, should_poll=False)
LENT = QUIET._replace(read=Read.LENT, asked=1)
FULL = QUIET._replace(slots=10)
POLL_ONE = call(0, 1)
LIMIT = Reply(limited_until=5.0, limits_since=4_000)
DUE = Reply(due_ms=9_000, due_at=7.0)

ROWS = [
    Row(
        "a worker that starts polls, and finds nothing: it listens",
        NEW,
        [
            Then(changed, IDLE, [POLL_ONE]),
            Then(answer(POLL_ONE), IDLE, [LISTEN]),
            Then(read(), IDLE, []),
        ],
        lambda state: state.read is Read.LENT and state.asked == 1,
    ),
    Row(
        "a lone job: the read brings it, and the next read goes along with its outcome",
        LENT,
        [
            Then(polled(), Load(running=1), []),
            Then(changed, Load(settled=1), [call(1, 0, listens=True)]),
            Then(answer(call(1, 0)), IDLE, []),
            Then(polled(), Load(running=1), []),
        ],
        lambda state: state.read is Read.IDLE and state.asked == 0,
    ),
    Row(
        "a lone job whose outcome can carry no read: it begins by itself, and holds one slot all the same",
        QUIET,
        [
            Then(changed, Load(settled=1), [call(1, 0, listens=True)]),
            Then(does("not_carried"), IDLE, []),
            Then(read(), IDLE, []),
            Then(answer(call(1, 0)), IDLE, []),
        ],
        lambda state: state.read is Read.LENT and state.asked == 1,
    ),
    Row(
        "a lone job beside a free slot: that is lent while the job runs",
        QUIET._replace(slots=2, read=Read.LENT, asked=1),
        [Then(polled(), Load(running=1), [LISTEN])],
    ),
    Row(
        "a lone job beside a free lane: one read goes along with its outcome",
        State(slots=30, lanes=2, should_poll=False),
        [
            Then(changed, Load(settled=1), [call(1, 0, listens=True)]),
            Then(answer(call(1, 0)), IDLE, []),
        ],
    ),
    Row(
        "two lone jobs one after the other: the read is there already, and holds one slot",
        State(slots=30, lanes=2, should_poll=False, read=Read.LENT, asked=1),
        [
            Then(changed, Load(settled=1), [call(1, 0)]),
            Then(changed, Load(settled=1), [call(1, 0)]),
            Then(changed, Load(settled=1), []),
        ],
    ),
    Row(
        "a burst: the read brings one and says that there are more, and the pump takes the others together",
        QUIET._replace(slots=10, read=Read.LENT, asked=1),
        [
            Then(polled(MORE), Load(running=1), [call(0, 9)]),
            Then(answer(call(0, 9), MORE), Load(running=10), []),
            Then(changed, Load(running=4, settled=6), [call(6, 6)]),
            Then(answer(call(6, 6)), Load(running=10), []),
            Then(changed, Load(running=0, settled=10), [call(10, 0, listens=True)]),
        ],
    ),
    Row(
        "one slot under load: each call settles and takes",
        QUIET._replace(should_poll=True),
        [
            Then(changed, Load(settled=1), [call(1, 1)]),
            Then(answer(call(1, 1), MORE), Load(running=1), []),
            Then(changed, Load(settled=1), [call(1, 1)]),
        ],
    ),
    Row(
        "many slots: two calls are in flight, each for half of them",
        State(slots=50, lanes=2),
        [Then(changed, IDLE, [call(0, 25), call(0, 25)])],
        lambda state: (state.in_flight, state.asked) == (2, 50),
    ),
    Row(
        "no call brings more than a hundred, or settles more",
        State(slots=1_000, lanes=2),
        [Then(changed, Load(settled=150), [call(MOST_JOBS, MOST_JOBS), call(50, MOST_JOBS)])],
    ),
    Row(
        "what ends while a call is in flight goes out with the next",
        FULL._replace(in_flight=1, asked=0),
        [
            Then(changed, Load(running=5, settled=2), []),
            Then(changed, Load(running=2, settled=5), []),
            Then(answer(call(3, 0)), Load(running=2, settled=5), [call(5, 0)]),
        ],
    ),
    Row(
        "a settle that leaves jobs behind is followed by a poll",
        FULL._replace(in_flight=1),
        [Then(answer(call(1, 0), MORE), IDLE, [call(0, 10, polls=1)])],
    ),
    Row(
        "who is called while the poll is in flight polls again, for it may not have seen the job",
        NEW,
        [
            Then(changed, IDLE, [POLL_ONE]),
            Then(does("called"), IDLE, []),
            Then(answer(POLL_ONE), IDLE, [call(0, 1, polls=1)]),
            Then(answer(call(0, 1, polls=1)), IDLE, [LISTEN]),
        ],
    ),
    Row(
        "a full worker that is called does nothing until a slot is free",
        QUIET,
        [
            Then(does("called"), Load(running=1), []),
            Then(changed, Load(settled=1), [call(1, 1, polls=1)]),
        ],
    ),
    Row(
        "the marker that a full worker read is handed on by a call that takes nothing",
        QUIET._replace(read=Read.PLAIN),
        [
            Then(lambda state, _: state.read_ended().marked(), Load(running=1), [call(0, 0, polls=1)]),
            Then(answer(call(0, 0, polls=1)), Load(running=1), []),
        ],
    ),
    Row(
        "a plain read that brought nothing is a fallback, and one that brought the marker is none",
        QUIET._replace(read=Read.PLAIN),
        [Then(lambda s, _: s.read_ended().called(is_fallback=True), IDLE, [call(0, 1, polls=1, is_fallback=True)])],
    ),
    Row(
        "a call meanwhile is a better reason than the fallback",
        QUIET._replace(should_poll=True, is_fallback=True),
        [Then(does("called"), IDLE, [call(0, 1, polls=1)])],
    ),
    Row(
        "without the right to end a read no slot is lent",
        QUIET._replace(read=Read.BUSY),
        [Then(read(can_end=False), IDLE, [])],
        lambda state: state.read is Read.PLAIN and not state.asked,
    ),
    Row(
        "a slot that was taken while the reader connected is not lent",
        QUIET._replace(read=Read.BUSY),
        [Then(read(), Load(running=1), [])],
        lambda state: state.read is Read.PLAIN,
    ),
    # pause
    Row(
        "a pause gets the slot back, and nothing is lent until the end of it",
        LENT,
        [
            Then(does("paused"), IDLE, [RELEASE]),
            Then(polled(), IDLE, []),
            Then(does("called"), IDLE, []),
            Then(does("resumed"), IDLE, [call(0, 1, polls=2)]),
        ],
    ),
    Row(
        "a paused worker settles",
        QUIET._replace(is_paused=True),
        [Then(changed, Load(settled=1), [call(1, 0)]), Then(answer(call(1, 0), MORE), IDLE, [])],
    ),
    # due
    Row(
        "a due time plans a poll beside the read; when it comes the slot is taken back, and the read polls on its way",
        NEW,
        [
            Then(changed, IDLE, [POLL_ONE]),
            Then(answer(POLL_ONE, DUE), IDLE, [LISTEN]),
            Then(read(), IDLE, []),
            Then(time_came, IDLE, [RELEASE]),
            Then(polled(), Load(running=1), []),
        ],
        lambda state: state.should_poll and not state.poll_at,
    ),
    Row(
        "a due time that comes while the worker is full is handed on",
        QUIET._replace(poll_at=7.0, due_ms=9_000),
        [Then(time_came, Load(running=1), [HAND_ON])],
    ),
    Row(
        "an earlier due time shortens the wait",
        QUIET._replace(poll_at=9.0, due_ms=11_000, read=Read.PLAIN),
        [Then(lambda state, _: state.read_ended().due(9_000, 7.0), IDLE, [LISTEN])],
        lambda state: state.poll_at == 7.0,
    ),
    Row(
        "a later one does not lengthen it",
        QUIET._replace(poll_at=5.0, due_ms=7_000),
        [Then(lambda state, _: state.due(9_000, 7.0), IDLE, [LISTEN])],
        lambda state: state.poll_at == 5.0,
    ),
    # limited
    Row(
        "a limit: the reader waits for its change, and nothing is taken until it ends",
        NEW,
        [
            Then(changed, IDLE, [POLL_ONE]),
            Then(answer(POLL_ONE, LIMIT), IDLE, [WatchLimits(4_000, 5.0)]),
            Then(does("called"), IDLE, []),
            Then(does("read_ended"), IDLE, []),
            Then(time_came, IDLE, [call(0, 1, polls=2)]),
        ],
    ),
    Row(
        "a limit that is lifted ends at once",
        QUIET._replace(limited_until=5.0, poll_at=5.0, read=Read.LIMITS),
        [Then(lambda state, _: state.read_ended().limits_changed(), IDLE, [call(0, 1, polls=1)])],
        lambda state: not state.poll_at,
    ),
    Row(
        "a limit told by a call gets the lent slot back, and then the reader watches",
        QUIET._replace(slots=5, read=Read.LENT, asked=3, in_flight=1),
        [
            Then(answer(call(0, 2), LIMIT), IDLE, [RELEASE]),
            Then(polled(LIMIT), IDLE, [WatchLimits(4_000, 5.0)]),
        ],
    ),
    Row(
        "a refused poll is a limit that nobody can watch",
        NEW._replace(in_flight=1, asked=1),
        [
            Then(answer(POLL_ONE, Reply(limited_until=5.0)), IDLE, []),
            Then(time_came, IDLE, [call(0, 1, polls=1)]),
        ],
    ),
    # lost
    Row(
        "a lost reply: the call stays in flight until it is answered, and nothing else is sent in its lane",
        LENT._replace(read=Read.IDLE, asked=0, in_flight=1),
        [
            Then(changed, Load(settled=1), []),
            Then(does("called"), Load(settled=1), []),
            Then(answer(call(1, 0)), Load(settled=1), [call(1, 1, polls=1)]),
        ],
    ),
    Row(
        "a read that is lost with its connection gives the slot back, and a poll follows: the marker may be gone",
        LENT,
        [Then(lambda state, _: state.read_ended().called(), IDLE, [call(0, 1, polls=1)])],
        lambda state: state.asked == 1 and state.read is Read.IDLE,
    ),
    Row(
        "a refused read rests before the next",
        LENT,
        [Then(polled(rests=True), IDLE, []), Then(does("read_ended"), IDLE, [LISTEN])],
    ),
    Row(
        "outcomes whose locks ran out: they are taken again beside everything else, once at a time",
        QUIET,
        [
            Then(changed, Load(unlocked=1), [RETAKE, LISTEN]),
            Then(changed, Load(unlocked=1), []),
            Then(does("retaken"), Load(settled=1), [call(1, 0)]),
        ],
    ),
    # release
    Row(
        "a release that could not be sent is tried again, one that is forbidden is not",
        LENT,
        [
            Then(does("paused"), IDLE, [RELEASE]),
            Then(does("not_released", may_ask=True), IDLE, [RELEASE]),
            Then(does("not_released", may_ask=False), IDLE, []),
            Then(polled(), IDLE, []),
        ],
        lambda state: state.read is Read.IDLE and not state.asked,
    ),
    Row(
        "a release that comes after the end of the read changes nothing",
        QUIET,
        [Then(does("not_released", may_ask=False), IDLE, [LISTEN])],
    ),
    Row(
        "outcomes go out before a slot is taken back",
        LENT._replace(should_poll=True),
        [Then(changed, Load(settled=1), [call(1, 0)]), Then(answer(call(1, 0)), IDLE, [RELEASE])],
    ),
    # suspect
    Row(
        "a suspect: nothing else is taken and no slot is lent, but outcomes go out",
        QUIET._replace(slots=5, read=Read.LENT, asked=1),
        [
            Then(polled(MORE), Load(running=1, suspects=1), []),
            Then(does("called"), Load(running=1, suspects=1), []),
            Then(does("called"), Load(settled=1), [call(1, 5, polls=2)]),
        ],
    ),
    Row(
        "a suspect that came with an exchange gets the lent slot back",
        QUIET._replace(slots=5, read=Read.LENT, asked=1),
        [Then(changed, Load(running=1, suspects=1), [RELEASE])],
    ),
    # concurrency
    Row(
        "more slots hold at once",
        QUIET._replace(read=Read.PLAIN),
        [Then(does("resized", slots=30, lanes=2), Load(running=1), [call(0, 15, polls=1), call(0, 14, polls=1)])],
    ),
    Row(
        "fewer slots hold for what is taken from now on",
        FULL,
        [
            Then(does("resized", slots=2, lanes=1), Load(running=10), []),
            Then(changed, Load(running=1, settled=9), [call(9, 0)]),
            Then(answer(call(9, 0), MORE), Load(running=1), [call(0, 1, polls=1)]),
        ],
    ),
    Row(
        "a slot that is lent and not there any more is taken back",
        QUIET._replace(slots=2, read=Read.LENT, asked=1),
        [
            Then(does("resized", slots=1, lanes=1), IDLE, []),
            Then(does("resized", slots=0, lanes=1), IDLE, [RELEASE]),
            Then(polled(MORE), IDLE, []),
            Then(does("resized", slots=1, lanes=1), IDLE, [call(0, 1, polls=1)]),
        ],
    ),
    # closing
    Row(
        "closing: the slot is taken back, what runs is settled, and then it ends",
        QUIET._replace(slots=2, read=Read.LENT, asked=1),
        [
            Then(does("closing"), Load(running=1), [RELEASE]),
            Then(polled(), Load(running=1), []),
            Then(changed, Load(settled=1), [call(1, 0)]),
            Then(answer(call(1, 0), MORE), IDLE, []),
            Then(does("abandoned"), IDLE, [END]),
            Then(does("called"), IDLE, []),
        ],
    ),
    Row(
        "closing: the marker that came meanwhile is handed on before the end",
        QUIET._replace(is_closing=True, read=Read.PLAIN),
        [
            Then(lambda state, _: state.read_ended().marked().abandoned(), IDLE, [call(0, 0, polls=1)]),
            Then(answer(call(0, 0, polls=1)), IDLE, [END]),
        ],
    ),
    Row(
        "closing: what is in flight, and locks that are being taken again, come before the end",
        QUIET._replace(is_closing=True, in_flight=1, is_retaking=True),
        [
            Then(does("abandoned"), IDLE, []),
            Then(answer(POLL_ONE), IDLE, []),
            Then(does("retaken"), Load(settled=2), [call(2, 0)]),
            Then(answer(call(2, 0)), IDLE, [END]),
        ],
    ),
    Row(
        "closing while limited: nobody watches the limit",
        QUIET._replace(limited_until=5.0, limits_since=4_000, read=Read.PLAIN),
        [Then(does("closing"), IDLE, []), Then(does("read_ended"), IDLE, [])],
    ),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_is_done(row: Row) -> None:
    state = row.state
    for number, step in enumerate(row.steps):
        state, actions = decide(step.event(state, step.load), step.load)
        assert (number, actions) == (number, step.actions)
    assert row.end(state)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_who_has_decided_has_nothing_left_to_decide(row: Row) -> None:
    """Otherwise whoever asks twice in one turn of the loop would send something twice."""
    state = row.state
    for step in row.steps:
        load = step.load
        state, actions = decide(step.event(state, load), load)
        left = load.settled - sum(one.settle for one in actions if isinstance(one, SendExchange))
        assert decide(state, load._replace(settled=left))[1] in ([], [END])


@pytest.mark.requirement("Q-38", "W-85")
@pytest.mark.parametrize("first_until", [4.0, 5.0, 6.0])
def test_whatever_was_planned_before_there_is_a_poll_when_the_limit_has_ended(first_until: float) -> None:
    """Two exchanges in flight learn of the same limit a moment apart. The timer of the first fired a moment before the
    end of the second, found the worker still limited, and nobody woke it again."""
    state = State(slots=50, lanes=2, in_flight=2, asked=50)
    for until in (first_until, 5.0):
        state = state.answered(call(0, 25), Reply(limited_until=until))
    state = state.due(1, 0.001)

    assert state.poll_at == 5.0
    state = state.time_came(IDLE)

    assert state.should_poll and state.may_take(IDLE)


@pytest.mark.parametrize(
    ("load", "state", "is_alone"),
    [
        (Load(settled=1), QUIET, True),
        (Load(settled=MOST_JOBS), QUIET, True),
        (Load(settled=MOST_JOBS + 1), QUIET, False),
        (Load(settled=1, running=1), QUIET, False),
        (Load(settled=0), QUIET, False),
        (Load(settled=1), QUIET._replace(should_poll=True), True),
        (Load(settled=1), QUIET._replace(in_flight=1), False),
        (Load(settled=1), QUIET._replace(in_flight=1, lanes=2), True),
    ],
)
def test_when_an_outcome_goes_out_at_once(load: Load, state: State, is_alone: bool) -> None:
    assert state.is_alone(load) is is_alone


def test_a_read_that_is_lent_takes_a_slot_from_the_exchanges() -> None:
    state = replace_read(State(slots=10), Read.LENT)

    _, actions = decide(state, IDLE)

    assert actions == [call(0, 9)]


def replace_read(state: State, how: Read) -> State:
    return state._replace(read=how, asked=1)
