"""Performs what the pump decides: exchanges, the blocked read, the timer; and tells it what happens.

No timer fills a batch: free slots and finished outcomes go into one exchange, and what finishes while it is in flight
goes out with the next. At concurrency 1 that is one round trip per job, under load batches grow by themselves.
In: outcomes, and calls that there may be jobs. Out: taken jobs, and a code for each outcome.
Elsewhere: deciding (`pump`), packing (`exchange`), the blocked read (`reader`), jobs (`runs`), codes (`settling`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sized
from typing import Any, Final, NamedTuple

from bullpen._kernel.clock import ServerClock
from bullpen._kernel.logs import get_logger
from bullpen._kernel.tuples import maker
from bullpen.errors import ConnectionLost, ServerRefused
from bullpen.queue.actions import AsyncActions
from bullpen.queue.job import Job
from bullpen.queue.late_wakeups import note_late_wakeup
from bullpen.redis.calls import Flight
from bullpen.redis.client import Door
from bullpen.redis.socket import reason_of
from bullpen.wire.keys import QueueKeys
from bullpen.worker import pump
from bullpen.worker.batches import BatchRuns
from bullpen.worker.exchange import REFUSED, Exchange, ExchangeReply, JobSettlement
from bullpen.worker.options import WorkerOptions
from bullpen.worker.pump import Act, Load, Read, State, decide
from bullpen.worker.reader import Reader
from bullpen.worker.reports import Reports
from bullpen.worker.runs import JobRuns
from bullpen.worker.settling import JobSettling

logger = get_logger("bullpen.worker")

_TWO_LANES_FROM: Final = 20
"""From this concurrency on two exchanges are in flight, each for half of the slots: the server works while Python
does."""
_LONGEST_LIMIT_S: Final = 1.0
"""Other clients tell nobody when they lift a limit, nor does a clock that is set right."""
_REFUSED_PAUSE_MS: Final = 1_000
_OVERLOOKED_MS: Final = 20
"""A job that could run for so long, and was found without a marker, was announced to nobody."""
_NOTHING_NEW, _HAS_MORE = pump.Reply(), pump.Reply(has_more=True)
_QUIET: Final = (0, 0, False)
"""The end of a reply: no limit, no due time, and nothing left behind."""
_new_load = maker(Load)


class Parts(NamedTuple):
    """Of a worker, what its driver works with."""

    door: Door
    read_door: Door
    keys: QueueKeys
    clock: ServerClock
    actions: AsyncActions
    new_exchange: Callable[[], Exchange]
    runs: JobRuns
    settling: JobSettling
    reports: Reports
    batches: BatchRuns | None


class _Sent:
    """An exchange in flight. It gets the reply."""

    __slots__ = ("_driver", "call", "exchange", "flight", "settled")

    flight: Flight

    def __init__(
        self, driver: PumpDriver, exchange: Exchange, call: pump.SendExchange, settled: list[JobSettlement]
    ) -> None:
        self._driver, self.exchange, self.call, self.settled = driver, exchange, call, settled

    def done(self) -> bool:
        return False

    def set_result(self, reply: Any, /) -> None:
        self._driver.on_reply(self, reply)

    def set_exception(self, error: BaseException, /) -> None:
        self._driver.on_lost_reply(self, error)


class PumpDriver:
    """The exchanges of one worker."""

    def __init__(self, parts: Parts, options: WorkerOptions, concurrency: int, on_bug: Callable[[BaseException], None]):
        self._door, self._keys, self._clock, self._actions = parts.door, parts.keys, parts.clock, parts.actions
        self._new_exchange = parts.new_exchange
        self._runs, self._settling, self._reports = parts.runs, parts.settling, parts.reports
        running, self._unlocked = parts.runs.running, parts.settling.unlocked
        self._running: Sized = running if parts.batches is None else parts.batches.places(running, self.wake)
        self._suspects = parts.runs.suspects
        self._options, self.on_bug = options, on_bug
        self._loop = asyncio.get_running_loop()
        self.state = State(slots=concurrency, lanes=_lanes(concurrency), batch=options.jobs_per_slot)
        self.last_exchange = 0.0
        """When an answer came last; 0: none yet."""
        self.settled = parts.runs.settled
        self.call_keys: list[str] = []
        self._idle: list[Exchange] = []
        self._is_woken = self._is_closed = self._has_voided = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._noting: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()
        self._lent = self._make_exchange()
        self._reader = Reader(
            *(parts.read_door, self._keys.marker, self._keys.limits_changed, self._clock, self._lent, self),
            commands=self._door,
            drain_delay_ms=options.drain_delay_ms,
            clock_offset_ms=options.clock_offset_ms,
        )

    # ---- what the worker tells --------------------------------------------------------------------------------

    def start(self) -> None:
        self._reader.start()
        self._run(self._begin())

    def on_settled(self) -> None:
        """There is an outcome, and a free lane. If nothing else can come along, it goes out now: somebody may wait."""
        if self._running or not self.state.is_alone(self._load()):
            self.wake()
        else:
            self._step()

    def call(self) -> None:
        """There may be jobs to take."""
        self._change(self.state.called())

    def wake(self) -> None:
        """Something has changed: see to it when what is about to happen in this turn of the loop has happened."""
        if not self._is_woken:
            self._is_woken, self._runs.is_awaited = True, False
            self._loop.call_soon(self._step)

    def pause(self) -> None:
        self._change(self.state.paused())

    def resume(self) -> None:
        self._change(self.state.resumed())

    def resize(self, concurrency: int) -> None:
        """More slots hold at once, fewer for what is taken from now on."""
        self._add_lanes(_lanes(concurrency))
        self._change(self.state.resized(concurrency, _lanes(concurrency)))

    @property
    def is_full(self) -> bool:
        return self.places_in_use >= self.state.slots

    @property
    def places_in_use(self) -> int:
        """Jobs that run; a batch that runs counts as a full one."""
        return len(self._running)

    def may_take(self) -> bool:
        return self.state.may_take(self._load())

    def stop_taking(self) -> None:
        self._change(self.state.closing())

    async def stop_reading(self) -> None:
        """End the blocked read in order."""
        await self._reader.stop(lambda: self.state.unserved_due_ms)
        await self._end_lent_poll()

    async def end(self, patience_s: float) -> bool:
        """No handler runs any more: wait until everything is settled. False when the server did not answer in time."""
        self._change(self.state.abandoned())
        try:
            async with asyncio.timeout(patience_s):
                await self._ended.wait()
        except TimeoutError:
            pass
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        return self._ended.is_set()

    @property
    def knows_all_answers(self) -> bool:
        """No call was left without an answer, so none will be repeated."""
        return self._ended.is_set() and not self._has_voided and not self._lent.is_unanswered

    # ---- deciding and doing -----------------------------------------------------------------------------------

    def _change(self, state: State) -> None:
        self.state = state
        self.wake()

    def _load(self) -> Load:
        return _new_load((len(self._running), len(self.settled), len(self._unlocked), self._suspects.waiting))

    def _step(self) -> None:
        self._is_woken = False
        if self._is_closed:
            return
        try:
            load = len(self._running), len(self.settled), len(self._unlocked), self._suspects.waiting
            self.state, actions = decide(self.state, _new_load(load))
            for action in actions:
                if type(action) is pump.SendExchange:
                    self._begin_exchange(action)
                else:
                    self._perform(action)
            if self.state.poll_at != self._timer_at:
                self._plan(self.state.poll_at)
            self._runs.is_awaited = bool(self._idle) and not self._is_woken
        except Exception as error:  # noqa: BLE001 - whoever happens to be at work here cannot mend a bug of ours
            self.on_bug(error)

    def _perform(self, action: pump.Action) -> None:
        if action is Act.LISTEN:
            self._reader.listen()
        elif action is Act.RELEASE:
            self._reader.release()
        elif action is Act.RETAKE:
            self._run(self._retake())
        elif action is Act.HAND_ON:
            self._reader.hand_on(self.state.due_ms)
        elif action is Act.END:
            self._ended.set()
        else:
            assert isinstance(action, pump.WatchLimits)
            self._reader.watch_limits(action.since_ms, action.until)

    def _plan(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at, self._timer = at, self._loop.call_at(at, self._on_timer) if at else None

    def _on_timer(self) -> None:
        # A timer may come a fraction of a millisecond early (uvloop counts whole ones). So its time says nothing about
        # whether it is still to come: it is forgotten here, and the reply to the poll plans the next one. A worker that
        # still held itself for limited would sleep with nobody to wake it.
        self._timer, self._timer_at = None, 0.0
        self.state = self.state.time_came(self._load())
        self._step()

    async def _begin(self) -> None:
        await self._bound_events()
        self._add_lanes(self.state.lanes)
        self.wake()

    async def _bound_events(self) -> None:
        """Write the option once there is somebody to write it to: a server that is away is waited for, like always."""
        length = self._options.events_max_len
        while length is not None and not self._door.closed:
            try:
                await self._actions.command("HSET", self._keys.meta, "opts.maxLenEvents", length)
                return
            except ServerRefused as error:
                self._reports.tell_error(error)
                return
            except ConnectionLost:
                continue  # the call has waited long enough between its own attempts

    def _add_lanes(self, wanted: int) -> None:
        """One that is there stays: with little to do it sleeps."""
        while len(self.call_keys) <= wanted:  # one is for the polls behind blocked reads
            self._idle.append(self._make_exchange())

    def _make_exchange(self) -> Exchange:
        exchange = self._new_exchange()
        self.call_keys.append(exchange.call_key)
        return exchange

    # ---- exchanges --------------------------------------------------------------------------------------------

    def _begin_exchange(self, call: pump.SendExchange) -> None:
        settled = self.settled[: call.settle]
        del self.settled[: call.settle]
        sent = _Sent(self, self._idle.pop(), call, settled)
        reader, is_carried = self._reader, False
        if call.listens:
            is_carried = reader.can_carry
            if not is_carried:
                self.state = self.state.not_carried()
        flight = sent.flight = sent.exchange.send(settled, call.take, sent, reader.carry if is_carried else None)
        if flight.wire is None:
            self._run(self._recover(sent, None))
        if call.listens and not is_carried:
            reader.listen()

    def on_reply(self, sent: _Sent, reply: Any) -> None:
        """Called where it is read: nothing stands between a job and its start."""
        if self._is_closed:
            return
        try:
            self._on_answer(sent, sent.exchange.take_in(sent.flight, reply))
        except Exception as error:  # noqa: BLE001 - a bug of ours belongs to the worker, not to the wire
            self.on_bug(error)

    def on_lost_reply(self, sent: _Sent, error: BaseException) -> None:
        """The reply is an error, or lost."""
        if not self._is_closed:
            self._run(self._recover(sent, error))

    async def _recover(self, sent: _Sent, error: BaseException | None) -> None:
        """Find out what became of an exchange. When the script itself fails, each settlement is sent alone, so that one
        bad job harms only itself."""
        settled, exchange = sent.settled, sent.exchange
        try:
            reply = await exchange.recover(sent.flight, error)
        except ServerRefused as refusal:
            self._reports.tell_error(refusal)
            if len(settled) == 1:
                codes = [self._drop(settled[0], refusal)]
            else:
                codes = [await self._settle_alone(exchange, settlement) for settlement in settled]
            # A server that refuses to give jobs is not asked in a tight loop.
            limited_ms = _REFUSED_PAUSE_MS if sent.call.take and len(settled) < 2 else 0
            reply = ExchangeReply(0, codes, [], limited_ms, 0, len(settled) > 1)
        self._on_answer(sent, reply)

    async def _settle_alone(self, exchange: Exchange, settlement: JobSettlement) -> int:
        try:
            return (await exchange.run([settlement], 0)).codes[0]
        except ServerRefused as refusal:
            self._reports.tell_error(refusal)
            return self._drop(settlement, refusal)

    def _drop(self, settlement: JobSettlement, refusal: ServerRefused) -> int:
        logger.error(
            "queue %r: outcome of job %r dropped, the server refused it: %s",
            *(self._keys.name, settlement.job.id, refusal),
        )
        return REFUSED

    def _on_answer(self, sent: _Sent, reply: ExchangeReply) -> None:
        if not self.last_exchange:
            self._reports.tell("ready")
        self.last_exchange = time.monotonic()
        if sent.settled:
            self._settling.on_codes(sent.settled, reply)
            if self._reports.wants_drained:
                self._notice_drained(reply)
        if reply.taken:
            if sent.call.is_fallback:
                self._note_late_wakeup(reply)
            if self._is_late(reply):
                self._run(self._give_back_and_go_on(sent, reply))
                return
            self._start(reply.taken)
        self._go_on(sent, reply)

    def _start(self, jobs: list[Job]) -> None:
        if self.state.is_closing or self.state.is_paused or self._suspects.is_alone:
            self._runs.give_back(jobs)  # they came with a call that was in flight
        else:
            self._runs.start(jobs)

    def _go_on(self, sent: _Sent, reply: ExchangeReply) -> None:
        self._idle.append(sent.exchange)
        self.state = self.state.answered(sent.call, self._news(reply))
        self._step()

    async def _give_back_and_go_on(self, sent: _Sent, reply: ExchangeReply) -> None:
        await self._give_back_late(sent.exchange, reply)
        self._go_on(sent, reply)

    def _news(self, reply: ExchangeReply) -> pump.Reply:
        """What the pump needs of a reply."""
        if reply[3:] == _QUIET:
            return _NOTHING_NEW
        limited_ms, due_ms, has_more = reply[3:]
        if not (limited_ms or due_ms):
            return _HAS_MORE
        now = self._loop.time()
        if limited_ms > 0:
            until = now + min(limited_ms / 1000, _LONGEST_LIMIT_S)
            since = reply.now_ms - self._options.clock_offset_ms if reply.now_ms else None
            return pump.Reply(has_more, until, since)
        return pump.Reply(has_more, due_ms=due_ms, due_at=self._due_at(due_ms))

    def _due_at(self, due_ms: int) -> float:
        """Our own timer, because a blocked read ends up to 100 ms late on an idle server's tick."""
        wait_s = self._clock.seconds_until(due_ms - self._options.clock_offset_ms)
        return self._loop.time() + max(wait_s, 0.001)

    def _is_late(self, reply: ExchangeReply) -> bool:
        """The answer lay unread while a handler blocked the loop. Nobody renewed the locks of what it brought, since
        nobody here knew of the jobs: others may run them by now."""
        age_ms = self._clock.now_ms() + self._options.clock_offset_ms - reply.now_ms
        # A clock that is not known well proves nothing.
        most_ms = self._options.lock_ms / 4
        return age_ms > most_ms and age_ms - self._clock.error_ms > most_ms

    async def _give_back_late(self, exchange: Exchange, reply: ExchangeReply) -> None:
        """Ask the server which of these jobs are still ours, and give them back."""
        logger.warning(
            "queue %r: an answer was read too late; its %d jobs are given back", self._keys.name, len(reply.taken)
        )
        try:
            still_ours = (await exchange.void()).taken
        except ServerRefused as error:
            self._reports.tell_error(error)  # the locks run out
            return
        self._runs.give_back(still_ours)

    async def _retake(self) -> None:
        try:
            await self._settling.retake()
        finally:
            self._change(self.state.retaken())

    def _notice_drained(self, reply: ExchangeReply) -> None:
        """Outcomes were stored: were they the last?"""
        if not (self._runs.running or self.settled or reply.taken or reply.has_more or reply.limited_ms):
            self._reports.tell("drained")

    # ---- what the reader tells --------------------------------------------------------------------------------

    def on_read_begins(self, *, can_end: bool) -> bool:
        self.state = self.state.began_to_read(self._load(), can_end=can_end)
        return self.state.read is Read.LENT

    def on_polled(self, reply: ExchangeReply, *, timed_out: bool = False, rests: bool = False) -> None:
        """Where the reply is read: nothing stands between a job and its start."""
        self.last_exchange = time.monotonic()
        is_late = False
        if reply.taken:
            if timed_out:
                self._note_late_wakeup(reply)
            is_late = self._is_late(reply)
            if is_late:
                self._run(self._give_back_and_read_on(reply, rests=rests))
            else:
                self._start(reply.taken)
        self.state = self.state.read_answered(self._news(reply), rests=rests or is_late)
        self.wake()

    async def _give_back_and_read_on(self, reply: ExchangeReply, *, rests: bool) -> None:
        await self._give_back_late(self._lent, reply)
        if not rests:
            self.on_idle()

    def on_read_ended(self, *, marker: bool = False, due_ms: int = 0, may_be_lost: bool = False) -> None:
        state = self.state.read_ended()
        if due_ms:
            state = state.due(due_ms, self._due_at(due_ms))
        else:
            state = state.marked() if marker else state.called(is_fallback=not may_be_lost)
        self._change(state)

    def on_idle(self) -> None:
        self._change(self.state.read_ended())

    def on_limits_read(self, *, are_changed: bool) -> None:
        state = self.state.read_ended()
        self._change(state.limits_changed() if are_changed else state)

    def on_not_released(self, *, may_ask: bool) -> None:
        self._change(self.state.not_released(may_ask=may_ask))

    def on_error(self, error: BaseException) -> None:
        self._reports.tell_error(error)

    def on_task_done(self, task: asyncio.Task[None]) -> None:
        """The tasks of reader and driver end by themselves or when we say so; anything else must be seen."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.on_bug(error)

    async def _end_lent_poll(self) -> None:
        """The blocked read could not be ended in order. The poll behind it may have taken a job, or may do so yet: find
        out, and see to it that no late copy does."""
        if not self._lent.is_unanswered or self._door.is_lost:
            return
        self._has_voided = True
        try:
            async with asyncio.timeout(self._door.connection.command_timeout_s):
                reply = await self._lent.void()
        except (TimeoutError, ConnectionLost, ServerRefused) as error:
            logger.warning(
                "queue %r: the last poll has no answer (%s); a job that it took returns when its lock expires",
                self._keys.name,
                reason_of(error),
            )
            return
        self._start(reply.taken)

    # ---- helpers ----------------------------------------------------------------------------------------------

    def _note_late_wakeup(self, reply: ExchangeReply) -> None:
        """The blocked read has waited for nothing, and the poll after it found jobs. One that was added in that very
        moment was not overlooked by anybody."""
        count = sum(reply.now_ms - job.record.due_ms > _OVERLOOKED_MS for job in reply.taken)
        if count:
            taken = [job.id for job in reply.taken]
            self.note(note_late_wakeup(self._actions, self._keys, taken, count, reply.now_ms))

    def note(self, noting: Coroutine[Any, Any, None]) -> None:
        """Write down in the background that a wake-up came late."""
        task = self._loop.create_task(noting, name="bullpen late wake-up")
        self._noting.add(task)
        task.add_done_callback(self._noting.discard)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work, name=f"bullpen pump {self._keys.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(self.on_task_done)


def _lanes(concurrency: int) -> int:
    return 2 if concurrency >= _TWO_LANES_FROM else 1
