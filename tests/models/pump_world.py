"""Workers with the real pump (`bullpen.worker.pump`) around a server of a few numbers: every order of what may happen.

The pump decides; this world is what surrounds it: handlers that end at any moment, requests and replies on their way,
the blocked read with the poll behind it, producers, a worker of another client that takes marker and job, pausing,
resizing and closing. No clock: a blocked read never ends by its time limit here. So a world that comes to its end in
every case is one in which no work waits for a fallback poll.
Elsewhere: that the driver performs what is decided (`tests/chaos`), that scripts do what is said here (`tests/queue`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

from bullpen.worker import pump as real_pump
from tests.models.checker import Step

Pump = Any
"""The module `bullpen.worker.pump`, or one with a guard taken out."""


DUE = 1
"""The only time there is."""


class Call(NamedTuple):
    """An exchange: on its way to the server, or its reply on its way back."""

    exchange: Any
    outcomes: str
    """Of jobs that it settles: "d" done, "b" given back."""
    taken: int = -1
    """-1: the server has not run it yet."""
    has_more: bool = False
    has_due: bool = False
    """Delayed jobs were left."""


class Site(NamedTuple):
    """A worker and its connections."""

    state: Any
    running: int = 0
    settled: str = ""
    commands: tuple[Call, ...] = ()
    """On its connection for commands, in order."""
    carried: Call | None = None
    """On the connection of the blocked read, before it."""
    read: str = ""
    """"": none; "opening"; "sent"; "blocked"; "answered"."""
    is_lent: bool = False
    brought: int = 0
    """By the read: jobs of the poll behind it or, of a plain read, whether it popped the marker."""
    brought_more: bool = False
    brought_due: bool = False
    unblocks: bool = False
    """The server was asked to end the read."""
    is_woken: bool = False
    hands_on: bool = False
    """It was decided that somebody else must know of the due time."""
    stage: str = "open"
    """"open", "closing" (nothing is taken any more), "ending" (no handler runs), "ended"."""


class Town(NamedTuple):
    sites: tuple[Site, ...]
    waiting: int = 0
    has_marker: bool = False
    done: int = 0
    to_add: int = 0
    thefts: int = 0
    """How often a worker of another client may still take marker and job."""
    pauses: int = 0
    closes: int = 0
    resizes: int = 0
    to_delay: int = 0
    delayed: int = 0
    """They are due at one and the same time."""
    is_due: bool = False
    """That time has come."""
    has_due_marker: bool = False


@dataclass(frozen=True)
class PumpWorld:
    """`slots` and `lanes` of each worker, and how much may happen."""

    slots: tuple[int, ...] = (1,)
    lanes: int = 1
    jobs: int = 2
    thefts: int = 0
    pauses: int = 0
    closes: int = 0
    resizes: int = 0
    delayed: int = 0
    may_unblock: bool = True
    """False: an ACL forbids CLIENT UNBLOCK, so reads hold no slot."""
    pump: Pump = real_pump

    def start(self) -> Town:
        sites = tuple(Site(self.pump.State(slots=slots, lanes=self.lanes), is_woken=True) for slots in self.slots)
        return Town(sites, 0, False, 0, self.jobs, self.thefts, self.pauses, self.closes, self.resizes, self.delayed)

    # ---- what must hold ---------------------------------------------------------------------------------------

    def wrong(self, town: Town) -> str | None:
        taken = 0
        for at, site in enumerate(town.sites):
            held = site.running + _on_their_way(site)
            if held > max(site.state.slots, self.slots[at]):
                return f"worker {at} holds {held} jobs in {site.state.slots} slots"
            if site.state.asked < 0 or site.state.in_flight < 0:
                return f"worker {at} counts {site.state.asked} asked, {site.state.in_flight} in flight"
            if site.stage == "ended" and (held or site.settled or site.commands or site.carried):
                return f"worker {at} has ended and holds work"
            taken += held + len(site.settled) + sum(len(c.outcomes) for c in _unrun(site))
        if town.done + town.waiting + taken + town.to_add + town.delayed + town.to_delay != self.jobs + self.delayed:
            return "a job is lost or doubled"
        return None

    def is_well(self, town: Town) -> bool:
        """All jobs are done, or wait for workers that will come: all of ours have left or are paused."""
        if any(site.running or site.settled or site.commands or site.carried for site in town.sites):
            return False
        nobody = all(site.stage == "ended" or site.state.is_paused for site in town.sites)
        return not (town.waiting or town.delayed) or nobody

    # ---- what may happen --------------------------------------------------------------------------------------

    def steps(self, town: Town) -> Iterator[Step[Town]]:
        if town.to_add:
            added = town._replace(waiting=town.waiting + 1, has_marker=True, to_add=town.to_add - 1)
            yield from _serve_blocked("a job is added", added, is_optional=True)
        if town.to_delay and not town.is_due:
            put_off = town._replace(delayed=town.delayed + 1, has_due_marker=True, to_delay=town.to_delay - 1)
            yield from _serve_blocked("a delayed job is added", put_off, is_optional=True)
        if not town.is_due and town.delayed:
            yield Step("the time comes", town._replace(is_due=True))
        if town.thefts and town.has_marker:
            left = max(0, town.waiting - 1)
            stolen = town._replace(
                waiting=left, has_marker=left > 0, done=town.done + (town.waiting - left), thefts=town.thefts - 1
            )
            yield from _serve_blocked("another client takes the marker and a job", stolen, is_optional=True)
        for at, site in enumerate(town.sites):
            yield from self._worker_steps(town, at, site)

    def _worker_steps(self, town: Town, at: int, site: Site) -> Iterator[Step[Town]]:
        who = f"worker {at}: "
        if site.state.poll_at and town.is_due and site.stage != "ended":
            came = self._decide(site._replace(state=site.state.time_came(_load(site))))
            handed_on = _put(_hand_on(town, came), at, came._replace(hands_on=False))
            yield from _serve_blocked(who + "its timer comes", handed_on)
        if site.is_woken:
            decided = self._decide(site._replace(is_woken=False))
            handed_on = _put(_hand_on(town, decided), at, decided._replace(hands_on=False))
            yield from _serve_blocked(who + "decides", handed_on)
        if site.running:
            ended = site._replace(running=site.running - 1, settled=site.settled + "d")
            is_alone = not ended.running and ended.state.is_alone(_load(ended))
            ended = self._decide(ended) if is_alone else ended._replace(is_woken=True)
            yield Step(who + "a handler ends", _put(town, at, ended))
        if site.commands:
            first, rest = site.commands[0], site.commands[1:]
            unrun = next((n for n, call in enumerate(site.commands) if call.taken < 0), None)
            if unrun is not None:
                ran, after = _run(town, site.commands[unrun])
                calls = (*site.commands[:unrun], ran, *site.commands[unrun + 1 :])
                yield from _serve_blocked(
                    who + "the server runs an exchange", _put(after, at, site._replace(commands=calls))
                )
            if first.taken >= 0:
                answered = self._answered(site._replace(commands=rest), first)
                yield Step(who + "an exchange is answered", _put(town, at, answered))
        if site.carried is not None:
            yield from self._carried_steps(town, at, site, site.carried)
        yield from self._read_steps(town, at, site)
        yield from self._operator_steps(town, at, site)

    def _carried_steps(self, town: Town, at: int, site: Site, call: Call) -> Iterator[Step[Town]]:
        if call.taken < 0:
            ran, after = _run(town, call)
            after = _put(after, at, site._replace(carried=ran))
            yield from _serve_blocked(f"worker {at}: the server runs a carried exchange", after)
        else:
            answered = self._answered(site._replace(carried=None), call)
            yield Step(f"worker {at}: a carried exchange is answered", _put(town, at, answered))

    def _read_steps(self, town: Town, at: int, site: Site) -> Iterator[Step[Town]]:
        who = f"worker {at}: "
        if site.read == "opening" and site.stage == "open":
            state = site.state.began_to_read(_load(site), can_end=self.may_unblock)
            begun = site._replace(state=state, read="sent", is_lent=state.read is self.pump.Read.LENT)
            yield Step(who + "the read is sent", _put(town, at, begun))
        elif site.read == "sent" and (site.carried is None or site.carried.taken >= 0):
            if town.has_marker or town.has_due_marker:
                yield from _serve_blocked(who + "the read finds the marker", _pop_marker(town, at))
            else:
                yield Step(who + "the read blocks", _put(town, at, site._replace(read="blocked")))
        elif site.read == "blocked" and site.unblocks:
            yield from _serve_blocked(who + "the server ends the read", _end_read(town, at))
        elif site.read == "answered" and site.carried is None:
            yield Step(who + "the read is answered", _put(town, at, self._read_answered(site)))

    def _operator_steps(self, town: Town, at: int, site: Site) -> Iterator[Step[Town]]:
        who = f"worker {at}: "
        if site.stage == "open":
            yield from self._orders(town, at, site)
        # Handlers are waited for, then the end of the read; a read that cannot be ended is dropped with its connection.
        elif site.stage == "closing" and not site.running:
            if not self.may_unblock and site.read in ("sent", "blocked"):
                yield Step(who + "drops the read", _put(town, at, site._replace(read="")))
            elif not site.read:
                ending = site._replace(state=site.state.abandoned(), stage="ending", is_woken=True)
                ending = ending._replace(hands_on=bool(site.state.unserved_due_ms))
                ended = _put(_hand_on(town, ending), at, ending._replace(hands_on=False))
                yield from _serve_blocked(who + "waits for the last answers", ended)

    def _orders(self, town: Town, at: int, site: Site) -> Iterator[Step[Town]]:
        """What somebody may want of a worker."""
        who, state = f"worker {at}: ", site.state
        woken = site._replace(is_woken=True)
        if state.is_paused:
            yield Step(who + "is resumed", _put(town, at, woken._replace(state=state.resumed())), True)
        elif town.pauses:
            paused = _put(town, at, woken._replace(state=state.paused()))
            yield Step(who + "is paused", paused._replace(pauses=town.pauses - 1), True)
        if town.resizes:
            for slots in {1, 2} - {state.slots}:
                resized = _put(town, at, woken._replace(state=state.resized(slots, self.lanes)))
                yield Step(f"{who}gets {slots} slots", resized._replace(resizes=town.resizes - 1), True)
        if town.closes:
            read = "" if site.read == "opening" else site.read
            closing = woken._replace(state=state.closing(), stage="closing", unblocks=True, read=read)
            yield Step(who + "is closed", _put(town, at, closing)._replace(closes=town.closes - 1), True)

    # ---- the worker's side ------------------------------------------------------------------------------------

    def _decide(self, site: Site) -> Site:
        """As `Driver._step` does it. A step that was asked for comes all the same."""
        pump = self.pump
        state, actions = pump.decide(site.state, _load(site))
        site = site._replace(state=state)
        for action in actions:
            if type(action) is pump.SendExchange:
                call = Call(action, site.settled[: action.settle])
                site = site._replace(settled=site.settled[action.settle :])
                # The connection of the read is open, and its id is known, once a read was lent a slot.
                if action.listens and self.may_unblock and site.stage == "open":
                    site = site._replace(carried=call, read="sent", is_lent=True)
                else:
                    site = site._replace(commands=(*site.commands, call))
                    if action.listens:
                        opening = "opening" if site.stage == "open" else ""
                        site = site._replace(state=site.state.not_carried(), read=opening)
            elif action is pump.Act.LISTEN:
                site = site._replace(read="opening" if site.stage == "open" else "")
            elif action is pump.Act.RELEASE:
                site = site._replace(unblocks=True)
            elif action is pump.Act.HAND_ON:
                site = site._replace(hands_on=True)
            elif action is pump.Act.END:
                site = site._replace(stage="ended")
        return self._canonical(site)

    def _answered(self, site: Site, call: Call) -> Site:
        site = _start(site, call.taken)
        reply = self._reply(has_more=call.has_more, has_due=call.has_due)
        return self._decide(site._replace(state=site.state.answered(call.exchange, reply)))

    def _read_answered(self, site: Site) -> Site:
        ended = site._replace(
            read="", brought=0, brought_more=False, brought_due=False, unblocks=False, is_lent=False, is_woken=True
        )
        if site.is_lent:
            ended = _start(ended, site.brought)
            reply = self._reply(has_more=site.brought_more, has_due=site.brought_due)
            return self._canonical(ended._replace(state=site.state.read_answered(reply)))
        state = site.state.read_ended()
        if site.brought_due:
            state = state.due(DUE, DUE)
        else:
            state = state.marked() if site.brought else state.called()
        return self._canonical(ended._replace(state=state))

    def _reply(self, *, has_more: bool, has_due: bool) -> Any:
        return self.pump.Reply(has_more=has_more, due_ms=DUE * has_due, due_at=DUE * has_due)

    def _canonical(self, site: Site) -> Site:
        """`polls` only ever grows and is only compared: what counts is who was sent since the last one."""
        now = site.state.polls

        def age(call: Call | None) -> Call | None:
            if call is None:
                return None
            return call._replace(exchange=call.exchange._replace(polls=0 if call.exchange.polls == now else -1))

        state = site.state._replace(polls=0, read_polls=0 if site.state.read_polls == now else -1)
        commands = tuple(call for each in site.commands if (call := age(each)) is not None)
        return site._replace(state=state, commands=commands, carried=age(site.carried))


# ---- the server's side, and small helpers ----------------------------------------------------------------------


def _load(site: Site) -> Any:
    return real_pump.Load(site.running, len(site.settled))


def _unrun(site: Site) -> Iterator[Call]:
    calls = site.commands if site.carried is None else (*site.commands, site.carried)
    return (call for call in calls if call.taken < 0)


def _on_their_way(site: Site) -> int:
    """Jobs that the server has given and the worker does not know of yet."""
    calls = site.commands if site.carried is None else (*site.commands, site.carried)
    return sum(max(0, call.taken) for call in calls) + (site.brought if site.is_lent else 0)


def _put(town: Town, at: int, site: Site) -> Town:
    return town._replace(sites=(*town.sites[:at], site, *town.sites[at + 1 :]))


def _hand_on(town: Town, site: Site) -> Town:
    return town._replace(has_due_marker=True) if site.hands_on else town


def _promote(town: Town) -> Town:
    """Whoever takes moves what is due to where it is taken from."""
    if not (town.is_due and town.delayed):
        return town
    return town._replace(waiting=town.waiting + town.delayed, delayed=0)


def _run(town: Town, call: Call) -> tuple[Call, Town]:
    """The script: settle, then take; who leaves work behind leaves the marker."""
    outcomes, take = call.outcomes, call.exchange.take
    town = town._replace(waiting=town.waiting + outcomes.count("b"), done=town.done + outcomes.count("d"))
    town = _promote(town) if take else town
    taken = min(town.waiting, take)
    waiting = town.waiting - taken
    after = town._replace(waiting=waiting, has_marker=town.has_marker or waiting > 0)
    has_due = take > 0 and town.delayed > 0
    return call._replace(taken=taken, outcomes="", has_more=waiting > 0, has_due=has_due), after


def _poll(town: Town, at: int) -> Town:
    """The poll behind a read; behind a plain one there is none."""
    site = town.sites[at]
    if not site.is_lent:
        return _put(town, at, site._replace(read="answered"))
    town = _promote(town)
    taken = min(1, town.waiting)
    waiting = town.waiting - taken
    site = site._replace(read="answered", brought=taken, brought_more=waiting > 0, brought_due=town.delayed > 0)
    return _put(town, at, site)._replace(waiting=waiting, has_marker=town.has_marker or waiting > 0)


def _pop_marker(town: Town, at: int) -> Town:
    """The marker that says "now" comes before the one that names a time."""
    site = town.sites[at]
    if town.has_marker:
        popped = town._replace(has_marker=False)
        return _poll(_put(popped, at, site if site.is_lent else site._replace(brought=1)), at)
    popped = town._replace(has_due_marker=False)
    plain = site._replace(brought=town.is_due, brought_due=not town.is_due)
    return _poll(_put(popped, at, site if site.is_lent else plain), at)


def _end_read(town: Town, at: int) -> Town:
    return _poll(town, at)


def _serve_blocked(name: str, town: Town, *, is_optional: bool = False) -> Iterator[Step[Town]]:
    """A marker is popped by a reader that is blocked, whichever came first: here any of them."""
    blocked = [at for at, site in enumerate(town.sites) if site.read == "blocked"]
    if not (town.has_marker or town.has_due_marker) or not blocked:
        yield Step(name, town, is_optional)
        return
    for at in blocked:
        told = f"{name}; the read of worker {at} gets the marker"
        yield from _serve_blocked(told, _pop_marker(town, at), is_optional=is_optional)


def _start(site: Site, jobs: int) -> Site:
    """Jobs that come when nothing is taken any more are given back."""
    if site.state.is_closing or site.state.is_paused:
        return site._replace(settled=site.settled + "b" * jobs, is_woken=site.is_woken or jobs > 0)
    return site._replace(running=site.running + jobs)


def without(guard: str, instead: str) -> ModuleType:
    """The pump with one of its lines changed."""
    import inspect
    import sys

    source = inspect.getsource(real_pump)
    assert source.count(guard) == 1, f"{source.count(guard)} places in the pump: {guard}"
    changed = ModuleType("pump_without_a_guard")
    sys.modules[changed.__name__] = changed
    exec(compile(source.replace(guard, instead), "<pump>", "exec"), changed.__dict__)
    return changed
