"""What a worker does next: a pure state machine. No clock, no socket, no task: times come with what happens.

In: what has happened (a method of `State` per event) and what the worker has at hand (`Load`). Out: the next state and
what to do now, in order (`decide`); with nothing to do the worker sleeps until the next event or `State.poll_at`.
Elsewhere: doing it and noticing what happens (`driver`), the blocked read (`reader`), running jobs (`runs`).
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from bullpen._kernel.tuples import maker

MOST_JOBS: Final = 100
"""Jobs per exchange: keeps a call near one millisecond of server time."""


class Read(Enum):
    """What the reader does. A worker with a free slot lends it to the blocked read: the poll for one job is sent behind
    it, and the server runs that by itself the moment the marker comes."""

    IDLE = "idle"
    BUSY = "busy"
    """It connects, or rests after a refusal."""
    PLAIN = "plain"
    """A blocked read that holds no slot: what it brings is asked for by an exchange."""
    LENT = "lent"
    FIXED = "fixed"
    """Lent, and the server does not let us end it."""
    RELEASING = "releasing"
    LIMITS = "limits"
    """It waits for limits to be changed. The marker is no help while one holds: it stays for whoever may go on."""


class Load(NamedTuple):
    """What the worker has at hand."""

    running: int = 0
    """Jobs whose handlers run."""
    settled: int = 0
    """Outcomes that wait to be sent. Their slots are free."""
    unlocked: int = 0
    """Outcomes whose locks ran out: before they are sent the locks must be taken again."""
    suspects: int = 0
    """Suspects wait or run alone: nothing else is taken meanwhile."""


class SendExchange(NamedTuple):
    """Settle so many outcomes and take so many jobs, in one call."""

    settle: int
    take: int
    polls: int = 0
    """`State.polls` when it was sent: who asked for a poll since then may know of jobs that it did not see."""
    is_fallback: bool = False
    """Nobody asked for it but the end of a blocked read that brought nothing."""
    listens: bool = False
    """The blocked read goes along in the same write, lent a slot: it is in place when whoever gets these results asks
    for more."""


class Act(Enum):
    """What else there is to do."""

    RETAKE = "retake"
    """Take the locks of finished jobs again."""
    LISTEN = "listen"
    """Begin the blocked read, and lend it a slot."""
    RELEASE = "release"
    """End the blocked read, to get the slot back; the poll behind it is run first."""
    HAND_ON = "hand on"
    """Somebody else must know of the due time, whose marker was read by us."""
    END = "end"


class WatchLimits(NamedTuple):
    """Wait for limits to be changed after that time of the server's clock, at most until that time of ours."""

    since_ms: int
    until: float


class Reply(NamedTuple):
    """What a poll told, besides its jobs."""

    has_more: bool = False
    """Ready jobs were left behind."""
    limited_until: float = 0.0
    """A limit lets nobody take a job until then."""
    limits_since: int | None = None
    """The server's time when it told of the limit: a later change ends it early."""
    due_ms: int = 0
    """When the next delayed job is due, by the server's clock, and by ours:"""
    due_at: float = 0.0


Action = SendExchange | WatchLimits | Act
_new_exchange = maker(SendExchange)
_NOTHING: Final[list[Action]] = []


class State(NamedTuple):
    """Everything on which the next step depends, besides `Load`."""

    # These seven change with every job: a new state is made of them and the rest, in a sixth of the time of `_replace`.
    in_flight: int = 0
    asked: int = 0
    """Jobs that exchanges in flight and the read may still bring."""
    should_poll: bool = True
    """There may be jobs to take."""
    is_fallback: bool = False
    has_marker: bool = False
    """We took the marker and have not polled since. If we cannot, somebody else must be woken."""
    read: Read = Read.IDLE
    read_polls: int = 0
    """`polls` when the poll behind the read was sent."""

    polls: int = 0
    """How often a poll was asked for."""
    slots: int = 1
    """Jobs that may run at the same time."""
    lanes: int = 1
    """Exchanges that may be in flight at the same time."""
    batch: int = 1
    """Jobs that a handler gets at once: an exchange brings so many together, if it can."""
    limited_until: float = 0.0
    limits_since: int | None = None
    """A limit that nobody watches yet."""
    poll_at: float = 0.0
    """When to poll without being asked: a due time, the end of a limit. 0: never."""
    due_ms: int = 0
    must_hand_on: bool = False
    is_retaking: bool = False
    is_paused: bool = False
    is_closing: bool = False
    """Nothing is taken any more."""
    is_abandoned: bool = False
    """Closing, and no handler runs: it ends when everything is settled."""
    has_ended: bool = False

    # ---- what follows from it ---------------------------------------------------------------------------------

    def may_take(self, load: Load) -> bool:
        return not (self.is_closing or self.is_paused or self.limited_until or load.suspects)

    def free(self, load: Load) -> int:
        """Slots for which a job may be taken now; never more than one exchange shall bring."""
        free = self.slots - load.running - self.asked
        if free <= 0 or not self.may_take(load):  # fewer than none where more run than a lowered concurrency allows
            return 0
        return min(free, MOST_JOBS, max(self.batch, -(-self.slots // self.lanes))) if free > 1 else free

    def is_alone(self, load: Load) -> bool:
        """Nothing else can come along with the outcomes at hand, and somebody may wait for them: now, not soon."""
        return not load.running and self.in_flight < self.lanes and 0 < load.settled <= MOST_JOBS

    @property
    def unserved_due_ms(self) -> int:
        """A due time whose marker may have been read by us, and for which nobody has polled: 0 for none. Whoever leaves
        hands it on, also when it has just passed."""
        return self.due_ms if self.poll_at else 0

    # ---- what happens -----------------------------------------------------------------------------------------

    def called(self, *, is_fallback: bool = False) -> State:
        """There may be jobs to take."""
        return self._replace(should_poll=True, polls=self.polls + 1, is_fallback=is_fallback)

    def answered(self, sent: SendExchange, reply: Reply) -> State:
        """An exchange has come back."""
        in_flight, asked, should_poll, is_fallback, has_marker, read, read_polls, polls = self[:8]
        take = sent.take
        if take:
            should_poll, is_fallback = reply.has_more or polls != sent.polls, False
        changed = (in_flight - 1, asked - take, should_poll, is_fallback, has_marker, read, read_polls)
        rested = _new_state(changed + self[7:])
        if take:
            return rested._planned(reply) if reply.limited_until or reply.due_ms else rested
        # The marker is set too, but another client may use it up and not take the job.
        return rested.called() if reply.has_more else rested

    def began_to_read(self, load: Load, *, can_end: bool) -> State:
        """The blocked read is about to be sent. Without the right to end it no slot is lent."""
        return self.lent() if can_end and self.free(load) else self._replace(read=Read.PLAIN)

    def lent(self) -> State:
        """A blocked read is about to be sent that holds a slot."""
        in_flight, asked, should_poll, is_fallback, has_marker, _, _, polls = self[:8]
        changed = (in_flight, asked + 1, should_poll, is_fallback, has_marker, Read.LENT, polls)
        return _new_state(changed + self[7:])

    def not_carried(self) -> State:
        """The read cannot go along: it begins by itself, and is lent a slot then."""
        return self._replace(read=Read.BUSY, asked=self.asked - 1)

    def read_answered(self, reply: Reply, *, rests: bool = False) -> State:
        """The poll behind the read has come back. `rests`: the reader is not free yet."""
        in_flight, asked, _, is_fallback, has_marker, _, read_polls, polls = self[:8]
        should_poll, read = reply.has_more or polls != read_polls, Read.BUSY if rests else Read.IDLE
        changed = (in_flight, asked - 1, should_poll, is_fallback, has_marker, read, read_polls)
        rested = _new_state(changed + self[7:])
        return rested._planned(reply) if reply.limited_until or reply.due_ms else rested

    def read_ended(self) -> State:
        """The reader is free. What a plain read brought is told with `called`, `marked` or `due`."""
        is_lent = self.read in (Read.LENT, Read.FIXED, Read.RELEASING)
        return self._replace(read=Read.IDLE, asked=self.asked - is_lent)

    def marked(self) -> State:
        """The read brought the marker: there are jobs, and nobody else knows."""
        return self.called()._replace(has_marker=True)

    def due(self, due_ms: int, due_at: float) -> State:
        """A job becomes ready at that time."""
        at = max(due_at, self.limited_until)
        return self._replace(due_ms=due_ms, poll_at=min(self.poll_at, at) if self.poll_at else at)

    def time_came(self, load: Load) -> State:
        """It is `poll_at`. A limit ends here too: the poll is told what is left of it."""
        come = self._replace(poll_at=0.0, limited_until=0.0).called()
        is_full = not come.free(load) and self.read is not Read.LENT
        return come._replace(must_hand_on=True) if self.due_ms and is_full else come

    def limits_changed(self) -> State:
        return self._replace(limited_until=0.0, poll_at=0.0).called()

    def not_released(self, *, may_ask: bool) -> State:
        """The server could not be asked to end the read, or does not let us."""
        if self.read is not Read.RELEASING:
            return self
        return self._replace(read=Read.LENT if may_ask else Read.FIXED)

    def retaken(self) -> State:
        return self._replace(is_retaking=False)

    def paused(self) -> State:
        return self._replace(is_paused=True)

    def resumed(self) -> State:
        return self._replace(is_paused=False).called()

    def resized(self, slots: int, lanes: int) -> State:
        resized = self._replace(slots=slots, lanes=lanes)
        return resized.called() if slots > self.slots else resized

    def closing(self) -> State:
        return self._replace(is_closing=True)

    def abandoned(self) -> State:
        return self._replace(is_closing=True, is_abandoned=True)

    def _planned(self, reply: Reply) -> State:
        if reply.limited_until:
            # A poll that is planned for earlier would be in vain, and must not stand in for the one after the limit.
            return self._replace(
                should_poll=False,
                limited_until=reply.limited_until,
                poll_at=reply.limited_until,
                limits_since=reply.limits_since,
            )
        return self.due(reply.due_ms, reply.due_at)


_new_state = maker(State)


def decide(state: State, load: Load) -> tuple[State, list[Action]]:
    """What to do now."""
    if state.has_ended:
        return state, _NOTHING
    actions: list[Action] = []
    running, settled, unlocked, _ = load
    if unlocked and not state.is_retaking:
        actions.append(Act.RETAKE)
        state = state._replace(is_retaking=True)
    while state.in_flight < state.lanes:
        # When nothing is known to wait, outcomes are sent first of all, since somebody may wait for them, and the poll
        # is left to the blocked read that follows the answer.
        in_flight, asked, should_poll, is_fallback, has_marker, read, read_polls, polls = state[:8]
        take = state.free(load) if should_poll else 0
        if not settled and not take:
            if read is Read.LENT and (should_poll or asked > state.slots - running or not state.may_take(load)):
                actions.append(Act.RELEASE)
                state = state._replace(read=Read.RELEASING)
                break
            # A marker that we took but cannot use is passed on: an exchange sets it again when work is left.
            if not has_marker:
                break
        count = settled if settled < MOST_JOBS else MOST_JOBS  # noqa: FURB136 - a call less per exchange
        settled -= count
        # With the last outcomes of a worker that has nothing else to do.
        listens = not (should_poll or settled or running or in_flight) and read is Read.IDLE and state.free(load) > 0
        actions.append(_new_exchange((count, take, polls, is_fallback, listens)))
        if listens:
            asked, read, read_polls = asked + 1, Read.LENT, polls
        changed = (in_flight + 1, asked + take, should_poll, is_fallback, False, read, read_polls)
        state = _new_state(changed + state[7:])
    if state.must_hand_on:
        actions.append(Act.HAND_ON)
        state = state._replace(must_hand_on=False)
    if state.read is Read.IDLE and (state.asked + running < state.slots or state.limits_since is not None):
        return _read_on(state, load, actions)
    return _end(state, load, actions) if state.is_abandoned else (state, actions)


def _read_on(state: State, load: Load, actions: list[Action]) -> tuple[State, list[Action]]:
    """The reader has nothing to do."""
    if state.limits_since is not None and not state.is_closing:
        actions.append(WatchLimits(state.limits_since, state.limited_until))
        return state._replace(read=Read.LIMITS, limits_since=None), actions
    # While nothing runs and an answer is on its way, that comes first: it says whether there is more.
    is_quiet = state.in_flight < state.lanes and (load.running or not state.in_flight)
    if is_quiet and not state.should_poll and state.free(load):
        actions.append(Act.LISTEN)
        return state._replace(read=Read.BUSY), actions
    return _end(state, load, actions)


def _end(state: State, load: Load, actions: list[Action]) -> tuple[State, list[Action]]:
    is_done = state.is_abandoned and not (state.in_flight or load.unlocked or state.is_retaking)
    if is_done and not actions:
        actions.append(Act.END)
        return state._replace(has_ended=True), actions
    return state, actions
