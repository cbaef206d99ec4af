"""The Redis keys of one queue.

In: prefix and queue name. Out: every key as text, made once. Scripts receive keys from here and build none of their own
except job keys, which are `base` plus the job's id.
Elsewhere: which names are allowed (`bullpen._kernel.ids`), what the keys hold (`records`, `options`, `events`).
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final, NoReturn

from bullpen._kernel.ids import (
    JOB_SUFFIXES,
    QUEUE_SUFFIXES,
    RESERVED,
    check_prefix,
    check_queue_name,
    clean_name,
    encode_segment,
)

__all__ = [
    "DEFAULT_PREFIX",
    "EXTENSION_KEYS",
    "JOB_SUFFIXES",
    "LANE_KEYS",
    "QUEUE_SUFFIXES",
    "RESERVED",
    "QueueKeys",
    "client_name",
    "hash_tag",
    "slot",
]

DEFAULT_PREFIX: Final = "bull"

EXTENSION_KEYS: Final[dict[str, str]] = {
    "bp:audit:": "stream, capped; who did what to dead letters where there is no ledger; always with a TTL",
    "bp:beats:": "sorted set or string; processes of workers and what each does now; always with a TTL",
    "bp:call:": "string; last numbered call of one caller with its codes and ids; always with a TTL",
    "bp:cancel:": "stream, capped; requests to cancel running jobs; always with a TTL",
    "bp:held:": "sorted set; delayed jobs that the limit of one lane holds back; always with a TTL",
    "bp:history:": "hash; what jobs did in the minutes and hours of a time, by name; always with a TTL",
    "bp:lanes:": "sorted set; turns of the lanes of one class of priority, or lanes that hold jobs; always with a TTL",
    "bp:letters:": "sorted set, hash or string; index and counters of dead letters, made from them; always with a TTL",
    "bp:limits:": "stream of one entry; limits of the queue were changed; always with a TTL",
    "bp:marks:": "stream, capped; deploys and other events that charts show; always with a TTL",
    "bp:queues:": "stream, capped; queues that dispatchers of the outbox start to fill; always with a TTL",
    "bp:once:": "string; answer of a request to the dashboard: sent twice, it is done once; always with a TTL",
    "bp:rate:": "string; jobs of one lane that started in the current window; always with a TTL",
    "bp:running:": "sorted set; jobs of one lane with a limit that run or may start; always with a TTL",
    "bp:size:": "sorted set; jobs of one lane with a limit of size that did not start; always with a TTL",
    "bp:synced:": "string; empty, written to see how long WAITAOF takes; always with a TTL",
    "bp:turns:": "string; calls of one provider in the current window; always with a TTL",
    "bp:users:": "sorted set; which ledgers used the queue of runs, by when; always with a TTL",
}
"""Keys of ours, by what follows the base. The second colon keeps Node's orphan cleaner away from them. None holds the
only reference to a job: all of them may vanish without losing one."""


LANE_KEYS: Final = (b"bp:held:", b"bp:lanes:", b"bp:rate:", b"bp:running:", b"bp:size:")
"""Those that only a queue with lanes has: the field `bplanes` of its `meta` says so."""


class QueueKeys:
    """All key names of one queue. Compare and hash by `base`."""

    __slots__ = (
        "active", "base", "completed", "delay", "delayed", "events", "failed", "id", "limiter", "marker", "meta",
        "metrics_completed", "metrics_completed_data", "metrics_failed", "metrics_failed_data", "name", "paused", "pc",
        "prefix", "prioritized", "priority", "repeat", "stalled", "stalled_check", "wait", "waiting_children",
    )  # fmt: skip

    base: str
    """`<prefix>:<queue>:`, what job ids are appended to."""
    prefix: str
    name: str
    meta: str
    id: str
    wait: str
    paused: str
    active: str
    prioritized: str
    pc: str
    delayed: str
    waiting_children: str
    completed: str
    failed: str
    stalled: str
    stalled_check: str
    limiter: str
    marker: str
    events: str
    repeat: str
    metrics_completed: str
    metrics_completed_data: str
    metrics_failed: str
    metrics_failed_data: str
    delay: str
    priority: str

    def __init__(self, prefix: str, name: str) -> None:
        base = f"{check_prefix(prefix)}:{check_queue_name(name)}:"
        put = object.__setattr__
        put(self, "prefix", prefix)
        put(self, "name", name)
        put(self, "base", base)
        for word in ("meta", "id", "wait", "paused", "active", "prioritized", "pc", "delayed", "completed", "failed",
                     "stalled", "limiter", "marker", "events", "repeat", "delay", "priority"):  # fmt: skip
            put(self, word, base + word)
        put(self, "waiting_children", base + "waiting-children")
        put(self, "stalled_check", base + "stalled-check")
        put(self, "metrics_completed", base + "metrics:completed")
        put(self, "metrics_completed_data", base + "metrics:completed:data")
        put(self, "metrics_failed", base + "metrics:failed")
        put(self, "metrics_failed_data", base + "metrics:failed:data")

    def __setattr__(self, attribute: str, value: Any) -> NoReturn:
        raise AttributeError(f"QueueKeys is frozen: {attribute} cannot be set")

    def __delattr__(self, attribute: str) -> NoReturn:
        raise AttributeError(f"QueueKeys is frozen: {attribute} cannot be deleted")

    def __repr__(self) -> str:
        return f"QueueKeys({self.prefix!r}, {self.name!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QueueKeys) and (self.prefix, self.name) == (other.prefix, other.name)

    def __hash__(self) -> int:
        return hash(self.base)

    def __reduce__(self) -> tuple[type[QueueKeys], tuple[str, str]]:
        return QueueKeys, (self.prefix, self.name)

    def job(self, job_id: str) -> str:
        return self.base + job_id

    def lock(self, job_id: str) -> str:
        return f"{self.base}{job_id}:lock"

    def logs(self, job_id: str) -> str:
        return f"{self.base}{job_id}:logs"

    def dependencies(self, job_id: str) -> str:
        return f"{self.base}{job_id}:dependencies"

    def processed(self, job_id: str) -> str:
        return f"{self.base}{job_id}:processed"

    def failed_children(self, job_id: str) -> str:
        """Failures of children that do not fail the parent."""
        return f"{self.base}{job_id}:failed"

    def unsuccessful(self, job_id: str) -> str:
        """Failures of children that must fail the parent."""
        return f"{self.base}{job_id}:unsuccessful"

    def job_keys(self, job_id: str) -> tuple[str, ...]:
        """Every key that goes away with the job."""
        key = self.base + job_id
        return (key, *(f"{key}:{suffix}" for suffix in sorted(JOB_SUFFIXES)))

    def scheduler(self, scheduler_id: str) -> str:
        return f"{self.base}repeat:{scheduler_id}"

    def deduplication(self, deduplication_id: str) -> str:
        return f"{self.base}de:{deduplication_id}"

    def deduplication_next(self, deduplication_id: str) -> str:
        return f"{self.base}dn:{deduplication_id}"

    @property
    def audit(self) -> str:
        """Who did what to the dead letters of this queue, where there is no ledger."""
        return f"{self.base}bp:audit:log"

    def call(self, caller: str) -> str:
        """Where the scripts remember the last numbered call of one caller."""
        return f"{self.base}bp:call:{caller}"

    @property
    def cancels(self) -> str:
        """Which running jobs somebody wants to end; their workers read it."""
        return f"{self.base}bp:cancel:asked"

    def beats(self, process: str) -> str:
        """What one process does for this queue now; with `index` which processes there are."""
        return f"{self.base}bp:beats:{process}"

    def held(self, lane: str) -> str:
        """Which delayed jobs are held back by the limit of a lane, in the order in which they go on."""
        return f"{self.base}bp:held:{lane}"

    def history(self, tier: str, period: int) -> str:
        """What the jobs of one period did, in steps of this tier."""
        return f"{self.base}bp:history:{tier}:{period}"

    def lanes(self, which: str) -> str:
        """The turns of the lanes of a class of priority; or with `held` when to look at the lanes that hold jobs."""
        return f"{self.base}bp:lanes:{which}"

    def lane_rate(self, lane: str) -> str:
        """How many jobs of a lane started in the current window."""
        return f"{self.base}bp:rate:{lane}"

    def running(self, lane: str) -> str:
        """Which jobs of a lane with a limit run, or were released and may start."""
        return f"{self.base}bp:running:{lane}"

    def lane_size(self, lane: str) -> str:
        """Which jobs of a lane with a limit of size did not start."""
        return f"{self.base}bp:size:{lane}"

    def letters(self, part: str) -> str:
        """What is kept beside the entries of this dead-letter queue, see `bullpen.queue.dead_letters.index`."""
        return f"{self.base}bp:letters:{part}"

    @property
    def limits_changed(self) -> str:
        """Tells workers that wait for the end of a limit to look again."""
        return f"{self.base}bp:limits:changed"

    @property
    def marks(self) -> str:
        """Deploys and other events that charts show; beside the queue of operations."""
        return f"{self.base}bp:marks:log"

    @property
    def queues(self) -> str:
        """Tells delivery workers of the outbox which queues its dispatchers begin to fill."""
        return f"{self.base}bp:queues:filled"

    def once(self, digest: str) -> str:
        """The answer of a request that must not be done twice."""
        return f"{self.base}bp:once:{digest}"

    def synced(self, caller: str) -> str:
        """Written to see whether the server waits for its disk."""
        return f"{self.base}bp:synced:{caller}"

    def turns(self, provider: str) -> str:
        """Counts the calls of a provider in the current window."""
        return f"{self.base}bp:turns:{encode_segment(provider)}"

    def users(self, kind: str) -> str:
        """Who used the queue, and when last."""
        return f"{self.base}bp:users:{kind}"

    def job_id_of(self, key: str) -> str | None:
        """The id behind a job key of this queue, else None."""
        return key[len(self.base) :] or None if key.startswith(self.base) else None

    def dead_letter_name(self, suffix: str = "-dlq") -> str:
        """Name of the queue for dead letters. It keeps a cluster tag of the name, so one script can reach both."""
        return check_queue_name(self.name + suffix)

    @property
    def hash_tag(self) -> str | None:
        """The part in braces that puts all keys in one cluster slot, if there is one."""
        return hash_tag(self.base)


def hash_tag(key: str) -> str | None:
    """What Redis Cluster hashes instead of the whole key: the first `{...}` if it is not empty."""
    start = key.find("{")
    end = key.find("}", start + 1)
    return key[start + 1 : end] if start != -1 and end > start + 1 else None


def slot(key: str) -> int:
    """The cluster slot of a key, as the servers compute it."""
    return binascii.crc_hqx((hash_tag(key) or key).encode(), 0) % 16384


def client_name(prefix: str, queue: str, worker_name: str = "") -> str:
    """Name of a worker's blocking connection: how `CLIENT LIST` shows who works on a queue."""
    base = f"{prefix}:{base64.b64encode(queue.encode()).decode()}"
    return f"{base}:w:{clean_name(worker_name)}" if worker_name else base
