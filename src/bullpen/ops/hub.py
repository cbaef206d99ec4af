"""One reader for many viewers: snapshots of all queues, and news of single ones.

In: a connection and a prefix. Out: the newest snapshot of all queues, taken at most once a second however many ask; and
subscriptions that are notified when something changed. A queue is read once for all its viewers; when nobody
does, the server gets no command. A slow viewer gets the newest state and no backlog: a subscription holds one number.
Elsewhere: the snapshot itself (`overview`), how it reaches a browser (`bullpen.dashboard`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

from bullpen._kernel.logs import get_logger
from bullpen.errors import BullpenError
from bullpen.ops.overview import Overview, QueueSnapshot, Snapshot
from bullpen.ops.recent import RecentHour, WaitSample, sample_waits
from bullpen.queue.activity import QueueActivity
from bullpen.redis import Connection
from bullpen.wire.keys import QueueKeys

__all__ = ["ALL_QUEUES", "Hub", "Sampler", "TopicSubscription"]

logger = get_logger("bullpen.hub")

ALL_QUEUES: Final = ""
"""The topic of all queues; any other topic is the name of one queue."""
_FRESH_S: Final = 1.0
_FIRST_SEARCH_S: Final = 2.0
_SAMPLE_EVERY_S: Final = 1.0
_WAITS_EVERY_S: Final = 10.0
_LEAST_BETWEEN_S: Final = 0.25
_RETRY_S: Final = 1.0


class Sampler:
    """Snapshots of all queues, shared by all who ask."""

    def __init__(self, connection: Connection, prefix: str) -> None:
        self._connection, self._prefix = connection, prefix
        self._overview = Overview(connection, prefix)
        self._hour, self._waits = RecentHour(), dict[str, WaitSample]()
        self._sampling: asyncio.Task[None] | None = None
        self._sample_at = 0.0
        self._taking: asyncio.Task[Snapshot] | None = None
        self._searching: asyncio.Task[None] | None = None
        self._fresh_until = 0.0
        self.latest: Snapshot | None = None
        """The newest one, however old it is."""

    @property
    def is_complete(self) -> bool:
        """Whether it is known which queues there are."""
        return self._overview.is_complete

    async def snapshot(self) -> Snapshot:
        """The newest one, at most a second old. Raises ConnectionLost while the server is unreachable."""
        task = self._taking
        if task is None or (task.done() and (time.monotonic() >= self._fresh_until or _has_failed(task))):
            task = self._taking = asyncio.create_task(self._take(), name="bullpen snapshot")
            task.add_done_callback(_has_failed)  # asks for its error, also when everybody has gone away
        return await asyncio.shield(task)  # who goes away takes nobody along

    def forget(self) -> None:
        """Something was changed here: the next snapshot is taken again."""
        self._fresh_until = 0.0

    @property
    def waits(self) -> Mapping[str, WaitSample]:
        """How long jobs of the busiest queues waited lately."""
        return self._waits

    def done_per_minute(self, queue: str, picture: Snapshot) -> tuple[float, ...]:
        return self._hour.done_per_minute(queue, picture)

    async def _take(self) -> Snapshot:
        if self._overview.search_due_s == 0 and (self._searching is None or self._searching.done()):
            self._searching = asyncio.create_task(self._overview.search(), name="bullpen search")
            self._searching.add_done_callback(_note_failure)
        if not self._overview.is_complete and self._searching is not None:
            # The first one waits a moment for the names. With millions of keys it takes longer, and pages say so.
            await asyncio.wait([self._searching], timeout=_FIRST_SEARCH_S)
        picture = self.latest = await self._overview.read()
        self._fresh_until = time.monotonic() + _FRESH_S
        self._hour.note(picture)
        if time.monotonic() >= self._sample_at and (self._sampling is None or self._sampling.done()):
            self._sample_at = time.monotonic() + _WAITS_EVERY_S
            self._sampling = asyncio.create_task(self._sample_waits(picture), name="bullpen waits")
            self._sampling.add_done_callback(_note_failure)
        return picture

    async def _sample_waits(self, picture: Snapshot) -> None:
        """Beside the snapshots, which do not wait for it."""
        busy = sorted(picture.looks, key=lambda look: -sum(self._hour.done_per_minute(look.queue, picture)[-5:]))
        names = [QueueKeys(self._prefix, look.queue) for look in busy if look.completed or look.failed]
        self._waits = await sample_waits(self._connection, names, picture.at_ms)

    async def aclose(self) -> None:
        for task in (self._taking, self._searching, self._sampling):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, BullpenError, OSError):
                    await task


class _Topic:
    """What one reader knows, and who waits for it."""

    def __init__(self) -> None:
        self.version = 0
        self.viewers = 0
        self.reader: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def bump(self) -> None:
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_beyond(self, version: int, timeout_s: float) -> bool:
        """Whether something changed since. Asked first: a change before the call is seen too."""
        if self.version != version:
            return True
        try:
            await asyncio.wait_for(self._changed.wait(), timeout_s)
        except TimeoutError:  # a change may come while the wait is being given up
            return self.version != version
        return True


class TopicSubscription:
    """One viewer of one topic."""

    def __init__(self, topic: _Topic) -> None:
        self._topic, self._seen = topic, topic.version

    async def changed(self, timeout_s: float) -> bool:
        """Wait until something changed since the last call, or until time is up (False). However much happened in
        between is one change."""
        has_changed = await self._topic.wait_beyond(self._seen, timeout_s)
        if has_changed:
            self._seen = self._topic.version
        return has_changed


class Hub:
    """Readers of what is watched now."""

    def __init__(self, connection: Connection, prefix: str, sampler: Sampler) -> None:
        self._connection, self._prefix, self._sampler = connection, prefix, sampler
        self._topics: dict[str, _Topic] = {}

    @property
    def watched(self) -> tuple[str, ...]:
        """Topics with viewers."""
        return tuple(self._topics)

    @asynccontextmanager
    async def watch(self, name: str) -> AsyncIterator[TopicSubscription]:
        """Watch a queue, or with `ALL_QUEUES` all of them."""
        topic = self._topics.setdefault(name, _Topic())
        topic.viewers += 1
        if topic.reader is None:
            work = self._sample if name == ALL_QUEUES else self._follow
            topic.reader = asyncio.create_task(self._keep_on(work, name, topic), name=f"bullpen hub {name}")
        try:
            yield TopicSubscription(topic)
        finally:
            topic.viewers -= 1
            if not topic.viewers:
                self._topics.pop(name, None)
                await _ended(topic.reader)

    async def aclose(self) -> None:
        topics, self._topics = list(self._topics.values()), {}
        for topic in topics:
            if topic.reader is not None:
                await _ended(topic.reader)
            topic.bump()

    async def _keep_on(self, work: Callable[[str, _Topic], Awaitable[None]], name: str, topic: _Topic) -> None:
        is_away = False
        while True:
            try:
                await work(name, topic)
            except (BullpenError, OSError) as error:
                if not is_away:
                    logger.warning("dashboard: %s cannot be watched now: %s", name or "all queues", error)
                    topic.bump()  # pages say that the server is away
                is_away = True
                await asyncio.sleep(_RETRY_S)
            else:
                is_away = False

    async def _follow(self, name: str, topic: _Topic) -> None:
        """Watch one queue's events until the connection is lost: a few changes a second, however many events come."""
        async with QueueActivity(name, self._connection, self._prefix) as news:
            topic.bump()  # what happened before the position was fixed
            while True:
                await news.next()
                topic.bump()
                await asyncio.sleep(_LEAST_BETWEEN_S)

    async def _sample(self, _name: str, topic: _Topic) -> None:
        """Read all queues every second."""
        before: object = None
        while True:
            picture = await self._sampler.snapshot()
            if (now := [_seen(each, picture.at_ms) for each in picture.looks]) != before:
                before = now
                topic.bump()
            await asyncio.sleep(_SAMPLE_EVERY_S)


def _seen(look: QueueSnapshot, at_ms: int) -> QueueSnapshot:
    """What makes a page out of date: since when a job waits, not for how long, which a browser counts by itself."""
    return replace(look, oldest_ms=None if look.oldest_ms is None else at_ms - look.oldest_ms, worker_idle_s=None)


async def _ended(task: asyncio.Task[None] | None) -> None:
    if task is not None:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def _has_failed(task: asyncio.Task[Snapshot]) -> bool:
    return task.cancelled() or task.exception() is not None


def _note_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.warning("dashboard: queues cannot be scanned now: %s", error)
