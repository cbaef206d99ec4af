"""The names that option dictionaries may have.

In: a dictionary as a program gives it, and where it stands. Out: nothing, or InvalidOption for the first name that
nobody knows, with the place where it stood and the name that was probably meant. What PyPI's `bullmq` takes and does
without is in the lists; what has no effect there and here is better heard of than searched for.
No value is ever shown: a password whose name is misspelt is still one.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import Any, Final

from bullpen.compat.bullmq.types import (
    BackoffOptions,
    DeduplicationOptions,
    KeepJobs,
    QueueBaseOptions,
    QueueEventsOptions,
    QueueEventsProducerOptions,
    WorkerOptions,
)
from bullpen.errors import InvalidOption
from bullpen.queue.states import JobState

COMMON: Final = frozenset(QueueEventsProducerOptions.__annotations__)
QUEUE: Final = frozenset(QueueBaseOptions.__annotations__)
WORKER: Final = frozenset(WorkerOptions.__annotations__)
QUEUE_EVENTS: Final = frozenset(QueueEventsOptions.__annotations__)
BACKOFF: Final = frozenset(BackoffOptions.__annotations__)
DEDUPLICATION: Final = frozenset(DeduplicationOptions.__annotations__)
KEEP_JOBS: Final = frozenset(KeepJobs.__annotations__)
SETTINGS: Final = frozenset({"backoffStrategy"})
LIMITER: Final = frozenset({"max", "duration"})
METRICS: Final = frozenset({"maxDataPoints"})
JOB_KEY: Final = frozenset({"id", "queue"})
BULK_ENTRY: Final = frozenset({"name", "data", "opts"})
FLOW_NODE: Final = frozenset({"name", "queueName", "data", "prefix", "opts", "children"})
_MOST_LISTED: Final = 24
"""More names than that hide the one that was meant."""
_STATES: Final = {state.value: state for state in JobState if state is not JobState.UNKNOWN} | {
    "wait": JobState.WAITING,
    "paused": JobState.WAITING,
}


def check_names(
    given: object, known: Collection[str], what: str, path: str = "", *, meant: Collection[str] | None = None
) -> None:
    """Refuse a name that `what` does not have. `path` is where the dictionary stands, `meant` what may be proposed."""
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise InvalidOption(path or what, f"a dictionary with {_listed(known)}", type(given).__name__)
    for name in given:
        if name not in known:
            place = f"{path}.{name}" if path else str(name)
            proposed = _nearest(str(name), known if meant is None else meant)
            listed = f" ({_listed(known)})" if len(known) <= _MOST_LISTED else ""
            raise InvalidOption(place, f"the name of {what}{listed}", name, suggestion=proposed)


def check_backend(given: Mapping[str, Any]) -> None:
    """Whether the queues are where ours are."""
    if given.get("backend") not in (None, "redis"):
        raise InvalidOption("backend", "'redis': queues in PostgreSQL are not built", given["backend"])


def check_job_key(given: object, path: str) -> None:
    """What names a job elsewhere: a parent, a child."""
    if given:
        check_names(given, JOB_KEY, "a part of a job's address", path)


def state_of(option: str, name: object) -> JobState:
    """A state by one of its names."""
    state = _STATES.get(name) if isinstance(name, str) else None
    if state is None:
        raise InvalidOption(
            option, f"the name of a state ({_listed(_STATES)})", name, suggestion=_nearest(str(name), _STATES)
        )
    return state


def check_event(name: object, known: Collection[str], emitter: str) -> None:
    """Refuse to listen to what never comes."""
    if name not in known:
        expected = f"an event of {emitter} ({_listed(known)})"
        raise InvalidOption("on", expected, name, suggestion=_nearest(str(name), known))


def _nearest(name: str, known: Collection[str]) -> str | None:
    by_lower_case = {each.lower(): each for each in sorted(known)}
    near = difflib.get_close_matches(name.lower(), by_lower_case, 1)
    return by_lower_case[near[0]] if near else None


def _listed(known: Collection[str]) -> str:
    return ", ".join(sorted(known))
