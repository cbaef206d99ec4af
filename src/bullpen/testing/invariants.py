"""Look at the stored structures of a queue and say what is wrong with them.

In: a blocking redis-py client and a queue's prefix and name. Out: a list of violations; empty means sound. The rules
are those of the wire protocol: an id is in at most one state, a job in exactly one, a lock belongs to an active job,
ready work has its marker, no key is left of a job that is gone, no key has a name that nobody knows.

The names of keys are written down here a second time, on purpose: a checker that borrowed them from the code it checks
would share its mistakes. Elsewhere: what happened to each job over time (`ledger`).
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    import redis

__all__ = ["Violation", "assert_sound", "check_queue", "check_server", "find_queues"]

_STATES: Mapping[str, str] = {
    # state: type of its structure
    "wait": "list",
    "paused": "list",
    "active": "list",
    "prioritized": "zset",
    "delayed": "zset",
    "waiting-children": "zset",
    "completed": "zset",
    "failed": "zset",
}
_QUEUE_KEYS: Mapping[str, str] = {
    **_STATES,
    "meta": "hash",
    "id": "string",
    "pc": "string",
    "stalled": "set",
    "stalled-check": "string",
    "limiter": "string",
    "marker": "zset",
    "events": "stream",
    "repeat": "zset",
    "metrics:completed": "hash",
    "metrics:failed": "hash",
    "metrics:completed:data": "list",
    "metrics:failed:data": "list",
}
_JOB_KEYS: Mapping[str, str] = {
    "lock": "string",
    "logs": "list",
    "dependencies": "set",
    "processed": "hash",
    "failed": "hash",
    "unsuccessful": "zset",
}
_COUNTER_SPAN = 2**32
_PIPELINE_CHUNK = 1_000

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True, order=True)
class Violation:
    """One broken rule."""

    queue: str
    """`<prefix>:<name>`, or empty for a key that belongs to no queue."""
    rule: str
    """Short name of the rule, stable enough to be compared in a test."""
    detail: str
    """What was found."""

    def __str__(self) -> str:
        return f"{self.queue or '(no queue)'}: {self.rule}: {self.detail}"


_TELLING: Final = ("meta", "id", "events")
"""Keys by which a queue is known."""


def find_queues(client: redis.Redis, prefix: str | None = None) -> list[tuple[str, str]]:
    """Return (prefix, name) of every queue that has any key under `prefix`.

    Without a prefix, queues are known by their `meta`, `id` or `events` key, whatever stands in front of it.
    """
    if prefix is not None:
        names = {key[len(prefix) + 1 :].split(":", 1)[0] for key in _scan(client, f"{_escape(prefix)}:*")}
        return sorted((prefix, name) for name in names if name)
    return _queues_among(client, _scan(client, "*:*:*"))


def _queues_among(client: redis.Redis, keys: Iterable[str]) -> list[tuple[str, str]]:
    telling = [key for key in keys if key.count(":") > 1 and key.rpartition(":")[2] in _TELLING]
    bases = {
        key.rpartition(":")[0]
        for key, kind in zip(telling, _types(client, telling), strict=True)
        if kind == _QUEUE_KEYS[key.rpartition(":")[2]]
    }
    # `p:q:a:b:meta` may be a job whose id is `a:b:meta`; a queue inside another queue is no queue.
    outermost = {base for base in bases if not any(base.startswith(f"{other}:") for other in bases)}
    return sorted((base.rpartition(":")[0], base.rpartition(":")[2]) for base in outermost)


def check_server(client: redis.Redis, *, in_flight: bool = False) -> list[Violation]:
    """Check every queue of the selected database, and report keys that belong to no queue."""
    queues = _queues_among(client, keys := list(_scan(client, "*")))
    found = [violation for queue in queues for violation in check_queue(client, *queue, in_flight=in_flight)]
    bases = tuple(f"{prefix}:{name}:" for prefix, name in queues)
    # What people did, and what jobs did, outlives the queue; some are there before it. All end by themselves.
    alone = (":bp:audit:log", ":bp:beats:", ":bp:history:", ":bp:marks:", ":bp:once:", ":outbox:bp:queues:filled")
    strays = sorted(key for key in keys if not key.startswith(bases) and not any(part in key for part in alone))
    return found + [Violation("", "stray key", f"{key!r} belongs to no queue") for key in strays]


def assert_sound(
    client: redis.Redis, prefix: str, name: str, *, in_flight: bool = False, at_rest: bool = False
) -> None:
    """Raise AssertionError that lists every violation of one queue."""
    found = check_queue(client, prefix, name, in_flight=in_flight, at_rest=at_rest)
    assert not found, "\n".join(["the queue's structures are broken:", *map(str, found)])


def check_queue(
    client: redis.Redis, prefix: str, name: str, *, in_flight: bool = False, at_rest: bool = False
) -> list[Violation]:
    """Return the violations of one queue; an empty list means that it is sound.

    By default no worker is expected to be in the middle of something: an active job has its lock, or is marked as a
    stall candidate. `in_flight=True` is for a queue whose workers run or were killed: an active job without lock is
    then accepted (the next stalled check will mark it), and only what a second and third look confirm is reported,
    because the structures are read one after the other. `at_rest=True` demands that nothing is active at all.
    """
    found = _QueueReading(client, prefix, name, in_flight=in_flight, at_rest=at_rest).violations()
    for _ in range(2 if in_flight else 0):
        if not found:
            break
        time.sleep(0.05)
        again = set(_QueueReading(client, prefix, name, in_flight=True, at_rest=at_rest).violations())
        found = [violation for violation in found if violation in again]
    return found


@dataclass
class _QueueReading:
    """One reading of a queue: everything is fetched first and judged afterwards."""

    client: redis.Redis
    prefix: str
    name: str
    in_flight: bool
    at_rest: bool

    keys: dict[str, str] = field(default_factory=dict)
    """What follows the base in each key, and the key's type."""
    states: dict[str, list[str]] = field(default_factory=dict)
    job_hashes: set[str] = field(default_factory=set)

    @property
    def base(self) -> str:
        return f"{self.prefix}:{self.name}:"

    def violations(self) -> list[Violation]:
        self._read()
        broken = [
            *self._wrong_types(),
            *self._ids_in_many_states(),
            *self._ghosts(),
            *self._lost_jobs(),
            *self._locks(),
            *self._orphans(),
            *self._marker(),
            *self._priority_counter(),
            *self._extensions(),
            *self._deduplication(),
        ]
        return [Violation(f"{self.prefix}:{self.name}", rule, detail) for rule, detail in broken]

    def _read(self) -> None:
        whole = list(_scan(self.client, f"{_escape(self.base)}*"))
        kinds = _types(self.client, whole)
        self.keys = {key[len(self.base) :]: kind for key, kind in zip(whole, kinds, strict=True) if kind != "none"}
        # One transaction, so that a job on its way from one state to the next is seen in exactly one of them.
        transaction = self.client.pipeline(transaction=True)
        present = [state for state, kind in _STATES.items() if self.keys.get(state, kind) == kind]
        for state in present:
            if _STATES[state] == "list":
                transaction.lrange(self.base + state, 0, -1)
            else:
                transaction.zrange(self.base + state, 0, -1)
        self.states = {state: _texts(ids) for state, ids in zip(present, transaction.execute(), strict=True)}
        self.job_hashes = set(self._find_job_hashes())

    def _find_job_hashes(self) -> Iterator[str]:
        # A job may have come or gone since the scan: what a state lists is asked for by name as well.
        listed = {job_id for ids in self.states.values() for job_id in ids}
        schedulers = self._schedulers()
        scanned = {
            rest
            for rest, kind in self.keys.items()
            if kind == "hash" and rest not in _QUEUE_KEYS and not rest.startswith(("dn:", "bp:"))
        }
        per_job = {rest for rest in scanned if self._owner_of(rest) is not None and rest not in listed}
        candidates = sorted((listed | scanned) - per_job - {f"repeat:{sid}" for sid in schedulers})
        kinds = _types(self.client, [self.base + rest for rest in candidates])
        return (rest for rest, kind in zip(candidates, kinds, strict=True) if kind == "hash")

    def _schedulers(self) -> list[str]:
        if self.keys.get("repeat") != "zset":
            return []
        return _texts(self.client.zrange(f"{self.base}repeat", 0, -1))

    def _owner_of(self, rest: str) -> str | None:
        """The job that a per-job key belongs to by its name, if it has such a name."""
        owner, colon, suffix = rest.rpartition(":")
        if not colon or suffix not in _JOB_KEYS or owner in ("bp", "de", "dn", "metrics"):
            return None
        return owner

    def _wrong_types(self) -> Iterator[tuple[str, str]]:
        for rest, kind in sorted(self.keys.items()):
            expected = _QUEUE_KEYS.get(rest)
            if expected is not None and kind != expected:
                yield "wrong type", f"{rest!r} is a {kind}, expected a {expected}"

    def _ids_in_many_states(self) -> Iterator[tuple[str, str]]:
        where: dict[str, list[str]] = {}
        for state, ids in self.states.items():
            for job_id in ids:
                where.setdefault(job_id, []).append(state)
        for job_id, states in sorted(where.items()):
            if len(states) > 1:
                times = ", ".join(f"{state} ×{n}" if n > 1 else state for state, n in Counter(states).items())
                yield "id in several states", f"{job_id!r} is in {times}"

    def _ghosts(self) -> Iterator[tuple[str, str]]:
        for state, ids in self.states.items():
            for job_id in sorted(set(ids) - self.job_hashes):
                yield "ghost", f"{job_id!r} is in {state}, but has no job hash"

    def _lost_jobs(self) -> Iterator[tuple[str, str]]:
        listed = {job_id for ids in self.states.values() for job_id in ids}
        for job_id in sorted(self.job_hashes - listed):
            yield "job in no state", f"{job_id!r} has a hash, but no state lists it"

    def _locks(self) -> Iterator[tuple[str, str]]:
        active = self.states.get("active", [])
        locked = {rest.removesuffix(":lock") for rest, kind in self.keys.items() if rest.endswith(":lock")}
        stalled = set()
        if self.keys.get("stalled") == "set":
            stalled = set(_texts(self.client.smembers(f"{self.base}stalled")))
        if self.at_rest and active:
            yield "active at rest", f"{sorted(active)} are active, but nothing should run"
        for job_id in sorted(set(active) - locked - stalled):
            if not self.in_flight:
                yield "active without lock", f"{job_id!r} has neither a lock nor a mark as a stall candidate"
        for job_id in sorted(locked - set(active)):
            if job_id in self.job_hashes:  # without a hash it is reported as an orphan
                yield "lock without active", f"{job_id!r} is locked, but not active"

    def _orphans(self) -> Iterator[tuple[str, str]]:
        schedulers = {f"repeat:{sid}" for sid in self._schedulers()}
        for rest, kind in sorted(self.keys.items()):
            if rest in _QUEUE_KEYS or rest in self.job_hashes or rest in schedulers:
                continue
            if (rest.startswith("de:") and kind == "string") or (rest.startswith("dn:") and kind == "hash"):
                continue
            if rest.startswith("bp:"):
                continue
            owner = self._owner_of(rest)
            if owner is None:
                yield "unknown key", f"{self.base + rest!r} ({kind}) has a name that no client writes"
            elif owner not in self.job_hashes:
                yield "orphan", f"{self.base + rest!r} is left of job {owner!r}, which does not exist"
            elif kind != _JOB_KEYS[rest.rpartition(":")[2]]:
                yield "wrong type", f"{rest!r} is a {kind}, expected a {_JOB_KEYS[rest.rpartition(':')[2]]}"
        for sid in sorted(schedulers):
            # Clients before 5.x put all that a record says into the member, between colons, and keep no record.
            if self.keys.get(sid) != "hash" and sid.count(":") < 5:
                yield "ghost", f"scheduler {sid.removeprefix('repeat:')!r} is listed, but has no record"

    def _marker(self) -> Iterator[tuple[str, str]]:
        members: dict[str, float] = {}
        if self.keys.get("marker", "zset") == "zset":
            pairs: Any = self.client.zrange(f"{self.base}marker", 0, -1, withscores=True)
            members = {_text(member): float(score) for member, score in pairs}
        for member, score in sorted(members.items()):
            if member not in ("0", "1"):
                yield "foreign marker", f"the marker has a member {member!r}"
            elif member == "0" and score != 0:
                yield "foreign marker", f"the base marker has score {score}, expected 0"
        ready = len(self.states.get("wait", [])) + len(self.states.get("prioritized", []))
        # A worker that has active jobs, or waits for the limiter, looks for more by itself.
        if ready and "0" not in members and not self.states.get("active") and not self._is_stopped():
            yield "missing marker", f"{ready} jobs are ready, but no marker is set"

    def _is_stopped(self) -> bool:
        if self.keys.get("meta", "hash") != "hash" or self.keys.get("limiter", "string") != "string":
            return True  # reported as a wrong type
        paused, concurrency = _optional_texts(self.client.hmget(f"{self.base}meta", ["paused", "concurrency"]))
        if paused is not None or _milliseconds_left(self.client, f"{self.base}limiter") > 0:
            return True
        limit = int(concurrency) if concurrency and concurrency.isdigit() else None
        return limit is not None and len(self.states.get("active", [])) >= limit

    def _priority_counter(self) -> Iterator[tuple[str, str]]:
        if self.keys.get("pc", "string") != "string":
            return  # reported as a wrong type
        stored = _optional_texts([self.client.get(f"{self.base}pc")])[0]
        if stored is None or self.keys.get("prioritized") != "zset":
            return
        pairs: Any = self.client.zrange(f"{self.base}prioritized", 0, -1, withscores=True)
        # What was pushed to the front of its class took no number, and a job of a lane stands by its turn.
        numbers = [_text(job_id) for job_id, score in pairs if float(score) % _COUNTER_SPAN]
        if int(stored) < len(numbers):
            numbers = [job_id for job_id in numbers if not self.client.hexists(self.base + job_id, "bplane")]
        if int(stored) < (numbered := len(numbers)):
            yield "priority counter", f"pc is {stored}, but {numbered} prioritized jobs carry a number from it"

    def _extensions(self) -> Iterator[tuple[str, str]]:
        ours = sorted(rest for rest in self.keys if rest.startswith("bp:"))
        for rest in ours:
            if _milliseconds_left(self.client, self.base + rest) == -1:
                yield "extension without TTL", f"{self.base + rest!r} would stay for ever"

    def _deduplication(self) -> Iterator[tuple[str, str]]:
        for rest in sorted(rest for rest, kind in self.keys.items() if rest.startswith("de:") and kind == "string"):
            owner = _optional_texts([self.client.get(_raw(self.base + rest))])[0]
            # With a TTL the key outlives its job by design.
            if (
                owner is not None
                and owner not in self.job_hashes
                and _milliseconds_left(self.client, self.base + rest) == -1
            ):
                yield "stale deduplication", f"{rest!r} is held for ever by job {owner!r}, which does not exist"


def _scan(client: redis.Redis, pattern: str) -> Iterator[str]:
    seen: set[str] = set()  # SCAN may return a key twice
    for key in client.scan_iter(match=pattern, count=_PIPELINE_CHUNK):
        text = _text(key)
        if text not in seen:
            seen.add(text)
            yield text


def _types(client: redis.Redis, keys: list[str]) -> list[str]:
    kinds: list[str] = []
    for chunk in _chunks(keys):
        pipeline = client.pipeline(transaction=False)
        for key in chunk:
            pipeline.type(_raw(key))
        kinds += _texts(pipeline.execute())
    return kinds


def _milliseconds_left(client: redis.Redis, key: str) -> int:
    """PTTL: -2 no key, -1 no TTL."""
    left: Any = client.pttl(_raw(key))
    return int(left)


def _chunks(items: list[_T]) -> Iterator[list[_T]]:
    for start in range(0, len(items), _PIPELINE_CHUNK):
        yield items[start : start + _PIPELINE_CHUNK]


def _escape(text: str) -> str:
    return re.sub(r"([*?\[\]\\^])", r"\\\1", text)


def _text(value: object) -> str:
    # Undecodable ids must be shown too; surrogates keep them apart.
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


def _raw(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _texts(values: Any) -> list[str]:
    return [_text(value) for value in values]


def _optional_texts(values: Iterable[object] | Any) -> list[str | None]:
    return [None if value is None else _text(value) for value in values]
