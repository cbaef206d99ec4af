"""Renew the locks of running jobs and look for stalled ones, from one thread per process and server.

A thread with its own blocking connections, because a handler that blocks the event loop must not cost its own job
the lock. In: workers that register. Out: calls back into their loops when a lock is lost. A loop that has not
answered for `max_block_ms` is no longer renewed (its stacks are dumped): a hung process must lose its jobs.
Elsewhere: what a worker does when it lost a lock (`worker`).
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from bullpen._kernel import telemetry
from bullpen._kernel.logs import get_logger
from bullpen.errors import ConnectionLost, ServerRefused
from bullpen.queue.job import Job
from bullpen.redis.address import NodeAddress
from bullpen.redis.blocking import BlockingWire, find, open_wire
from bullpen.redis.client import Connection, probe_key
from bullpen.redis.discovery import ServerUnavailable
from bullpen.redis.outages import note_back, note_lost, note_refused
from bullpen.redis.socket import as_sent, reason_of
from bullpen.wire.cancels import CancelRequest, read_requests
from bullpen.wire.keys import QueueKeys
from bullpen.wire.scripts import SCRIPTS, Script

logger = get_logger("bullpen.keepalive")

_TICK_S: Final = 0.25
_SHORTEST_TICK_S: Final = 0.02
_CANCELS_PER_READ: Final = 1_000
LAG_WORTH_TELLING_S: Final = 1.0
_SILENT_S: Final = 60.0
"""The calls of the thread end by their own time limits. A thread that is silent for longer hangs."""


@dataclass(eq=False, slots=True)
class Held:
    """What the thread needs of one worker. `jobs` is owned by the worker's loop; the thread only copies it."""

    connection: Connection
    keys: QueueKeys
    loop: asyncio.AbstractEventLoop
    jobs: dict[str, Job]
    """By id, every job whose lock we hold."""
    lock_ms: int
    stalled_interval_ms: int
    max_block_ms: int
    clock_offset_ms: int
    on_lost: Callable[[list[tuple[str, str]], frozenset[str]], None]
    """Called in the loop with (job id, token) of the locks that are gone, and the ids that have no job any more."""
    on_stalled: Callable[[list[tuple[str, str]]], None]
    on_renewed: Callable[[list[str]], None]
    """Called in the loop with the ids of the jobs whose locks were prolonged."""
    on_cancelled: Callable[[list[CancelRequest], bool], None]
    """Called in the loop with what somebody wants to end; True: the renewal found it, and no request told."""
    cancels_read: bytes = b"0"
    """Up to which request."""
    oldest: Job | None = None
    """The job that was held for longest when requests were last to be read."""
    skips_check: bool = False
    """Stalled jobs are for others to find."""
    skips_renewal: bool = False
    """Locks run out by themselves."""
    generation: int = 0
    """Of the connection, when we last asked where its server is."""
    next_renewal: float = 0.0
    next_check: float = 0.0
    pulse: Pulse | None = None
    """Of its loop, once it is registered."""
    told_lag: bool = False
    hung: bool = False
    reached_at: float = field(default_factory=time.monotonic)
    """When the server last did for us what changes something."""
    wary_until: float = 0.0
    """Others may not have renewed their locks yet, after an outage that we met too."""

    @property
    def idle_interval_ms(self) -> int:
        """Between checks of a queue in which nothing runs: no longer than a lock, see the script."""
        return max(self.stalled_interval_ms, min(3 * self.stalled_interval_ms, self.lock_ms))

    def note_reached(self, at: float) -> None:
        if at - self.reached_at > self.lock_ms / 2000:
            self.wary_until = at + self.lock_ms / 3000 + 1.0
        self.reached_at = max(at, self.reached_at)

    @property
    def lag_s(self) -> float:
        """How long the loop has not answered; 0 when it has nothing to answer."""
        return 0.0 if self.pulse is None else self.pulse.lag_s


class Pulse:
    """Whether a loop answers: asked once for all workers in it, since each question wakes it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._asked_at, self._answered_at = 0.0, time.monotonic()

    def ask(self) -> None:
        if not self._loop.is_running():
            self._asked_at = 0.0  # it ended, or stands between two runs: no handler blocks it
        elif self.lag_s == 0.0:
            self._asked_at = time.monotonic()
            with contextlib.suppress(RuntimeError):  # it was closed in this moment
                self._loop.call_soon_threadsafe(self._answer)

    def _answer(self) -> None:
        self._answered_at = time.monotonic()

    @property
    def lag_s(self) -> float:
        return time.monotonic() - self._asked_at if self._asked_at > self._answered_at else 0.0


class Keepalive:
    """The thread and its registry. One per process and server: use `shared()`."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._held: list[Held] = []
        self._busy: Held | None = None
        self._homes: dict[object, NodeAddress] = {}
        """Which server holds a queue: on a cluster, those of one node share a wire."""
        self._wires: dict[NodeAddress, BlockingWire] = {}
        self._faulty: set[object] = set()
        self._told: set[object] = set()
        """Faulty for another reason than a lost connection, which is told for all connections together."""
        self._thread: threading.Thread | None = None
        self._turned_at = time.monotonic()

    def register(self, held: Held) -> None:
        now = held.reached_at = time.monotonic()
        held.next_renewal, held.next_check = now + held.lock_ms / 4000, now
        with self._changed:
            known = (other.pulse for other in self._held if other.loop is held.loop)
            held.pulse = next(known, None) or Pulse(held.loop)
            self._held.append(held)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="bullpen-keepalive", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def unregister(self, held: Held, timeout_s: float = 10.0) -> None:
        """After this returns no further call reaches the worker's loop. Waits for a call to the server under way, but
        not for ever: what it brings then changes nothing any more."""
        with self._changed:
            with contextlib.suppress(ValueError):
                self._held.remove(held)
            self._changed.wait_for(lambda: self._busy is not held, timeout=timeout_s)

    def is_working_for(self, held: Held) -> bool:
        """Whether the thread works and the worker's loop answers it. A server that is away changes neither."""
        thread = self._thread
        works = thread is not None and thread.is_alive() and time.monotonic() - self._turned_at < _SILENT_S
        return works and held in self._held and held.lag_s <= held.max_block_ms / 1000

    def _run(self) -> None:
        while True:
            self._turned_at = time.monotonic()
            with self._changed:
                if not self._held and not self._changed.wait_for(lambda: bool(self._held), timeout=30):
                    self._thread = None
                    for wire in self._wires.values():
                        wire.close()
                    self._wires.clear()
                    self._homes.clear()
                    return
                due = list(self._held)
            for pulse in {id(held.pulse): held.pulse for held in due if held.pulse is not None}.values():
                pulse.ask()
            for held in due:
                if held.loop.is_closed():  # without its worker: nobody runs these jobs any more, others may
                    with self._changed, contextlib.suppress(ValueError):
                        self._held.remove(held)
                    continue
                with self._turn(held) as still_registered:
                    if still_registered:
                        self._watch_loop(held)
                        self._serve(held)
            with self._changed:
                self._changed.wait(timeout=_pause_s(due))

    @contextlib.contextmanager
    def _turn(self, held: Held) -> Iterator[bool]:
        self._turned_at = time.monotonic()
        with self._changed:
            still_registered = held in self._held
            self._busy = held if still_registered else None
        try:
            yield still_registered
        finally:
            with self._changed:
                self._busy = None
                self._changed.notify_all()

    def _watch_loop(self, held: Held) -> None:
        lag_s = held.lag_s
        if lag_s <= min(LAG_WORTH_TELLING_S, held.max_block_ms / 1000):
            if held.told_lag or held.hung:
                held.told_lag = held.hung = False
                logger.warning("queue %r: the event loop answers again", held.keys.name)
        elif lag_s > held.max_block_ms / 1000 and not held.hung:
            held.hung = True
            logger.error(
                "queue %r: the event loop has not answered for %.0f s; its jobs are left to other workers",
                held.keys.name,
                lag_s,
            )
            telemetry.emit("worker.hung", queue=held.keys.name, lag_ms=int(lag_s * 1000))
            faulthandler.dump_traceback(file=sys.__stderr__ or 2)
        elif lag_s > LAG_WORTH_TELLING_S and not held.told_lag:
            held.told_lag = True
            logger.warning(
                "queue %r: a handler blocks the event loop for more than %.0f s; use a plain `def` handler for it",
                held.keys.name,
                lag_s,
            )
            telemetry.emit("worker.loop_lag", queue=held.keys.name, lag_ms=int(lag_s * 1000))

    def _serve(self, held: Held) -> None:
        now = time.monotonic()
        place = held.connection.place(held.keys.base)
        where = str(held.connection.address)
        try:
            try:
                self._do_due(held, now)
            except ConnectionLost as error:
                if place in self._faulty:
                    raise
                # It may have been cut long ago: that is no reason to be late, nor to tell.
                self._forget_wire(place, is_good=isinstance(error, ServerUnavailable))
                self._do_due(held, now)
        except Exception as error:  # noqa: BLE001 - without this thread every worker here would lose its jobs
            held.next_renewal = min(held.next_renewal, now + 1.0)
            was_in = self._has_wire(place)
            self._forget_wire(place, is_good=isinstance(error, ServerUnavailable))
            if isinstance(error, ConnectionLost):
                note_lost(self, where, error, time.monotonic(), since=now)
            elif place not in self._told:
                self._told.add(place)
                if isinstance(error, ServerRefused) and not was_in:
                    note_refused(where, error)
                else:
                    logger.warning("locks of queue %r cannot be renewed now: %s", held.keys.name, reason_of(error))
            self._faulty.add(place)
        else:
            if place in self._faulty and self._has_wire(place):
                self._faulty.discard(place)
                self._told.discard(place)
                note_back(where, where)

    def _do_due(self, held: Held, now: float) -> None:
        if _has_long_run(held):
            self._read_cancels(held)
        is_check_due = now >= held.next_check and not held.skips_check
        if now >= held.next_renewal:
            if held.jobs and not held.hung and not held.skips_renewal:
                self._renew(held)
            else:
                self._touch(held, held.lock_ms / 8000)
            held.next_renewal = now + held.lock_ms / 4000
        if is_check_due:
            self._touch(held, _TICK_S)  # a check that waits for a frozen server would not know of that
            held.next_check = now + self._check_stalled(held)

    def _touch(self, held: Held, fresh_s: float) -> None:
        """Find out whether the server takes writes, as often as others try to renew their locks. Changes nothing. What
        was found out so short a time ago for another queue of the server holds for this one."""
        wire = self._wire(held)
        if time.monotonic() - wire.changed_at > fresh_s:
            wire.call("DEL", probe_key(held.keys.base))
            wire.changed_at = time.monotonic()
        held.note_reached(wire.changed_at)

    def _renew(self, held: Held) -> None:
        jobs = held.jobs.copy()  # one step under the GIL; the loop may change the original meanwhile
        running = list(jobs.values())
        for first in range(0, len(running), 1000):
            args = renew_arguments(held.keys, held.lock_ms, running[first : first + 1000])
            lost, retaken, gone, unwanted = self._evaluate(held, SCRIPTS["renew"], [held.keys.stalled], args)
            if unwanted:
                self._read_cancels(held)  # first: what came just now is not late
                ids = map(_text, unwanted[::2])
                late = [
                    CancelRequest(job_id, jobs[job_id].token, reason.decode("utf-8", "replace"))
                    for job_id, reason in zip(ids, unwanted[1::2], strict=True)
                ]
                self._tell(held, held.on_cancelled, late, True)
            if retaken:
                tell_retaken(held.keys.name, len(retaken))
            if lost:
                # With tokens: a job may have been settled and taken again meanwhile, and its new run is not lost.
                told = [(job_id, jobs[job_id].token) for job_id in map(_text, lost)]
                self._tell(held, held.on_lost, told, frozenset(map(_text, gone)))
            kept = [job.id for job in running[first : first + 1000]]
            if lost:
                kept = [job_id for job_id in kept if job_id.encode("utf-8", "surrogateescape") not in lost]
            if kept:
                self._tell(held, held.on_renewed, kept)

    def _read_cancels(self, held: Held) -> None:
        """Which running jobs somebody wants to end: read at each turn while a job runs that ran at the last one too.
        Short jobs cost nothing, and long ones hear of it within two turns."""
        try:
            reply = self._wire(held).call(
                *("XREAD", "COUNT", _CANCELS_PER_READ, "STREAMS", held.keys.cancels, held.cancels_read)
            )
        except ServerRefused:
            return  # a key of another type, or an old rule: the renewal finds them
        last, requests = read_requests(reply)
        if last is not None:
            held.cancels_read = last
            self._tell(held, held.on_cancelled, requests, False)

    def _check_stalled(self, held: Held) -> float:
        """How many seconds from now the next one may run, over all workers and clients."""
        keys = held.keys
        names = [keys.meta, keys.wait, keys.active, keys.stalled, keys.stalled_check, keys.events]
        continuing, is_wary = "", "1" if time.monotonic() < held.wary_until else ""
        while True:
            more, recovered, pause_ms, job_names = self._evaluate(
                held,
                SCRIPTS["check_stalled"],
                names,
                [
                    *(keys.base, held.clock_offset_ms, held.stalled_interval_ms, continuing, held.lock_ms, is_wary),
                    held.idle_interval_ms,
                ],
            )
            if recovered:
                self._tell(held, held.on_stalled, _named(recovered, job_names))
            if not more:
                return float(min(pause_ms, held.idle_interval_ms)) / 1000
            continuing = "1"

    def _evaluate(self, held: Held, script: Script, keys: list[str], args: list[Any]) -> Any:
        wire = self._wire(held)
        reply = wire.evaluate(script, keys, args)
        wire.changed_at = time.monotonic()
        held.note_reached(wire.changed_at)
        return reply

    def _wire(self, held: Held) -> BlockingWire:
        connection, key = held.connection, held.keys.base
        place = connection.place(key)
        if held.generation != connection.generation:
            held.generation = connection.generation
            self._forget_wire(place)  # it may still answer, but it is no longer in charge
        home = self._homes.get(place)
        if home is None or home not in self._wires:
            if connection.revive is not None and place in self._faulty:
                connection.revive()
            home = self._homes[place] = find(connection, key)
        wire = self._wires.get(home)
        if wire is None:
            wire = self._wires[home] = open_wire(connection, at=home)
        return wire

    def _has_wire(self, place: object) -> bool:
        return self._homes.get(place) in self._wires

    def _forget_wire(self, place: object, *, is_good: bool = False) -> None:
        """`is_good`: it still serves other queues, if there are any at that server."""
        home = self._homes.pop(place, None)
        if home is not None and not (is_good and home in self._homes.values()):
            wire = self._wires.pop(home, None)
            if wire is not None:
                wire.close()

    @staticmethod
    def _tell(held: Held, callback: Callable[..., None], *args: Any) -> None:
        with contextlib.suppress(
            RuntimeError
        ):  # the loop was closed without closing its worker; nobody is left to tell
            held.loop.call_soon_threadsafe(callback, *args)


def _has_long_run(held: Held) -> bool:
    """Whether a job runs that ran at the last turn too. They stand in the order in which they were taken."""
    try:
        oldest = next(iter(held.jobs.values()), None)
    except RuntimeError:  # the loop took or settled one in this moment
        return False
    was_oldest, held.oldest = held.oldest, oldest
    return oldest is not None and oldest is was_oldest


def renew_arguments(keys: QueueKeys, lock_ms: int, jobs: Iterable[Job]) -> list[Any]:
    """Of the script that prolongs the locks of these runs."""
    flat = [part for job in jobs for part in (as_sent(job.id), as_sent(job.token), job.fence)]
    return [keys.base, lock_ms, *flat]


def tell_retaken(queue: str, count: int) -> None:
    logger.warning("queue %r: the locks of %d running jobs had expired and were renewed", queue, count)
    telemetry.emit("worker.locks_retaken", queue=queue, count=count)


def _pause_s(held: list[Held]) -> float:
    """Until the next look: short enough for the shortest lock and interval, so that what options allow also works."""
    shortest_ms = min((min(one.lock_ms / 4, one.stalled_interval_ms) for one in held), default=1_000)
    return max(_SHORTEST_TICK_S, min(_TICK_S, shortest_ms / 1_000))


def _named(ids: list[bytes], names: list[bytes]) -> list[tuple[str, str]]:
    return [(_text(job_id), name.decode("utf-8", "replace")) for job_id, name in zip(ids, names, strict=True)]


def _text(job_id: bytes) -> str:
    return job_id.decode("utf-8", "surrogateescape")


_shared: dict[object, Keepalive] = {}
_shared_lock = threading.Lock()


def shared(connection: Connection) -> Keepalive:
    """The process's keepalive for one server; a forked child gets its own.

    One thread per server, because its calls block: a server that does not answer must not cost the workers of another
    one their locks.
    """
    with _shared_lock:
        known = _shared.get(connection.address)
        if known is None or known._pid != os.getpid():
            known = _shared[connection.address] = Keepalive()
        return known
