"""Adds in a row may watch for their answers instead of sleeping, where that is faster."""

from __future__ import annotations

import asyncio
import selectors
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from time import monotonic
from typing import Any

import pytest

from bullpen import sync
from bullpen.queue import Queue
from bullpen.redis import spin as _watch
from bullpen.redis.address import NodeAddress
from bullpen.redis.blocking import open_wire
from bullpen.redis.client import Connection
from bullpen.redis.socket import Wire
from bullpen.redis.spin import LONGEST_S, NEVER, TRIED, USED, Watch
from bullpen.wire.scripts import SCRIPTS

ASLEEP_S = 130e-6


class Adds:
    """Adds one after the other, by a clock of our own: they are answered sooner or later according to the way."""

    def __init__(self, watch: Watch, *, awake_s: float, asleep_s: float = ASLEEP_S, pause_s: float = 10e-6) -> None:
        self.watch, self.awake_s, self.asleep_s, self.pause_s = watch, awake_s, asleep_s, pause_s
        self.now = 1_000.0

    def run(self, count: int) -> int:
        """How many of so many adds watched."""
        watched = 0
        for _ in range(count):
            until = self.watch.begin(self.now)
            assert until in (NEVER, self.now + LONGEST_S)
            self.now += self.asleep_s if until == NEVER else self.awake_s
            self.watch.end(self.now)
            self.now += self.pause_s
            watched += until != NEVER
        return watched

    def until_decided(self) -> None:
        self.run(1)  # the first is in no row yet
        assert self.run(TRIED) == 0
        assert self.run(TRIED) == TRIED


class TestLearning:
    def test_a_near_server_is_watched(self) -> None:
        adds = Adds(Watch(), awake_s=70e-6)
        adds.until_decided()
        assert adds.run(USED) == USED

    def test_what_gains_little_is_not_worth_a_core(self) -> None:
        adds = Adds(Watch(), awake_s=0.9 * ASLEEP_S)
        adds.until_decided()
        assert adds.run(USED) == 0

    def test_both_ways_are_tried_again(self) -> None:
        """Others may need the core by now, or need it no more."""
        adds = Adds(Watch(), awake_s=70e-6)
        adds.until_decided()
        assert adds.run(USED) == USED
        adds.awake_s = 2 * ASLEEP_S
        assert adds.run(2 * TRIED) == TRIED
        assert adds.run(USED) == 0
        adds.awake_s = 70e-6
        assert adds.run(2 * TRIED) == TRIED
        assert adds.run(USED) == USED

    def test_adds_with_pauses_between_them_sleep_and_teach_nothing(self) -> None:
        """On few cores the worker that a single job is meant for could not start."""
        adds = Adds(Watch(), awake_s=70e-6, pause_s=0.002)
        assert adds.run(10 * TRIED) == 0
        adds.pause_s = 10e-6
        adds.until_decided()

    def test_a_pause_interrupts_the_watching(self) -> None:
        adds = Adds(Watch(), awake_s=70e-6)
        adds.until_decided()
        adds.now += 0.002
        assert adds.run(3) == 2

    def test_the_first_adds_of_a_try_do_not_count(self) -> None:
        """Processors need a while until they are as fast as they can be."""
        adds = Adds(Watch(), awake_s=70e-6)
        adds.run(1 + TRIED)
        adds.awake_s = 900e-6
        adds.run(TRIED - _watch.COUNTED)
        adds.awake_s = 70e-6
        adds.run(_watch.COUNTED)
        assert adds.run(USED) == USED

    def test_one_answer_that_takes_very_long_does_not_decide(self) -> None:
        adds = Adds(Watch(), awake_s=40e-6)
        adds.run(1 + TRIED)
        adds.run(TRIED - 1)
        adds.awake_s = 3.0
        adds.run(1)
        adds.awake_s = 40e-6
        assert adds.run(USED) == USED


class Sleeps(selectors.DefaultSelector):
    """What a loop does when it has nothing to do: how often it slept, and how often it only looked."""

    def __init__(self) -> None:
        super().__init__()
        self.slept = self.looked = 0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout > 0:
            self.slept += 1
        else:
            self.looked += 1
        return super().select(timeout)

    def forget(self) -> None:
        self.slept = self.looked = 0


def run_spied(scenario: Any, *args: Any) -> None:
    sleeps = Sleeps()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(sleeps)) as runner:
        runner.run(scenario(sleeps, *args))


@asynccontextmanager
async def asked() -> AsyncIterator[tuple[Wire, asyncio.Future[Any], Callable[[float], object]]]:
    """A wire that has asked something, what it waits for, and a function that has it answered after so long."""
    loop = asyncio.get_running_loop()
    ours, theirs = socket.socketpair()
    with theirs:
        _, wire = await loop.create_unix_connection(lambda: Wire(NodeAddress(path="pair")), sock=ours)
        yield wire, wire.send(b"PING", within_s=60), lambda after_s: loop.call_later(after_s, theirs.send, b"+PONG\r\n")
        wire.close()


class TestLoop:
    def test_a_wire_keeps_the_loop_awake_while_an_answer_is_missing(self) -> None:
        async def scenario(sleeps: Sleeps) -> None:
            async with asked() as (wire, reply, answer):
                answer(0.05)
                sleeps.forget()
                wire.stay_awake(monotonic() + 60)
                assert await reply == b"PONG"
                assert (sleeps.slept, sleeps.looked > 50) == (0, True)
                sleeps.forget()
                await asyncio.sleep(0.01)
                assert (sleeps.slept > 0, sleeps.looked < 5) == (True, True)

        run_spied(scenario)

    def test_it_may_sleep_when_the_time_is_over(self) -> None:
        async def scenario(sleeps: Sleeps) -> None:
            async with asked() as (wire, reply, answer):
                wire.stay_awake(monotonic() + 0.005)
                wire.stay_awake(monotonic() + 0.010)  # one watch, however often it is asked for
                await asyncio.sleep(0.015)
                sleeps.forget()
                answer(0.02)
                assert await reply == b"PONG"
                assert (sleeps.slept > 0, sleeps.looked < 5) == (True, True)

        run_spied(scenario)

    def test_adds_in_a_row_do_not_sleep(self, redis_url: str, queue_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Once that was found worth it, which is not left to chance here."""
        monkeypatch.setattr(_watch, "WORTH_IT", float("inf"))
        monkeypatch.setattr(_watch, "LONGEST_S", 60.0)
        monkeypatch.setattr(_watch, "IN_A_ROW_S", 60.0)

        async def scenario(sleeps: Sleeps) -> None:
            async with Queue(queue_name, connection=redis_url) as queue:
                for _ in range(10 + 2 * TRIED):
                    await queue.add("mail")
                sleeps.forget()
                for _ in range(50):
                    await queue.add("mail")
                assert sleeps.slept == 0
                assert (await queue.counts()).waiting == 60 + 2 * TRIED

        run_spied(scenario)

    def test_adds_with_pauses_sleep(self, redis_url: str, queue_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_watch, "WORTH_IT", float("inf"))
        monkeypatch.setattr(_watch, "LONGEST_S", 60.0)

        async def scenario(sleeps: Sleeps) -> None:
            async with Queue(queue_name, connection=redis_url) as queue:
                for _ in range(10 + 2 * TRIED):
                    await queue.add("mail")
                for _ in range(20):
                    await asyncio.sleep(0.002)
                    sleeps.forget()
                    await queue.add("mail")
                    assert sleeps.slept >= 1

        run_spied(scenario)


class Reads:
    """A socket that remembers how it was read."""

    def __init__(self, real: socket.socket) -> None:
        self._real = real
        self.flags: list[int] = []

    def recv(self, room: int, flags: int = 0) -> bytes:
        self.flags.append(flags)
        return self._real.recv(room, flags)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


class TestThread:
    def test_an_answer_is_watched_for_and_then_slept_for(self, redis_url: str, queue_name: str) -> None:
        wire = open_wire(Connection(redis_url))
        reads = wire._socket = Reads(wire._socket)  # type: ignore[assignment]
        late = ("BLPOP", queue_name, 0.4)  # answered after a while, with nothing

        assert wire.run_script(SCRIPTS["add"], late) is None
        assert reads.flags == [0]
        reads.flags.clear()
        assert wire.run_script(SCRIPTS["add"], late, watch_until=monotonic() + 0.2) is None
        assert reads.flags == [socket.MSG_DONTWAIT] * (len(reads.flags) - 1) + [0]
        assert len(reads.flags) > 10
        reads.flags.clear()
        assert wire.run_script(SCRIPTS["add"], late, watch_until=monotonic() + 60) is None
        assert set(reads.flags) == {socket.MSG_DONTWAIT}
        wire.close()

    def test_adds_in_a_row_do_not_sleep(self, redis_url: str, queue_name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_watch, "WORTH_IT", float("inf"))
        monkeypatch.setattr(_watch, "LONGEST_S", 60.0)
        monkeypatch.setattr(_watch, "IN_A_ROW_S", 60.0)
        with sync.Queue(queue_name, connection=redis_url) as queue:
            queue.add("mail")
            line = queue._inner.line
            assert line._wire is not None
            reads = line._wire._socket = Reads(line._wire._socket)  # type: ignore[assignment]
            for _ in range(TRIED):
                queue.add("mail")
            assert set(reads.flags) == {0}
            reads.flags.clear()
            for _ in range(50):
                queue.add("mail")
            assert set(reads.flags) == {socket.MSG_DONTWAIT}
            assert queue.counts().waiting == 51 + TRIED
