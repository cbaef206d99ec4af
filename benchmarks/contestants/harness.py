"""What all contestants written in Python share: the conversation with the arena and the flow of each role.

A contestant is a program with one JSON argument, a `Task`. It says `ready`, waits for `go`, plays its role and reports
in JSON lines: `add` and `ask` once, when they are done; `work` ten times a second until its input ends. Times are
CLOCK_MONOTONIC, which all processes of a machine share. Runs in the environments of the peers: standard library only.
Elsewhere: who is started when (`benchmarks.arena`), the same for Node (`node_bench.mjs`).
"""

import asyncio
import contextlib
import importlib
import json
import logging
import os
import resource
import select
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol

Data = dict[str, Any]
AsyncHandler = Callable[[Data, int], Awaitable[None]]
BlockingHandler = Callable[[Data, int], None]

BULK = 500
IN_FLIGHT = 100
SLEEP_S = 0.01
BURN_S = 0.005
PAUSE_BETWEEN_ASKS_S = 0.003
"""Long enough for every contestant to be idle again: the latency of an idle queue is asked for."""
ASKS_TO_WARM_UP = 20


@dataclass(frozen=True)
class Task:
    """What one process has to do. Roles: `add`, `work`, `ask` (add a job and wait for its result, again and again)."""

    url: str
    role: str
    jobs: int
    queue: str = "bench"
    how: str = "bulk"
    """Of `add`: one_by_one, in_flight or bulk."""
    handler: str = "noop"
    """Of `work`: noop, sleep (10 ms), burn (5 ms of CPU), fail_once, fail, hang."""
    concurrency: int = 1
    payload_bytes: int = 100
    attempts: int = 1
    due_at: float | None = None
    """Of `add`: when all jobs are due, Unix seconds."""
    variant: list[str] = field(default_factory=list)
    """Words that only one contestant understands."""

    @property
    def data(self) -> Data:
        return {"p": "x" * max(0, self.payload_bytes - len('{"p":""}'))}

    @property
    def delay_s(self) -> float | None:
        return None if self.due_at is None else max(0.0, self.due_at - time.time())

    @property
    def wants_result(self) -> bool:
        """Whether results have to be stored; where that is a choice, it costs and is left out otherwise."""
        return "results" in self.variant


class FailsOnPurpose(Exception):
    """Raised by handlers that have to fail."""


class Tally:
    """Counts what a worker process did. The first and last instants bound the time that is measured."""

    def __init__(self, goal: int) -> None:
        self.count = 0
        self.first_began = self.last_began = self.last_ended = self.goal_at = 0.0
        self.began_by_index: dict[int, float] = {}
        self._goal = goal

    def began(self, data: Data) -> None:
        self.last_began = now = time.monotonic()
        if not self.first_began:
            self.first_began = now
        if "i" in data:
            self.began_by_index[data["i"]] = now

    def ended(self) -> None:
        self.count += 1
        self.last_ended = time.monotonic()
        if self.count == self._goal:  # of many more jobs, when only a part is measured
            self.goal_at = self.last_ended


class Peer(Protocol):
    """One library on one queue. Clients that block do so inside these coroutines: nothing else waits in the process."""

    async def open(self) -> None: ...
    async def add(self, data: Data) -> Any: ...
    async def add_many(self, many: Sequence[Data]) -> Any: ...
    async def ask(self, data: Data) -> None:
        """Add a job and wait until its result is there."""

    async def work(self, tally: Tally) -> None:
        """Run the handler for jobs; may return once it works in the background."""


def burn() -> None:
    """Use a fixed amount of CPU: what is left of two cores is what the library costs."""
    end = time.thread_time() + BURN_S
    while time.thread_time() < end:
        pass


def async_handler(task: Task, tally: Tally, *, counts: bool = True) -> AsyncHandler:
    """The handler of the workload. `counts=False`: the library tells by itself when a job is settled."""
    kind = task.handler

    async def act(attempt: int) -> None:
        if kind == "sleep":
            await asyncio.sleep(SLEEP_S)
        elif kind == "burn":
            burn()
        elif kind == "hang":
            await asyncio.Event().wait()
        elif kind == "fail" or attempt == 0:
            raise FailsOnPurpose

    async def handle(data: Data, attempt: int) -> None:
        tally.began(data)
        if kind != "noop":
            await act(attempt)
        if counts:
            tally.ended()

    return handle


def blocking_handler(task: Task, tally: Tally) -> BlockingHandler:
    """As `async_handler`, for libraries that run handlers in threads."""
    kind = task.handler
    lock = threading.Lock()  # without it increments of two threads are lost now and then

    def handle(data: Data, attempt: int) -> None:
        tally.began(data)
        if kind == "sleep":
            time.sleep(SLEEP_S)
        elif kind == "burn":
            burn()
        elif kind == "fail_once" and attempt == 0:
            raise FailsOnPurpose
        with lock:
            tally.ended()

    return handle


def main(make_peer: Callable[[Task], Peer], *, uvloop: bool | None = None) -> None:
    """Play the role that the command line says. `uvloop=None`: only in a variant that asks for it."""
    _take_output()
    logging.disable()  # some write a line per job, or a stack per failure; nobody reads them here
    given = json.loads(sys.argv[1])
    task = Task(**{key: value for key, value in given.items() if key in {known.name for known in fields(Task)}})
    with_uvloop = "uvloop" in task.variant if uvloop is None else uvloop
    run = importlib.import_module("uvloop").run if with_uvloop else asyncio.run
    play = {"add": _add, "ask": _ask, "work": _work}[task.role]
    with contextlib.suppress(KeyboardInterrupt):
        run(play(make_peer, task))


# ---- roles ------------------------------------------------------------------------------------------------------


async def _add(make_peer: Callable[[Task], Peer], task: Task) -> None:
    warm_up = make_peer(replace(task, queue="warm", jobs=IN_FLIGHT, due_at=None))
    await warm_up.open()
    await _add_all(warm_up, replace(task, jobs=IN_FLIGHT))
    peer = make_peer(task)
    await peer.open()
    _say(ready=True)
    _wait_for_go()

    cpu, started = _cpu_s(), time.monotonic()
    ids = await _add_all(peer, task)
    seconds = time.monotonic() - started
    _say(seconds=seconds, cpu_s=_cpu_s() - cpu, ids=ids)
    _leave()


async def _add_all(peer: Peer, task: Task) -> list[str]:
    added: list[Any] = []
    data = task.data
    if task.how == "bulk":
        for done in range(0, task.jobs, BULK):
            added += await peer.add_many([data] * min(BULK, task.jobs - done)) or ()
    elif task.how == "in_flight":
        left = iter(range(task.jobs))

        async def lane() -> None:
            for _ in left:
                added.append(await peer.add(data))

        await asyncio.gather(*(lane() for _ in range(IN_FLIGHT)))
    else:
        for _ in range(task.jobs):
            added.append(await peer.add(data))
    return [str(job.id) for job in added if hasattr(job, "id")]


async def _ask(make_peer: Callable[[Task], Peer], task: Task) -> None:
    peer = make_peer(task)
    await peer.open()
    _say(ready=True)
    _wait_for_go()

    cpu = _cpu_s()
    asked: list[tuple[float, float]] = []
    for index in range(-ASKS_TO_WARM_UP, task.jobs):
        began = time.monotonic()
        await peer.ask({"i": index})
        if index >= 0:
            asked.append((began, time.monotonic()))
        await asyncio.sleep(PAUSE_BETWEEN_ASKS_S)
    _say(asked=asked, cpu_s=_cpu_s() - cpu)
    _leave()


async def _work(make_peer: Callable[[Task], Peer], task: Task) -> None:
    peer = make_peer(task)
    await peer.open()
    tally = Tally(task.jobs)
    _say(ready=True)
    _wait_for_go()
    threading.Thread(target=_report, args=(tally, _cpu_s()), daemon=True).start()
    await peer.work(tally)
    await asyncio.Event().wait()


def _report(tally: Tally, cpu_before: float) -> None:
    """Tell the count whenever it has changed. A thread: libraries that block own the main one."""
    told = -1
    while True:
        is_over = bool(select.select([sys.stdin], [], [], 0.1)[0])
        if tally.count != told:
            told = tally.count
            _say(
                count=told,
                first_began=tally.first_began,
                last_began=tally.last_began,
                last_ended=tally.last_ended,
                goal_at=tally.goal_at,
                cpu_s=_cpu_s() - cpu_before,
            )
        if is_over:
            _say(began_by_index=sorted(tally.began_by_index.items()))
            _leave()


# ---- the conversation -------------------------------------------------------------------------------------------

_conversation = sys.stdout


def _take_output() -> None:
    """The output is ours alone: what a library prints there goes to the errors instead."""
    global _conversation
    _conversation = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


def _say(**fields: Any) -> None:
    try:
        _conversation.write(json.dumps(fields) + "\n")
        _conversation.flush()
    except BrokenPipeError:  # the arena is gone, and nobody else would end us
        os._exit(1)


def _wait_for_go() -> None:
    if sys.stdin.readline().strip() != "go":
        _leave()


def _leave() -> None:
    """End at once. What a library does at exit is nobody's interest here, and some wait for threads that never end."""
    os._exit(0)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
