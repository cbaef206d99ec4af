"""Schedules of faults: drawn from a seed, written as one line, played again from it, made smaller when they fail.

A fault strikes when so many per cent of the jobs have ended, not at a time: so it means the same on a slow machine.
In: a server, and whose workers run (ours, or those of npm or PyPI `bullmq`). Out: a `Tally`: what was accepted, ran,
ended, was lost, ran again and came late, and how long the first job took to begin behind each fault.

    python -m tests.chaos.schedules                      twenty schedules for each kind of fault and worker, as a table
    python -m tests.chaos.schedules --play "7 300 20:kill 55:stall:400"

Elsewhere: the faults on the way (`bullpen.testing.FaultProxy`), the books (`arena`), peers (`peer_worker.mjs`, `_py`).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, Self

import redis

from bullpen.errors import OutOfMemory
from bullpen.queue import Queue
from bullpen.testing import Child, FaultProxy, RedisServer
from tests.chaos.arena import ROOT, Arena, open_arena

WORKERS: Final = 3
CONCURRENCY: Final = 10
LOCK_MS: Final = 2_000
STALLED_INTERVAL_MS: Final = 500
LATE_MS: Final = 1_000
"""A job that begins so long after it could, with no fault in between, came late."""


class Fault(NamedTuple):
    at: int
    """Per cent of the jobs that have ended."""
    kind: str
    ms: int = 0
    """How long it holds, where it holds."""

    def __str__(self) -> str:
        return f"{self.at}:{self.kind}" + (f":{self.ms}" if self.ms else "")


class Schedule(NamedTuple):
    seed: int
    jobs: int
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        return " ".join([str(self.seed), str(self.jobs), *map(str, self.faults)])

    @classmethod
    def parse(cls, line: str) -> Self:
        """What `str` wrote."""
        seed, jobs, *faults = line.split()
        return cls(int(seed), int(jobs), tuple(map(_parse_fault, faults)))


def _parse_fault(text: str) -> Fault:
    at, kind, *ms = text.split(":")
    if kind not in FAULTS:
        raise ValueError(f"no fault is called {kind!r}; there are {', '.join(FAULTS)}")
    return Fault(int(at), kind, int(ms[0]) if ms else 0)


def draw(seed: int, jobs: int, count: int, kinds: Sequence[str]) -> Schedule:
    """The same for the same numbers, today and tomorrow."""
    dice = random.Random(seed)
    found = [Fault(dice.randrange(5, 90), dice.choice(kinds), dice.choice((100, 300, 600))) for _ in range(count)]
    return Schedule(
        seed, jobs, tuple(sorted(fault if fault.kind in HOLDING else fault._replace(ms=0) for fault in found))
    )


async def shrink(schedule: Schedule, fails: Callable[[Schedule], Awaitable[bool]]) -> Schedule:
    """The smallest schedule that still fails: without faults that do not matter, and the others as short as can be."""
    part = max(1, len(schedule.faults) // 2)
    while part:
        for begin in range(0, len(schedule.faults), part):
            fewer = schedule._replace(faults=schedule.faults[:begin] + schedule.faults[begin + part :])
            if fewer.faults and await fails(fewer):
                schedule = fewer
                part = min(part, len(fewer.faults)) * 2  # begin again with large pieces
                break
        part //= 2
    for index, fault in enumerate(schedule.faults):
        while fault.ms > 50:
            fault = fault._replace(ms=fault.ms // 2)
            shorter = schedule._replace(faults=(*schedule.faults[:index], fault, *schedule.faults[index + 1 :]))
            if not await fails(shorter):
                break
            schedule = shorter
    return schedule


# ---- faults ------------------------------------------------------------------------------------------------------


@dataclass
class Scene:
    """What a fault strikes."""

    arena: Arena
    queue: Queue
    proxy: FaultProxy
    workers: list[Child]
    dice: random.Random
    start_worker: Callable[[], Awaitable[Child]]

    def victim(self) -> Child:
        return self.dice.choice(self.workers)


Strike = Callable[[Scene, float], Awaitable[None]]
"""With the seconds that it holds."""


async def _kill(scene: Scene, _: float) -> None:
    victim = scene.victim()
    victim.kill()
    scene.workers[scene.workers.index(victim)] = await scene.start_worker()


async def _pause(scene: Scene, seconds: float) -> None:
    """As a collector of garbage, or a machine that swaps: the process stands still and goes on."""
    victim = scene.victim()
    victim.pause()
    await asyncio.sleep(seconds)
    victim.resume()


async def _server_death(scene: Scene, _: float) -> None:
    await asyncio.to_thread(scene.arena.server.kill)
    await asyncio.to_thread(scene.arena.server.restart)


async def _server_pause(scene: Scene, seconds: float) -> None:
    scene.arena.server.pause()
    await asyncio.sleep(seconds)
    scene.arena.server.resume()


async def _reset(scene: Scene, _: float) -> None:
    scene.proxy.reset()


async def _half_open(scene: Scene, seconds: float) -> None:
    """Requests arrive and no answer comes back."""
    with scene.proxy.stalled(requests=False):
        await asyncio.sleep(seconds)


async def _stall(scene: Scene, seconds: float) -> None:
    with scene.proxy.stalled():
        await asyncio.sleep(seconds)


async def _latency(scene: Scene, seconds: float) -> None:
    scene.proxy.latency(40)
    await asyncio.sleep(seconds)
    scene.proxy.latency(0)


async def _lost_replies(scene: Scene, _: float) -> None:
    scene.proxy.lose_reply(times=3)


async def _outage(scene: Scene, seconds: float) -> None:
    with scene.proxy.outage():
        await asyncio.sleep(seconds)


async def _no_clients(scene: Scene, seconds: float) -> None:
    """The server has no room for the connections that are opened anew."""
    server = scene.arena.server
    server.command("CONFIG", "SET", "maxclients", 1)
    scene.proxy.reset()
    await asyncio.sleep(seconds)
    with contextlib.suppress(redis.RedisError):
        server.command("CONFIG", "SET", "maxclients", 10_000)


async def _full(scene: Scene, seconds: float) -> None:
    """The server's memory is full."""
    server = scene.arena.server
    server.command("CONFIG", "SET", "maxmemory", 1)
    await asyncio.sleep(seconds)
    server.command("CONFIG", "SET", "maxmemory", 0)


async def _scripts_forgotten(scene: Scene, _: float) -> None:
    scene.arena.server.command("SCRIPT", "FLUSH")


async def _own_keys_deleted(scene: Scene, _: float) -> None:
    """Somebody deletes what he does not know: no key of ours holds the only reference to a job."""
    client = scene.arena.server.client()
    for key in client.scan_iter(match=scene.arena.base + "bp:*", count=1_000):
        client.delete(key)


async def _marker_deleted(scene: Scene, _: float) -> None:
    scene.arena.server.command("DEL", scene.arena.base + "marker")


async def _starved(scene: Scene, seconds: float) -> None:
    """Others use the processor."""
    hogs = [Child.code("while True: pass") for _ in range(2 * (os.cpu_count() or 1))]
    await asyncio.sleep(seconds)
    for hog in hogs:
        hog.close()


FAULTS: Final[dict[str, Strike]] = {
    "kill": _kill,
    "pause": _pause,
    "server-death": _server_death,
    "server-pause": _server_pause,
    "reset": _reset,
    "half-open": _half_open,
    "stall": _stall,
    "latency": _latency,
    "lost-replies": _lost_replies,
    "outage": _outage,
    "no-clients": _no_clients,
    "full": _full,
    "scripts-forgotten": _scripts_forgotten,
    "own-keys-deleted": _own_keys_deleted,
    "marker-deleted": _marker_deleted,
    "starved": _starved,
}
HOLDING: Final = frozenset(FAULTS) - {
    *("kill", "server-death", "reset", "lost-replies", "scripts-forgotten", "own-keys-deleted", "marker-deleted"),
}


# ---- playing -----------------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What became of the jobs of one schedule."""

    accepted: int = 0
    executed: int = 0
    ended: int = 0
    lost: list[str] = field(default_factory=list)
    failed: int = 0
    """Ended as failed, though no handler raised: condemned as stalled."""
    again: int = 0
    """Runs beyond the first of a job."""
    late: list[str] = field(default_factory=list)
    recovery_ms: list[int] = field(default_factory=list)
    """From the end of each fault to the first run that begins after it."""

    def __add__(self, other: Tally) -> Tally:
        names = self.__dataclass_fields__
        return Tally(**{name: getattr(self, name) + getattr(other, name) for name in names})


async def play(
    schedule: Schedule, server: RedisServer, directory: Path, *, of: str = "bullpen", patience_s: float = 60
) -> Tally:
    """Play it to the end: every job ended, or `patience_s` without any progress. The server must keep what it has."""
    with open_arena(server, directory) as arena, FaultProxy(server) as proxy:
        held: list[tuple[float, float]] = []
        async with arena.queue(url=proxy.url) as queue:
            dice = random.Random(schedule.seed)
            scene = Scene(arena, queue, proxy, [], dice, lambda: _start_worker(arena, proxy.url, of))
            scene.workers = list(await asyncio.gather(*(scene.start_worker() for _ in range(WORKERS))))
            feeding = asyncio.create_task(_feed(arena, queue, schedule))
            for fault in schedule.faults:
                await _progress(arena, schedule.jobs * fault.at // 100, patience_s)
                begin = time.monotonic()
                await FAULTS[fault.kind](scene, fault.ms / 1_000)
                held.append((begin, time.monotonic()))
            await feeding
            await _progress(arena, schedule.jobs, patience_s, may_stop=True)
        for worker in scene.workers:
            worker.terminate()
        for worker in scene.workers:
            with contextlib.suppress(AssertionError):
                await worker.ended(20)
        return _tally(arena, held)


async def _start_worker(arena: Arena, url: str, of: str) -> Child:
    if of == "bullpen":
        worker = arena.start_worker(
            url=url, concurrency=CONCURRENCY, lock=LOCK_MS, stalled_interval=STALLED_INTERVAL_MS
        )
    else:
        worker = _peer(arena, url, of)
        arena.children.append(worker)
    await worker.seen("^ready", 60)
    return worker


def _peer(arena: Arena, url: str, of: str) -> Child:
    order = json.dumps(
        {
            "url": url,
            "queue": arena.name,
            "runs": str(arena.directory / "runs"),
            "book": str(arena.directory / "ledger"),
            "concurrency": CONCURRENCY,
            "lock": LOCK_MS,
            "stalledInterval": STALLED_INTERVAL_MS,
        }
    )
    here = Path(__file__).parent
    if of == "npm":
        return Child(["node", str(here / "peer_worker.mjs"), order], cwd=ROOT / "tests" / "interop" / "node")
    from tests.interop._pypi import ensure_environment

    return Child([str(ensure_environment()), str(here / "peer_worker.py"), order])


async def _feed(arena: Arena, queue: Queue, schedule: Schedule) -> None:
    """Some at once, some by and by, some later; always from the same seed."""
    dice = random.Random(schedule.seed)
    left = schedule.jobs
    while left:
        count = min(left, dice.randrange(1, 40))
        left -= count
        await asyncio.gather(*(_add(arena, queue, dice.choice((0, 20, 60))) for _ in range(count)))
        await asyncio.sleep(dice.choice((0, 0.05, 0.1)))


async def _add(arena: Arena, queue: Queue, ms: int) -> None:
    """A full server says that it stored nothing: the producer tries again."""
    while True:
        try:
            await arena.add(queue, 1, ms=ms)
            return
        except OutOfMemory:
            await asyncio.sleep(0.05)


async def _progress(arena: Arena, wanted: int, patience_s: float, *, may_stop: bool = False) -> None:
    """Until so many jobs have ended. Raises AssertionError, or with `may_stop` returns, when nothing ends any more."""
    ended, since = -1, time.monotonic()
    while ended < wanted:
        with contextlib.suppress(redis.RedisError, OSError):
            now = arena.count("completed") + arena.count("failed")
            if now != ended:
                ended, since = now, time.monotonic()
        if time.monotonic() - since > patience_s:
            assert may_stop, f"{ended} of {wanted} jobs ended, and nothing goes on\n{arena.describe()}"
            return
        await asyncio.sleep(0.005)


def _tally(arena: Arena, held: list[tuple[float, float]]) -> Tally:
    client = arena.server.client()
    arena.ledger.read_states(client, "bull", arena.name)
    accepted, runs = arena.ledger.accepted_ids, arena.ledger.runs
    times = Counter(run.job_id for run in runs)
    completed, failed = _members(client, arena.base + "completed"), _members(client, arena.base + "failed")
    begins = sorted(span.begin for span in arena.runs.spans())
    recovery = [next((begin - end for begin in begins if begin >= end), None) for _, end in held]
    return Tally(
        len(accepted),
        len(times),
        len((completed | failed) & set(accepted)),
        sorted(set(accepted) - completed - failed),
        len(failed),
        sum(times.values()) - len(times),
        _late(arena, held),
        [round(each * 1_000) for each in recovery if each is not None],
    )


def _members(client: redis.Redis, key: str) -> set[str]:
    found: list[bytes] = client.zrange(key, 0, -1)  # type: ignore[assignment]  # its replies are bytes
    return {member.decode() for member in found}


def _late(arena: Arena, held: list[tuple[float, float]]) -> list[str]:
    """Jobs that were ready, with free slots and no fault near, and did not begin."""
    client = arena.server.client()
    # Both clocks in one moment: jobs are dated by the server, runs by this machine.
    offset = time.time() - time.monotonic()
    found = []
    firsts: dict[str, float] = {}
    spans = arena.runs.spans()
    for span in spans:
        firsts[span.job_id] = min(span.begin, firsts.get(span.job_id, span.begin))
    for job_id, begin in firsts.items():
        added = client.hget(f"{arena.base}{job_id}", "timestamp")
        if added is None:
            continue
        ready = int(added) / 1_000 - offset
        near = any(at - 1 < begin and until_ + LOCK_MS / 1_000 * 2 > ready for at, until_ in held)
        busy = sum(1 for span in spans if span.begin < begin and (span.end or begin) > ready)
        if not near and busy < WORKERS * CONCURRENCY and (begin - ready) * 1_000 > LATE_MS:
            found.append(f"{job_id}: {round((begin - ready) * 1_000)} ms")
    return found


# ---- as a program ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _server() -> Iterator[RedisServer]:
    with RedisServer.start("valkey", persistent=True, args=("--appendfsync", "always")) as server:
        yield server


def _row(kind: str, of: str, tally: Tally) -> str:
    recovery = f"{round(statistics.median(tally.recovery_ms))} / {max(tally.recovery_ms)}" if tally.recovery_ms else "-"
    counts = (tally.accepted, len(tally.lost), tally.failed, tally.again, len(tally.late), recovery)
    return f"| {kind} | {of} | " + " | ".join(map(str, counts)) + " |"


async def main(arguments: argparse.Namespace) -> int:
    if arguments.play:
        schedules = {"as given": [Schedule.parse(arguments.play)]}
    else:
        kinds = arguments.kind or list(FAULTS)
        schedules = {kind: [draw(seed, arguments.jobs, 3, [kind]) for seed in range(arguments.seeds)] for kind in kinds}
    print(
        "| fault | workers | accepted | lost | failed without cause | run again | late | ms to recover, median / most |"
    )
    print("|---|---|---|---|---|---|---|---|")
    bad = 0
    for kind, several in schedules.items():
        for of in arguments.of:
            total = Tally()
            for schedule in several:
                with _server() as server, tempfile.TemporaryDirectory() as directory:
                    try:
                        tally = await play(schedule, server, Path(directory), of=of, patience_s=arguments.patience)
                    except AssertionError as stopped:
                        print(f"{of} stopped: {schedule}\n{stopped}", file=sys.stderr)
                        bad += of == "bullpen"
                        continue
                if of == "bullpen" and (tally.lost or tally.failed):
                    bad += 1
                    print(f'--play "{schedule}": lost {tally.lost[:5]}, failed {tally.failed}', file=sys.stderr)
                total += tally
            print(_row(kind, of, total), flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.schedules", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--play", metavar="SCHEDULE", help="one schedule, as it was printed")
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="schedules for each kind of fault")
    parser.add_argument("--jobs", type=int, default=300, metavar="N", help="jobs of each schedule")
    parser.add_argument("--kind", action="append", choices=list(FAULTS), help="only this fault; may be given again")
    parser.add_argument("--of", action="append", choices=["bullpen", "npm", "pypi"], help="whose workers")
    parser.add_argument(
        "--patience", type=float, default=60, metavar="S", help="without progress, until it has stopped"
    )
    given = parser.parse_args()
    given.of = given.of or ["bullpen", "npm", "pypi"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(asyncio.run(main(given)))
