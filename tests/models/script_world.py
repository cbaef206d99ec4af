"""Two workers of one job each around the real scripts on a real server: every order of sends, losses, copies that come
late, locks that end, stalled checks, renewals and deaths.

The numbered call, the token of a lock and the count of takes (the fence) are what keeps runs apart; here they meet
every order that a small world has. A state of the server is kept as a dump of its keys, and put back for each step.
Elsewhere: that the client sends what is said here (`bullpen.redis.calls`, `tests/queue/test_fault_lost_replies.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import redis

from bullpen.wire.scripts import SCRIPTS
from tests.models.checker import Step

BASE = "bull:model:"
LOCK_MS = 3_600_000  # locks end when the world says so
_CALL_TTL_MS = 3_600_000
_NO_LOCK = -2


class Run(NamedTuple):
    """A job that a worker runs."""

    job: str
    token: str
    fence: int


class Call(NamedTuple):
    """As it was sent, and perhaps sent again."""

    number: int
    settles: Run | None
    take: int


class Hand(NamedTuple):
    """A worker."""

    number: int = 0
    awaited: Call | None = None
    copies: tuple[Call, ...] = ()
    """On their way to the server; one that is sent again may arrive twice, and late."""
    run: Run | None = None
    is_unlocked: bool = False
    """The run has ended, and its lock was gone when it was to be settled: it is to be taken again."""
    is_dead: bool = False


class Scene(NamedTuple):
    keys: tuple[Any, ...]
    """What of the server's state counts (`Server.snapshot`)."""
    hands: tuple[Hand, ...]
    fences: tuple[tuple[str, int], ...] = ()
    """Every run that a worker was given, by job and fence."""
    ended: tuple[str, ...] = ()
    """Jobs whose end was acknowledged."""
    overtaken: str = ""
    """A job that was ended by an earlier run than its latest."""
    copies_left: int = 0
    lock_ends: int = 0
    checks: int = 0
    deaths: int = 0


@dataclass
class Server:
    """A server whose state is a value: kept, compared and put back."""

    client: redis.Redis
    changed: dict[str, tuple[str, str]]
    """By script: a line of it and what stands there instead."""
    _dumps: dict[tuple[Any, ...], dict[bytes, bytes]] = field(default_factory=dict)
    _bodies: dict[str, bytes] = field(default_factory=dict)
    _now: tuple[Any, ...] | None = None

    def body(self, name: str) -> bytes:
        if name not in self._bodies:
            text = SCRIPTS[name].body.decode()
            if name in self.changed:
                guard, instead = self.changed[name]
                assert text.count(guard) == 1, f"{text.count(guard)} places in {name}: {guard}"
                text = text.replace(guard, instead)
            self._bodies[name] = text.encode()
        return self._bodies[name]

    def evaluate(self, name: str, keys: list[str], *args: Any) -> Any:
        return self.client.eval(self.body(name).decode(), len(keys), *keys, *args)

    def put_back(self, keys: tuple[Any, ...]) -> None:
        if keys == self._now:
            return
        pipeline = self.client.pipeline(transaction=False)
        pipeline.flushdb()
        for key, dump in self._dumps[keys].items():
            pipeline.restore(key, 0, dump)
        pipeline.execute()
        self._now = keys

    def snapshot(self) -> tuple[Any, ...]:
        """What decides anything later; times and events do not."""
        client = self.client
        client.delete(BASE + "events", BASE + "marker", BASE + "stalled-check")
        names: list[bytes] = sorted(client.keys())  # type: ignore[arg-type]  # its replies are bytes
        pipeline = client.pipeline(transaction=False)
        for name in names:
            pipeline.dump(name)
            kind = name.removeprefix(BASE.encode())
            if kind in (b"wait", b"active"):
                pipeline.lrange(name, 0, -1)
            elif kind in (b"completed", b"failed"):
                pipeline.zrange(name, 0, -1)
            elif kind == b"stalled":
                pipeline.smembers(name)
            elif kind.endswith(b":lock") or kind.startswith(b"bp:call:"):
                pipeline.get(name)
            else:
                pipeline.hmget(name, "ats", "stc", "atm", "finishedOn")
        answers = pipeline.execute()
        seen = tuple((name, _timeless(name, value)) for name, value in zip(names, answers[1::2], strict=True))
        # The first of equal states is kept: they differ in times only.
        self._dumps.setdefault(seen, dict(zip(names, answers[::2], strict=True)))
        self._now = None
        return seen


def _timeless(name: bytes, value: Any) -> Any:
    if isinstance(value, bytes) and b"bp:call:" in name:
        number, _, *rest = value.split(b"\n")
        return (number, *rest)
    if isinstance(value, set):
        return tuple(sorted(value))
    if isinstance(value, list) and name.startswith(BASE.encode()) and name.removeprefix(BASE.encode()).isdigit():
        return (*value[:3], value[3] is not None)
    return tuple(value) if isinstance(value, list) else value


@dataclass
class ScriptWorld:
    """`calls` of each worker, and how often what may happen happens."""

    client: redis.Redis
    jobs: int = 1
    workers: int = 2
    copies: int = 0
    lock_ends: int = 0
    checks: int = 0
    deaths: int = 0
    changed: dict[str, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.server = Server(self.client, self.changed)

    def start(self) -> Scene:
        self.client.flushdb()
        for job in range(1, self.jobs + 1):
            self.client.hset(
                f"{BASE}{job}", mapping={"name": "n", "data": "{}", "opts": "{}", "timestamp": 1, "delay": 0}
            )
            self.client.lpush(BASE + "wait", str(job))
        hands = tuple(Hand() for _ in range(self.workers))
        return Scene(self.server.snapshot(), hands, (), (), "", self.copies, self.lock_ends, self.checks, self.deaths)

    # ---- what must hold ---------------------------------------------------------------------------------------

    def wrong(self, scene: Scene) -> str | None:
        if len(set(scene.ended)) < len(scene.ended):
            return "the end of one job was acknowledged twice"
        if scene.overtaken:
            return "an earlier run of a job ended it, while a later one runs"
        if len(set(scene.fences)) < len(scene.fences):
            return "two runs of a job have the same fence"
        if scene.lock_ends == self.lock_ends and len({job for job, _ in scene.fences}) < len(scene.fences):
            return "a job was given twice, though no lock has ended"
        if set(_members(scene, "wait")) & set(scene.ended):
            return "an ended job waits"
        places = [job for name in ("wait", "active", "completed") for job in _members(scene, name)]
        if sorted(places) != [str(job) for job in range(1, self.jobs + 1)]:
            return f"the jobs' places are {places}"
        return None

    def is_well(self, scene: Scene) -> bool:
        """All jobs have ended. A job of a dead worker ends when its lock has."""
        dead = {run.job for hand in scene.hands if hand.is_dead and (run := hand.run)}
        dead |= {job for job in _members(scene, "active") if self._is_of_the_dead(scene, job)}
        return all(job in dead or job in _members(scene, "completed") for job in map(str, range(1, self.jobs + 1)))

    def _is_of_the_dead(self, scene: Scene, job: str) -> bool:
        holder = dict(scene.keys).get(f"{BASE}{job}:lock".encode())
        if holder is None:
            return True  # the next check but one returns it
        return scene.hands[int(holder.split(b":")[0])].is_dead

    # ---- what may happen --------------------------------------------------------------------------------------

    def steps(self, scene: Scene) -> Iterator[Step[Scene]]:
        for at, hand in enumerate(scene.hands):
            for index, copy in enumerate(hand.copies):
                yield from self._arrive(scene, at, hand, index, copy)
            if not hand.is_dead:
                yield from self._work(scene, at, hand)
        yield from self._accidents(scene)

    def _work(self, scene: Scene, at: int, hand: Hand) -> Iterator[Step[Scene]]:
        who = f"worker {at} "
        if hand.awaited is None and hand.is_unlocked:
            yield from self._retake(scene, at, hand)
        elif hand.awaited is None:
            take = 1 if len(scene.ended) < self.jobs else 0
            call = Call(hand.number + 1, hand.run, take)
            if call.settles or (take and _members(scene, "wait")):
                sent = hand._replace(number=call.number, awaited=call, copies=(*hand.copies, call))
                yield Step(f"{who}sends {call}", _put(scene, at, sent))
        elif hand.awaited not in hand.copies:
            sent = hand._replace(copies=(*hand.copies, hand.awaited))
            yield Step(f"{who}sends call {hand.awaited.number} again", _put(scene, at, sent))
        elif scene.copies_left:
            sent = hand._replace(copies=(*hand.copies, hand.awaited))
            again = _put(scene, at, sent)._replace(copies_left=scene.copies_left - 1)
            yield Step(f"{who}sends call {hand.awaited.number} too early again", again, True)

    def _arrive(self, scene: Scene, at: int, hand: Hand, index: int, call: Call) -> Iterator[Step[Scene]]:
        who = f"call {call.number} of worker {at} "
        left = hand._replace(copies=(*hand.copies[:index], *hand.copies[index + 1 :]))
        self.server.put_back(scene.keys)
        try:
            reply = self._exchange(at, call)
        except redis.ResponseError as refusal:
            if "BPSTALE" not in str(refusal):
                raise
            yield Step(f"{who}is refused: late", _put(scene, at, left))
            return
        ran = scene._replace(keys=self.server.snapshot())
        yield Step(f"{who}is run, its reply is lost", _put(ran, at, left), True)
        if hand.awaited == call and not hand.is_dead:
            yield Step(f"{who}is answered: {reply}", self._answered(ran, at, left, reply))

    def _exchange(self, at: int, call: Call) -> tuple[list[int], Run | None]:
        settles = call.settles
        settlement = (settles.job, settles.token, "completed", "all", "null") if settles else ()
        token = f"{at}:{call.number}"
        reply = self.server.evaluate(
            *("exchange", [f"{BASE}bp:call:{at}"], BASE, call.number, _CALL_TTL_MS, token, LOCK_MS, call.take),
            *("model", "", *settlement),
        )
        codes = [int(code) for code in reply[0].split(b"\n")[2].split(b",") if code]
        fields = reply[1][0] if reply[1] else None
        return codes, Run(fields[-1].decode(), token, int(fields[6])) if fields else None

    def _answered(self, scene: Scene, at: int, hand: Hand, reply: tuple[list[int], Run | None]) -> Scene:
        codes, taken = reply
        hand, settled = hand._replace(awaited=None), hand.run
        if codes == [_NO_LOCK]:
            # The lock is taken again before the outcome is dropped. A job that came along is one more than this world
            # has hands for.
            if taken is None:
                return _put(scene, at, hand._replace(is_unlocked=True))
            return _put(_given(scene, taken), at, hand._replace(run=taken))
        if codes == [0] and settled is not None:
            latest = max(fence for job, fence in scene.fences if job == settled.job)
            overtaken = settled.job if settled.fence < latest else scene.overtaken
            scene = scene._replace(ended=tuple(sorted((*scene.ended, settled.job))), overtaken=overtaken)
        return _put(_given(scene, taken), at, hand._replace(run=taken))

    def _retake(self, scene: Scene, at: int, hand: Hand) -> Iterator[Step[Scene]]:
        run = hand.run
        assert run is not None
        self.server.put_back(scene.keys)
        reply = self.server.evaluate("renew", [BASE + "stalled"], BASE, LOCK_MS, run.job, run.token, run.fence)
        after = scene._replace(keys=self.server.snapshot())
        kept = hand._replace(is_unlocked=False, run=None if reply[0] else run)
        yield Step(f"worker {at} renews {run.job}: {'lost' if reply[0] else 'kept'}", _put(after, at, kept))

    def _accidents(self, scene: Scene) -> Iterator[Step[Scene]]:
        for name, holder in scene.keys if scene.lock_ends else ():
            if name.endswith(b":lock"):
                self.server.put_back(scene.keys)
                self.client.delete(name)
                ended = scene._replace(keys=self.server.snapshot(), lock_ends=scene.lock_ends - 1)
                yield Step(f"the lock {name.decode()} of {holder.decode()} ends", ended, True)
        if scene.checks:
            self.server.put_back(scene.keys)
            keys = [BASE + kind for kind in ("meta", "wait", "active", "stalled", "stalled-check", "events")]
            self.server.evaluate("check_stalled", keys, BASE, 0, 10_000, "", 30_000, "")
            checked = scene._replace(keys=self.server.snapshot(), checks=scene.checks - 1)
            yield Step("a stalled check runs", checked, True)
        if scene.deaths:
            for at, hand in enumerate(scene.hands):
                if not hand.is_dead:
                    dead = _put(scene, at, hand._replace(is_dead=True))._replace(deaths=scene.deaths - 1)
                    yield Step(f"worker {at} dies", dead, True)


def _put(scene: Scene, at: int, hand: Hand) -> Scene:
    return scene._replace(hands=(*scene.hands[:at], hand, *scene.hands[at + 1 :]))


def _given(scene: Scene, run: Run | None) -> Scene:
    return scene if run is None else scene._replace(fences=tuple(sorted((*scene.fences, (run.job, run.fence)))))


def _members(scene: Scene, name: str) -> list[str]:
    return [member.decode() for member in dict(scene.keys).get((BASE + name).encode(), ())]
