"""Keep the books of a run with many processes and many deaths, and say at its end what does not add up.

In: which jobs were accepted and which handlers ran (written by any number of processes to one append-only file), and
the queue's own event stream and states. Out: `check()` passes, or raises AssertionError that names what was lost, got
stuck, was done twice, moved illegally or appeared from nowhere.

The file is the truth that survives kill -9: a line is one `write` to a descriptor opened for appending, so it is there
as a whole or not at all, whoever else writes. Elsewhere: whether the structures are sound now (`invariants`).
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import redis

__all__ = ["JobBook", "JobBookReport", "JobRun"]

_TERMINAL = frozenset({"completed", "failed"})
_GONE = "gone"
_UNKNOWN = "unknown"
_NOWHERE = "nowhere"

# Where a job may be when an event about it is written, and where it is afterwards. An event that is not listed does not
# move its job. A finished job may come back under the same id once its retention has removed it, which no event tells.
# A waiting job is delayed when the limit of its lane holds it back.
_MOVES: Mapping[str, tuple[frozenset[str], str]] = {
    "added": (frozenset({_NOWHERE, _GONE, *_TERMINAL}), "added"),
    "waiting": (frozenset({"added", "active", "delayed", "waiting-children", *_TERMINAL}), "waiting"),
    "delayed": (frozenset({"added", "waiting", "active", "delayed", "waiting-children"}), "delayed"),
    "waiting-children": (frozenset({"added", "active"}), "waiting-children"),
    "active": (frozenset({"waiting"}), "active"),
    "completed": (frozenset({"active"}), "completed"),
    "failed": (frozenset({"active"}), "failed"),
    "removed": (frozenset({"added", "waiting", "delayed", "waiting-children", "active", *_TERMINAL}), _GONE),
}
# Where a `waiting` event says that its job comes from, against where the job was.
_COMES_FROM: Mapping[str | None, frozenset[str]] = {
    None: frozenset({"added"}),
    "active": frozenset({"active"}),
    "delayed": frozenset({"delayed"}),
    "waiting-children": frozenset({"waiting-children"}),
    "failed": frozenset({"failed"}),
    "completed": frozenset({"completed"}),
}
_STRUCTURES: Mapping[str, str] = {
    "wait": "list",
    "paused": "list",
    "active": "list",
    "prioritized": "zset",
    "delayed": "zset",
    "waiting-children": "zset",
    "completed": "zset",
    "failed": "zset",
}
_MOST_NAMED = 20


@dataclass(frozen=True, slots=True)
class JobRun:
    """One execution of a handler."""

    job_id: str
    fence: int | None
    pid: int


@dataclass
class JobBookReport:
    """What does not add up, by kind; each is a list of sentences."""

    lost: list[str] = field(default_factory=list)
    """Accepted, and nowhere to be found, without a sign that it ended."""
    stuck: list[str] = field(default_factory=list)
    """Accepted, and still in a state that is no end."""
    doubled: list[str] = field(default_factory=list)
    """Ended twice, ran twice under one fence, or ran more often than allowed."""
    illegal: list[str] = field(default_factory=list)
    """A transition that no event stream may show."""
    unexpected: list[str] = field(default_factory=list)
    """Ran or ended, although nobody was told that it was accepted."""

    def __bool__(self) -> bool:
        return any((self.lost, self.stuck, self.doubled, self.illegal, self.unexpected))

    def __str__(self) -> str:
        lines = []
        for kind in ("lost", "stuck", "doubled", "illegal", "unexpected"):
            sentences: list[str] = getattr(self, kind)
            if sentences:
                more = f" (and {len(sentences) - _MOST_NAMED} more)" if len(sentences) > _MOST_NAMED else ""
                lines.append(f"{kind}, {len(sentences)}: {'; '.join(sentences[:_MOST_NAMED])}{more}")
        return "\n".join(lines) or "everything adds up"


class JobBook:
    """The books of one queue: what was accepted, what ran, how it moved, where it ended.

    Every process opens its own `JobBook(path)` on the same file and calls `accepted` and `ran`; the test that judges
    calls `read_events` often enough that nothing is trimmed unread (or keeps `following` open), `read_states` at the
    end, and `check`.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._changed = threading.Condition()
        self._last_event_id = "0-0"
        self._where: dict[str, str] = {}
        self._ends: dict[str, list[str]] = defaultdict(list)
        self._illegal: list[str] = []
        self._events_read = 0
        self._events_lost = False
        self._states: dict[str, str] | None = None

    def accepted(self, *job_ids: str) -> None:
        """These jobs were acknowledged: from now on they must not be lost. Call it after the add has returned."""
        for job_id in job_ids:
            self._write({"accepted": job_id})

    def ran(self, job_id: str, *, fence: int | None = None) -> None:
        """A handler runs this job now. Call it first thing in the handler; `fence` is `job.fence`."""
        self._write({"ran": job_id, "fence": fence, "pid": os.getpid()})

    @property
    def accepted_ids(self) -> list[str]:
        """All accepted jobs, of all processes, in the order of the file."""
        return [entry["accepted"] for entry in self._entries() if "accepted" in entry]

    @property
    def runs(self) -> list[JobRun]:
        """All executions, of all processes, in the order of the file."""
        return [JobRun(entry["ran"], entry["fence"], entry["pid"]) for entry in self._entries() if "ran" in entry]

    @property
    def ended_ids(self) -> set[str]:
        """Jobs that the event stream has shown to be completed or failed."""
        with self._changed:
            return self._ended()

    def read_events(self, client: redis.Redis, prefix: str, name: str) -> int:
        """Read the queue's events from where the last call stopped; returns how many there were."""
        key, before = f"{prefix}:{name}:events", self._events_read
        _, written = _length_and_written(client, key)  # asked first: what is written while we read must not look lost
        while self._next_entries(client, key, block_ms=None):
            pass
        self._events_lost = self._events_lost or self._events_read < written
        return self._events_read - before

    @contextlib.contextmanager
    def following(self, client: redis.Redis, prefix: str, name: str) -> Iterator[None]:
        """Read events in a thread for the length of a block, so that a long run is not trimmed unread.

        `client` must be a client of its own; a server that dies in between is asked again until the block ends.
        """
        import redis as redis_py

        over = threading.Event()

        def follow() -> None:
            while not over.is_set():
                try:
                    self._next_entries(client, f"{prefix}:{name}:events", block_ms=50)
                except redis_py.RedisError:
                    over.wait(0.05)

        thread = threading.Thread(target=follow, name="ledger-events", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def wait_for_ends(self, timeout: float = 30.0) -> None:
        """Block until the events that are being followed show the end of every job accepted so far.

        Raises AssertionError with the report if the time runs out.
        """
        accepted = set(self.accepted_ids)
        with self._changed:
            over = self._changed.wait_for(lambda: accepted <= self._ended(), timeout)
        assert over, f"not all of {len(accepted)} accepted jobs ended within {timeout} s\n{self.report()}"

    def read_states(self, client: redis.Redis, prefix: str, name: str) -> None:
        """Read in which state each job is now. Call it when the run is over; only the last reading counts."""
        transaction = client.pipeline(transaction=True)
        for state, kind in _STRUCTURES.items():
            key = f"{prefix}:{name}:{state}"
            if kind == "list":
                transaction.lrange(key, 0, -1)
            else:
                transaction.zrange(key, 0, -1)
        replies = transaction.execute()
        self._states = {_text(job_id): state for state, ids in zip(_STRUCTURES, replies, strict=True) for job_id in ids}

    def report(
        self, *, max_runs: int | None = None, max_extra_runs: int | None = None, unexpected: bool = True
    ) -> JobBookReport:
        """Compare the books. `max_runs` bounds the runs of one job, `max_extra_runs` those of all jobs beyond the
        first; `unexpected=False` accepts jobs of unknown origin, as after an add whose reply was lost."""
        found = JobBookReport(illegal=list(self._illegal))
        accepted = set(self.accepted_ids)
        for job_id in sorted(accepted):
            self._judge_end(job_id, found)
        self._judge_runs(max_runs, max_extra_runs, found)
        for job_id, ends in sorted(self._ends.items()):
            if len(ends) > 1:
                found.doubled.append(f"{job_id!r} ended {len(ends)} times: {', '.join(ends)}")
        if unexpected:
            known = set(self._where) | {run.job_id for run in self.runs} | set(self._states or ())
            found.unexpected += [f"{job_id!r} was never accepted" for job_id in sorted(known - accepted)]
        if self._events_lost:
            found.illegal.append("events were trimmed before they were read; the books are incomplete")
        return found

    def check(self, *, max_runs: int | None = None, max_extra_runs: int | None = None, unexpected: bool = True) -> None:
        """Raise AssertionError with the report unless everything adds up. Arguments as for `report`."""
        found = self.report(max_runs=max_runs, max_extra_runs=max_extra_runs, unexpected=unexpected)
        assert not found, f"the books of {len(self.accepted_ids)} accepted jobs do not add up\n{found}"

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ended(self) -> set[str]:
        return {job_id for job_id, where in self._where.items() if where in _TERMINAL}

    def _write(self, entry: dict[str, object]) -> None:
        os.write(self._descriptor, json.dumps(entry).encode() + b"\n")

    def _entries(self) -> Iterator[dict[str, Any]]:
        with self._path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):  # a last line without its end is being written right now
                    yield json.loads(line)

    def _judge_end(self, job_id: str, found: JobBookReport) -> None:
        state = (self._states or {}).get(job_id)
        told = self._where.get(job_id)
        if state in _TERMINAL or (state is None and told in (*_TERMINAL, _GONE)):
            return
        if state is not None:
            found.stuck.append(f"{job_id!r} is in {state}")
        elif self._states is None and told is not None:
            found.stuck.append(f"{job_id!r} was last seen {told}")
        else:
            found.lost.append(f"{job_id!r} is in no state" + (f", last seen {told}" if told else ", no event names it"))

    def _judge_runs(self, max_runs: int | None, max_extra_runs: int | None, found: JobBookReport) -> None:
        runs = self.runs
        per_fence = Counter((run.job_id, run.fence) for run in runs if run.fence is not None)
        for (job_id, fence), times in sorted(per_fence.items()):
            if times > 1:
                found.doubled.append(f"{job_id!r} ran {times} times under fence {fence}")
        per_job = Counter(run.job_id for run in runs)
        if max_runs is not None:
            for job_id, times in sorted(per_job.items()):
                if times > max_runs:
                    found.doubled.append(f"{job_id!r} ran {times} times, allowed are {max_runs}")
        extra = sum(per_job.values()) - len(per_job)
        if max_extra_runs is not None and extra > max_extra_runs:
            found.doubled.append(f"{extra} runs were repetitions, allowed are {max_extra_runs}")

    def _next_entries(self, client: redis.Redis, key: str, *, block_ms: int | None) -> list[Any]:
        reply: Any = client.xread({key: self._last_event_id}, count=1_000, block=block_ms)
        if not reply:
            return []
        # RESP2 gives a list of (stream, entries), RESP3 a mapping of stream to a list of lists of entries.
        entries: list[Any] = next(iter(reply.values()))[0] if isinstance(reply, dict) else reply[0][1]
        with self._changed:
            if not self._events_read:
                self._notice_trimmed_start(client, key)
            for entry_id, fields in entries:
                self._last_event_id = _text(entry_id)
                self._move({_text(name): _text(value) for name, value in fields.items()})
            self._events_read += len(entries)
            self._changed.notify_all()
        return entries

    def _notice_trimmed_start(self, client: redis.Redis, key: str) -> None:
        length, written = _length_and_written(client, key)
        self._events_lost = written > length

    def _move(self, event: dict[str, str]) -> None:
        job_id, name = event.get("jobId"), event.get("event", "")
        if job_id is None or name not in _MOVES:
            return
        allowed, after = _MOVES[name]
        before = self._where.get(job_id, _UNKNOWN if self._events_lost else _NOWHERE)
        self._where[job_id] = after
        if before == _UNKNOWN:
            return
        told_from = _COMES_FROM.get(event.get("prev")) if name == "waiting" else None
        if before not in allowed or (told_from is not None and before not in told_from):
            came = f" (prev={event['prev']})" if "prev" in event else ""
            self._illegal.append(f"{job_id!r} went from {before} to {name}{came}")
        if after in _TERMINAL:
            self._ends[job_id].append(after)
        elif before in _TERMINAL:
            self._ends[job_id].clear()  # sent back on purpose, or a new job under an old id: it may end once more


def _length_and_written(client: redis.Redis, key: str) -> tuple[int, int]:
    """Entries in a stream and entries it ever had, read in one step; the latter is 0 before 7.0, which cannot tell."""
    if not client.exists(key):
        return 0, 0
    info: Any = client.xinfo_stream(key)
    return int(info["length"]), int(info.get("entries-added", 0))


def _text(value: object) -> str:
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)
