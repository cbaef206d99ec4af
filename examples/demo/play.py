"""The first act: add jobs at a steady pace, kill a worker process in the middle, wait for the end, add up.

In: a server and how much to do. Out: a `Report` that changes while the play goes on; a display looks at it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import random
import sys
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bullpen import BullpenError, Connection, EventsLost, JobCounts, JobState, Queue, QueueEvents

from . import jobs

WORKERS = 3
_TICK_S = 0.1
_PRODUCING = 0.6
"""Share of the time in which jobs are added; the rest is for delays, retries and recovery."""
_LONGEST_DELAY = 0.25
_KILL_AT = 0.35
_REPLACE_AFTER_S = 1.0


class PlayFailed(BullpenError):
    """The demo could not go on."""


@dataclass(slots=True)
class Report:
    """What has happened so far."""

    queue: str
    jobs: int
    counts: JobCounts = field(default_factory=lambda: JobCounts(0, 0, 0, 0, 0, 0, 0))
    dead_letters: int = 0
    added: int = 0
    events: Counter[str] = field(default_factory=Counter)
    """How often each event was seen: `active` is a run of the handler, `retry` a failed one that is tried again."""
    victim: str | None = None
    in_its_hands: int = 0
    """Jobs that the killed worker was running."""
    per_second: deque[int] = field(default_factory=lambda: deque([0], maxlen=60))
    workers: tuple[tuple[str, str], ...] = ()
    """Name and condition of each worker process."""
    story: list[tuple[float, str]] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None

    @property
    def seconds(self) -> float:
        return (self.ended or time.monotonic()) - self.started

    @property
    def finished(self) -> int:
        return self.counts.completed + self.dead_letters

    @property
    def recovered(self) -> int:
        return self.events["stalled"]

    @property
    def unfinished(self) -> int:
        return self.counts.pending + self.counts.active

    @property
    def adds_up(self) -> bool:
        """Nothing lost, nothing doubled, nothing left over."""
        return self.added == self.jobs == self.finished and self.unfinished == 0

    def tell(self, text: str) -> None:
        self.story.append((self.seconds, text))

    def to_json(self) -> dict[str, Any]:
        return {
            "addsUp": self.adds_up,
            "added": self.added,
            "completed": self.counts.completed,
            "deadLettered": self.dead_letters,
            "unfinished": self.unfinished,
            "handlerRuns": self.events["active"],
            "retries": self.events["retry"],
            "killedWorker": self.victim,
            "inItsHands": self.in_its_hands,
            "recovered": self.recovered,
            "progressReports": self.events["progress"],
            "seconds": round(self.seconds, 3),
        }


@dataclass(eq=False, slots=True)
class Player:
    """One worker process."""

    name: str
    process: asyncio.subprocess.Process
    log: Path
    killed: bool = False

    @property
    def condition(self) -> str:
        return "works" if self.process.returncode is None else "killed" if self.killed else "ended"

    async def ready(self) -> None:
        """Wait until it takes jobs, or has ended without."""
        assert self.process.stdout is not None
        if not await self.process.stdout.readline():
            await self.process.wait()


class Play:
    """One run of the demo on a queue that nobody has used before."""

    def __init__(
        self, connection: Connection, *, url: str, queue: str, prefix: str, jobs: int, seconds: float, directory: Path
    ) -> None:
        self.report = Report(queue, jobs)
        self._connection, self._url, self._prefix = connection, url, prefix
        self._seconds, self._directory = seconds, directory
        self._players: list[Player] = []
        # The same jobs every time: whoever reports something odd can show it again.
        self._dice = random.Random(7)
        self._all_recovered = asyncio.Event()

    async def run(self) -> None:
        """Until every job is done, or the time is up twice over."""
        report = self.report
        queue = Queue(report.queue, connection=self._connection, prefix=self._prefix)
        events = QueueEvents(report.queue, connection=self._connection, prefix=self._prefix)
        async with queue, events:
            # Longer than usual: a display that skips events would show a sum that is wrong.
            await queue.set_events_max_len(max(10_000, 12 * report.jobs))
            watching = asyncio.ensure_future(self._watch_events(events))
            try:
                await asyncio.gather(*[(await self._start()).ready() for _ in range(WORKERS)])
                self._refuse_to_go_on_without()
                report.started = time.monotonic()
                report.tell(f"{WORKERS} worker processes are ready, {jobs.CONCURRENCY} jobs at a time each")
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._produce(queue))
                    group.create_task(self._kill_one(queue))
                    group.create_task(self._watch_counts(queue))
            finally:
                await self._end()
                with contextlib.suppress(asyncio.CancelledError):
                    watching.cancel()
                    await watching

    # The worker processes -------------------------------------------------------------------------------------------

    async def _start(self) -> Player:
        name = f"worker-{len(self._players) + 1}"
        log = self._directory / f"{name}.log"  # shown only if one of them ends that should not
        with log.open("wb") as stderr:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, str(Path(jobs.__file__)), self.report.queue, name),
                stdin=asyncio.subprocess.PIPE,  # its end tells the worker that we are gone
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, "BULLPEN_REDIS_URL": self._url, "BULLPEN_PREFIX": self._prefix},
                process_group=0,  # Ctrl-C is for us; they end when we say so
            )
        player = Player(name, process, log)
        self._players.append(player)
        return player

    async def _end(self, within_s: float = 10.0) -> None:
        """Let all finish, and kill what does not."""
        for player in self._players:
            if player.process.stdin is not None:
                player.process.stdin.close()
        waits = [asyncio.ensure_future(player.process.wait()) for player in self._players]
        _, late = await asyncio.wait(waits, timeout=within_s) if waits else ((), ())
        if late:
            for player in self._players:
                with contextlib.suppress(ProcessLookupError):
                    player.process.kill()
            await asyncio.wait(late)

    def _refuse_to_go_on_without(self) -> None:
        """Somebody who left without being asked: then the sum at the end would prove nothing."""
        for player in self._players:
            if player.condition == "ended":
                raise PlayFailed(
                    f"{player.name} ended with {player.process.returncode} although nobody asked it to:\n"
                    + player.log.read_text(errors="replace")[-2_000:]
                )

    # What happens ---------------------------------------------------------------------------------------------------

    async def _produce(self, queue: Queue) -> None:
        report, seconds = self.report, self._seconds * _PRODUCING
        new = jobs.make_jobs(report.jobs, self._seconds * _LONGEST_DELAY, self._dice)
        began = time.monotonic()
        while report.added < report.jobs:
            share = min(1.0, (time.monotonic() - began + _TICK_S) / max(seconds, _TICK_S))
            batch = list(itertools.islice(new, int(report.jobs * share) - report.added))
            report.added += len(await queue.add_many(batch))
            await asyncio.sleep(_TICK_S)
        report.tell(f"all {report.jobs:,} jobs added")

    async def _kill_one(self, queue: Queue) -> None:
        """Kill the worker process that has most work in its hands, and put another in its place."""
        report = self.report
        await asyncio.sleep(self._seconds * _KILL_AT)
        victim = await self._busy_player(queue)
        if victim is None:
            report.tell("no worker has work in its hands, so none is killed; give it more --jobs")
            return
        victim.killed = True
        victim.process.kill()  # no goodbye, no clean-up, its jobs stay locked
        await victim.process.wait()
        report.victim = victim.name
        report.in_its_hands = (await self._hands(queue))[victim.name]
        report.tell(
            f"SIGKILL for {victim.name} (pid {victim.process.pid}): {report.in_its_hands} jobs were in its hands, "
            f"locked for up to {jobs.LOCK_MS / 1000:g} s"
        )
        await asyncio.sleep(_REPLACE_AFTER_S)
        player = await self._start()
        await player.ready()
        report.tell(f"{player.name} is ready to take its place")
        if report.in_its_hands:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_recovered.wait(), 5 * jobs.LOCK_MS / 1000)
            report.tell(f"{report.recovered} jobs recovered, to be run again by the others")

    async def _hands(self, queue: Queue) -> Counter[str]:
        return Counter(job.worker_id or "" for job in await queue.jobs(JobState.ACTIVE, count=500))

    async def _busy_player(self, queue: Queue) -> Player | None:
        for _ in range(100):
            hands = await self._hands(queue)
            busiest = max(self._players, key=lambda player: hands[player.name])
            if hands[busiest.name]:
                return busiest
            if self.report.finished >= self.report.jobs:
                return None
            await asyncio.sleep(0.02)
        return None

    async def _watch_counts(self, queue: Queue) -> None:
        report = self.report
        give_up = report.started + 2 * self._seconds + 30
        before, since = 0, time.monotonic()
        while report.finished < report.jobs and time.monotonic() < give_up:
            await asyncio.sleep(_TICK_S)
            await self._count(queue)
            report.workers = tuple((each.name, each.condition) for each in self._players)
            self._refuse_to_go_on_without()
            if time.monotonic() - since >= 0.5:
                done = report.finished
                report.per_second.append(int((done - before) / (time.monotonic() - since)))
                before, since = done, time.monotonic()
        # What the last jobs told is on its way; a moment later all of it is counted.
        await asyncio.sleep(2 * _TICK_S)
        await self._count(queue)
        report.ended = time.monotonic()

    async def _count(self, queue: Queue) -> None:
        self.report.counts = await queue.counts()
        self.report.dead_letters = await queue.dead_letters.depth()

    async def _watch_events(self, events: QueueEvents) -> None:
        while True:
            with contextlib.suppress(EventsLost):
                async for event in events:
                    self.report.events[event.event] += 1
                    if 0 < self.report.in_its_hands <= self.report.recovered:
                        self._all_recovered.set()
