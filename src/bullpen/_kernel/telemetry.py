"""The one place where things that happen are told.

Code emits named events with fields; logs, counters and spans are listeners (`bullpen.ops`). Without a listener `emit`
costs a function call. A listener that fails is reported once and never disturbs who emitted.
Fields hold ids, names, numbers and errors, never payloads and never secrets.

One thing is counted here as well, because every loop that waits shares it: late wake-ups. Such a loop is notified of
new work, and polls now and then as a fallback. Work that only the fallback found was announced to nobody: a defect, of
ours or of whoever should have notified us, that costs time and that nothing else would show.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from bullpen._kernel.logs import get_logger

Listener = Callable[[str, dict[str, Any]], object]
"""Called with the event's name and its fields. Must be quick, and may be called from any thread."""

_log = get_logger("bullpen.telemetry")
_change = threading.Lock()
_listeners: tuple[Listener, ...] = ()  # replaced, never changed: emit reads it without a lock
_broken: set[int] = set()
_late: Counter[str] = Counter()

WAITING_LOOPS: Final = ("cancels", "deliveries", "dispatcher", "projector", "results", "runs", "worker")
"""Where late wake-ups are counted: every loop that is notified of work and polls as a fallback."""

LATE_WAKEUPS_FILE: Final = "BULLPEN_LATE_WAKEUPS_FILE"
"""Environment variable: a file that gets a line for each late wake-up, so that a test sees those of its children."""


def emit(event: str, /, **fields: Any) -> None:
    """Tell all listeners. Never raises an Exception."""
    if not _listeners:
        return
    for listener in _listeners:
        try:
            listener(event, fields)
        except Exception:  # noqa: BLE001 - reported below; whoever emits has other things to do
            _report(listener, event)
        else:
            if _broken and id(listener) in _broken:
                _recover(listener)


def late_wakeup(where: str, count: int = 1, /, **fields: Any) -> None:
    """Work was found by a fallback poll of the loop `where`, and not by its notification."""
    with _change:
        _late[where] += count
    _log.info("late wake-up: the %s found work by its fallback poll: %s", where, fields)
    path = os.environ.get(LATE_WAKEUPS_FILE)
    if path:
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{os.getpid()} {where} {count} {fields}\n")
    emit("wakeup.late", where=where, count=count, **fields)


def late_wakeups() -> dict[str, int]:
    """How many there were in this process, by loop."""
    with _change:
        return dict(_late)


def is_enabled() -> bool:
    """True when somebody listens: worth asking before fields that cost something are computed."""
    return bool(_listeners)


def subscribe(listener: Listener) -> Callable[[], None]:
    """Call `listener` for every event from now on; returns the function that ends it. Ending twice is harmless."""
    global _listeners
    # Wrapped, so that one function may be subscribed twice and each subscription ends alone.
    entry = _Subscription(listener)
    with _change:
        _listeners = (*_listeners, entry)
    return lambda: _unsubscribe(entry)


class _Subscription:
    __slots__ = ("_listener",)

    def __init__(self, listener: Listener) -> None:
        self._listener = listener

    def __call__(self, event: str, fields: dict[str, Any]) -> None:
        self._listener(event, fields)

    def __repr__(self) -> str:
        return getattr(self._listener, "__qualname__", type(self._listener).__name__)


def _unsubscribe(entry: _Subscription) -> None:
    global _listeners
    with _change:
        _listeners = tuple(other for other in _listeners if other is not entry)
        _broken.discard(id(entry))


def _report(listener: Listener, event: str) -> None:
    # Once when it begins: a listener that fails on every job must not fill the disk.
    with _change:
        is_new = id(listener) not in _broken
        _broken.add(id(listener))
    if is_new:
        _log.exception("telemetry listener %r failed on %r; further failures of it are not logged", listener, event)


def _recover(listener: Listener) -> None:
    with _change:
        _broken.discard(id(listener))
    _log.warning("telemetry listener %r works again", listener)
