"""Option dictionaries of PyPI's `bullmq` as arguments of bullpen.

In: dictionaries with BullMQ's names. Out: keyword arguments. A name that nobody knows is refused: what would have no
effect is better heard of when the job is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, Final

from bullpen._kernel.backoff import Backoff, CustomBackoff
from bullpen._kernel.ids import ForeignName
from bullpen._kernel.keep import KeepJobs
from bullpen.compat.bullmq._names import (
    BACKOFF,
    DEDUPLICATION,
    KEEP_JOBS,
    LIMITER,
    METRICS,
    SETTINGS,
    check_job_key,
    check_names,
)
from bullpen.errors import InvalidOption, JobNotFound
from bullpen.wire.deduplication import Deduplication
from bullpen.wire.links import JobKey, OnFailure

_AT_ONCE: Final = Backoff.fixed(1)
"""A job that names no backoff is tried again at once; one millisecond is as near as it gets."""

_POLICIES: Final[dict[str, OnFailure]] = {
    "failParentOnFailure": "fail_parent",
    "continueParentOnFailure": "continue_parent",
    "ignoreDependencyOnFailure": "ignore",
    "removeDependencyOnFailure": "remove",
}
_AS_LISTED: Final = ("removeDependencyOnFailure", *(name for name in _POLICIES if name != "removeDependencyOnFailure"))
_PLAIN: Final = {
    "delay": "delay",
    "priority": "priority",
    "lifo": "lifo",
    "jobId": "job_id",
    "keepLogs": "keep_logs",
    "stackTraceLimit": "stack_trace_limit",
    "timestamp": "timestamp",
}
_OF_OTHERS: Final = frozenset({"attempts", "backoff", "removeOnComplete", "removeOnFail", "deduplication", "parent"})
_OF_SCHEDULERS: Final = frozenset({"repeat", "prevMillis", "repeatJobKey", "offset"})
"""Written by schedulers into the jobs that they make."""
_OF_CALLERS: Final = _PLAIN.keys() | _OF_OTHERS | _POLICIES.keys()


def native_name(name: str) -> str:
    """The name of a queue for bullpen, which takes no empty one from anybody else."""
    return ForeignName(name) if name == "" else name


def check_policies(opts: Mapping[str, Any]) -> None:
    """Refuse more than one rule about the parent."""
    if len([name for name in _POLICIES if opts.get(name)]) > 1:
        given = ", ".join(name for name in _AS_LISTED if opts.get(name))
        raise ValueError(f"The following options cannot be used together: {given}")


def check_job_options(opts: object, path: str = "") -> None:
    """Refuse a name that the options of a job do not have, at any depth."""
    if not opts:
        return
    if isinstance(opts, Mapping):
        # A job that a scheduler made may be added again as it is.
        if opts.get("repeat") and not opts.keys() & {"prevMillis", "repeatJobKey"}:
            place = f"{path}.repeat" if path else "repeat"
            raise InvalidOption(
                place, "nothing here: `add` stores one job", "repeat", suggestion="queue.upsertJobScheduler(id, {…})"
            )
        opts = {name: value for name, value in opts.items() if name not in _OF_SCHEDULERS}
    check_names(opts, _OF_CALLERS, "a job option", path)
    assert isinstance(opts, Mapping)
    inside = f"{path}." if path else ""
    if (backoff := opts.get("backoff")) and not isinstance(backoff, int):
        check_names(backoff, BACKOFF, "a part of a backoff", f"{inside}backoff")
    check_names(opts.get("deduplication"), DEDUPLICATION, "a part of a deduplication", f"{inside}deduplication")
    check_retention(opts, inside)
    check_job_key(opts.get("parent"), f"{inside}parent")


def check_retention(opts: Mapping[str, Any], inside: str = "") -> None:
    """The same for which finished jobs stay."""
    for name in ("removeOnComplete", "removeOnFail"):
        if isinstance(rule := opts.get(name), Mapping):
            check_names(rule, KEEP_JOBS, "a part of a rule", f"{inside}{name}")


def check_worker_parts(opts: Mapping[str, Any]) -> None:
    """The same for the dictionaries in the options of a worker."""
    check_names(opts.get("settings"), SETTINGS, "a setting", "settings")
    check_names(opts.get("metrics"), METRICS, "a part of metrics", "metrics")
    check_names(limiter := opts.get("limiter"), LIMITER, "a part of a limiter", "limiter")
    if limiter is not None and LIMITER - limiter.keys():
        raise InvalidOption("limiter", "both `max` and `duration`", ", ".join(sorted(limiter)) or "neither")
    check_retention(opts)


def job_arguments(opts: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Queue.add` for the options of one job."""
    check_policies(opts)
    check_job_options(opts)
    given: dict[str, Any] = {ours: opts[theirs] for theirs, ours in _PLAIN.items() if opts.get(theirs) is not None}
    given["attempts"] = max(1, opts.get("attempts") or 1)
    given["backoff"] = _backoff(opts.get("backoff"))
    given["remove_on_complete"] = retention(opts.get("removeOnComplete"))
    given["remove_on_fail"] = retention(opts.get("removeOnFail"))
    if (rule := opts.get("deduplication")) is not None:
        given["deduplication"] = _deduplication(rule)
    if parent := opts.get("parent"):
        key = JobKey(str(parent.get("id")), str(parent.get("queue")))
        if ":" not in key.queue_key:  # no queue has such a key, so this job cannot be there
            raise JobNotFound(key.queue_key, key.id)
        given["parent"] = key
        given["on_failure"] = next((ours for theirs, ours in _POLICIES.items() if opts.get(theirs)), "wait")
    return given


def template_policy(opts: Mapping[str, Any]) -> OnFailure | None:
    """What the template of a scheduler says about a parent that its jobs do not have."""
    return next((ours for theirs, ours in _POLICIES.items() if opts.get(theirs)), None)


def child_arguments(opts: Mapping[str, Any]) -> dict[str, Any]:
    """The same for a child in a flow, whose parent is the job above it."""
    given = job_arguments({name: value for name, value in opts.items() if name != "parent"})
    given["on_failure"] = next((ours for theirs, ours in _POLICIES.items() if opts.get(theirs)), "wait")
    return given


def _backoff(value: Any) -> Backoff | CustomBackoff:
    if not value:
        return _AT_ONCE
    if isinstance(value, int):
        return Backoff.fixed(value)
    kind, delay, jitter = value.get("type"), value.get("delay") or 0, value.get("jitter") or 0.0
    if kind not in ("fixed", "exponential"):
        return Backoff.custom(kind, delay=delay or None)
    return Backoff(kind, delay, jitter) if delay else _AT_ONCE


def retention(value: Any) -> bool | int | KeepJobs | None:
    """Which finished jobs stay."""
    if isinstance(value, dict):
        return KeepJobs(count=value.get("count"), age_s=value.get("age"), limit=value.get("limit"))
    return value  # type: ignore[no-any-return]  # checked by whoever gets it


def _deduplication(rule: Mapping[str, Any]) -> Deduplication:
    return Deduplication(
        rule.get("id", ""),
        ttl=rule.get("ttl") or None,
        extend=bool(rule.get("extend")),
        replace=bool(rule.get("replace")),
        keep_last_if_active=bool(rule.get("keepLastIfActive")),
    )


def instant(name: str, value: Any) -> datetime | None:
    """A time as schedulers take it: Unix ms, or ISO 8601."""
    if value is None or value == "":
        return None
    try:
        if isinstance(value, str) and not value.lstrip("-").isdigit():
            parsed = datetime.fromisoformat(value)
            return parsed if parsed.tzinfo is not None else parsed.astimezone()
        return datetime.fromtimestamp(int(value) / 1000, UTC)
    except (TypeError, ValueError, OverflowError, OSError) as error:
        raise InvalidOption(name, "Unix ms or an ISO 8601 time", value) from error


class AnyStrategy(Mapping[str, Callable[[int, BaseException, Any], Any]]):
    """One strategy for every type of backoff that is not built in, as `settings.backoffStrategy` is."""

    def __init__(self, strategy: Callable[..., Any], job_of: Callable[[Any], Any]) -> None:
        self._strategy, self._job_of = strategy, job_of

    def __getitem__(self, kind: str) -> Callable[[int, BaseException, Any], Any]:
        if kind in ("fixed", "exponential", "linear"):
            raise KeyError(kind)
        return lambda made, error, job: self._strategy(made, kind, error, self._job_of(job))

    def __iter__(self) -> Iterator[str]:
        return iter(())  # nobody can list the names

    def __len__(self) -> int:
        return 0
