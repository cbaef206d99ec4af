"""Whether the server that a plain thread is connected to is still the primary, as its sentinels see it.

After a planned failover an old primary goes on for seconds to take writes that it will throw away. No task listens
beside a plain thread, so each call asks here before it is sent and when it was answered. That costs one system call:
subscriptions to the sentinels lie open, and what they said meanwhile is read without waiting. Sentinels whose word may
be lost are also asked, by the first call after half a second.
In: sentinels and how to reach them. Out: an error where the server must be left. Elsewhere: the same for an event loop
(`client`), sockets (`blocking`), what the answers mean (`discovery`).
"""

from __future__ import annotations

import contextlib
import selectors
import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, Final, Protocol
from weakref import WeakSet

from bullpen.errors import ConnectionLost, ServerRefused
from bullpen.redis.address import NodeAddress, SentinelAddress
from bullpen.redis.discovery import FailoverUnderWay, ServerUnavailable

SENTINEL_EVENTS: Final = ("+try-failover", "+failover-state-select-slave", "+promoted-slave", "+switch-master")
"""The first two come a moment before a replica is made primary."""
ASK_SENTINELS_EVERY_S: Final = 0.5
_LISTEN_AGAIN_S: Final = 5.0


class Subscription(Protocol):
    """A connection to one sentinel."""

    def subscribe(self, *channels: str) -> None:
        """Raises ConnectionLost or ServerRefused."""

    def pushed(self) -> list[Any]:
        """What came meanwhile; never waits. Raises ConnectionLost."""

    def fileno(self) -> int: ...
    def close(self) -> None: ...


class PrimaryWatch:
    """One per process and `Connection`, for all its blocking wires; any thread may ask."""

    def __init__(
        self, address: SentinelAddress, dial: Callable[[NodeAddress], Subscription], ask: Callable[[], NodeAddress]
    ) -> None:
        self._seeds, self._service = address.seeds, address.service.encode()
        self._dial, self._ask = dial, ask
        self._lock = threading.Lock()
        self._wires: WeakSet[object] = WeakSet()
        self._selector: selectors.BaseSelector | None = None
        self._listen_at: dict[NodeAddress, float] = {}
        """When to subscribe at a sentinel again; infinity while we are."""
        self._is_told, self._ask_at = False, 0.0
        self._primary: NodeAddress | None = None

    def locate(self) -> NodeAddress:
        """Where the primary is now. Raises what asking raises. Follow it with `join` or `rest`."""
        with self._lock:
            self._listen()
            return self._find()

    def join(self, wire: object) -> None:
        """Listen as long as this wire is open."""
        with self._lock:
            self._wires.add(wire)
            self._listen()

    def leave(self, wire: object) -> None:
        self._wires.discard(wire)
        self.rest()

    def rest(self) -> None:
        """Listen no longer, unless there is an open wire."""
        with self._lock:
            if not self._wires and self._selector is not None:
                for key in list(self._selector.get_map().values()):
                    self._hang_up(key.data)
                self._selector.close()
                self._selector = None

    def check(self, endpoint: NodeAddress) -> None:
        """Before a call. Raises ServerUnavailable when this server is no longer the primary."""
        with self._lock:
            self._hear()
            if self._is_told or monotonic() >= self._ask_at:
                self._listen()
                try:
                    self._find()
                except FailoverUnderWay:
                    raise
                except (ConnectionLost, ServerRefused):
                    self._ask_at = monotonic() + ASK_SENTINELS_EVERY_S  # nobody knows better than we do
            if self._primary not in (None, endpoint):
                raise ServerUnavailable(f"the sentinels chose {self._primary}, not {endpoint}")

    def confirm(self, endpoint: NodeAddress) -> None:
        """When a call was answered. Raises ConnectionLost when a failover began meanwhile: what was written may be
        thrown away."""
        with self._lock:
            self._hear()
            if self._is_told or self._primary not in (None, endpoint):
                raise ConnectionLost(f"the sentinels began to replace {endpoint} while it answered")

    def _find(self) -> NodeAddress:
        self._primary = primary = self._ask()
        self._is_told, self._ask_at = False, monotonic() + ASK_SENTINELS_EVERY_S
        return primary

    def _listen(self) -> None:
        """Subscribe where we are not, and may try again. Whatever was said before that has to be asked."""
        if self._selector is None:
            self._selector, self._listen_at = selectors.DefaultSelector(), {}
        for seed in self._seeds:
            if monotonic() < self._listen_at.get(seed, 0.0):
                continue
            self._listen_at[seed] = monotonic() + _LISTEN_AGAIN_S
            with contextlib.suppress(ConnectionLost, ServerRefused):  # it is away, or does not let this user listen
                subscription = self._dial(seed)
                try:
                    subscription.subscribe(*SENTINEL_EVENTS)
                except BaseException:
                    subscription.close()
                    raise
                self._selector.register(subscription.fileno(), selectors.EVENT_READ, (seed, subscription))
                self._listen_at[seed] = float("inf")
                self._ask_at = 0.0

    def _hear(self) -> None:
        if self._selector is None:
            return
        for key, _ in self._selector.select(0):
            try:
                pushed = key.data[1].pushed()
            except ConnectionLost:
                self._hang_up(key.data)
                self._ask_at = 0.0
            else:
                self._is_told = self._is_told or any(map(self._is_ours, pushed))

    def _is_ours(self, push: Any) -> bool:
        return isinstance(push, list) and push[0] == b"message" and self._service in push[2].split(b" ")

    def _hang_up(self, ear: tuple[NodeAddress, Subscription]) -> None:
        seed, subscription = ear
        assert self._selector is not None
        self._selector.unregister(subscription.fileno())
        subscription.close()
        self._listen_at[seed] = 0.0
