"""The durability of adds without an event loop: what `durability` does, on a blocking wire.

In: a wire and a call that was answered on it. Out: whether its level is reached. Elsewhere: the levels and what their
answers mean (`durability`), repeating calls (`bullpen.sync`).
"""

from __future__ import annotations

import time

from bullpen._kernel.ids import new_token
from bullpen.errors import ServerRefused
from bullpen.queue.durability import (
    REPLICA_QUESTIONS,
    SYNC_QUESTIONS,
    TRUE_WAIT_S,
    WAITS_TO_SEE,
    Durability,
    answers_early,
    cannot_wait,
    check_replicas,
    confirm_commands,
    count_acknowledged,
    is_confirmed,
    is_unproven,
    read_sync_policy,
)
from bullpen.redis.blocking import BlockingWire
from bullpen.redis.client import Connection
from bullpen.redis.discovery import ServerUnavailable
from bullpen.wire.keys import QueueKeys


class BlockingDurability:
    """Confirms the calls of one queue object. A wire is asked once whether its server can keep `fsync`, a connection
    once whether there are replicas."""

    def __init__(self, connection: Connection, keys: QueueKeys) -> None:
        self._connection, self._keys = connection, keys
        self._checked: BlockingWire | None = None
        self._always_synced = False

    def check(self, wire: BlockingWire, level: Durability, left_s: float) -> None:
        """Refuse before anything is written where the promise cannot be kept."""
        if level.kind != "fsync":
            if is_unproven(self._connection, level):
                check_replicas(self._connection, level, wire.converse(REPLICA_QUESTIONS))
            return
        if wire is self._checked:
            return
        info, policy = read_sync_policy(wire.converse(SYNC_QUESTIONS))
        if policy != "always" and info.get("run_id", "") not in self._connection.true_waits:
            self._see_it_wait(wire, info, policy, left_s)
        self._always_synced, self._checked = policy == "always", wire

    def confirm(
        self, wire: BlockingWire, level: Durability, call_key: str, number: int, call_ttl_ms: int, left_s: float
    ) -> bool:
        """False: the server does not know the call. True: the level is reached. Waits in between."""
        self.check(wire, level, left_s)
        wait_ms = max(1, int(min(left_s, 5.0) * 1000))
        commands = confirm_commands(level, call_key, call_ttl_ms, wait_ms, always_synced=self._always_synced)
        wire.wait_at_most(wait_ms / 1000 + self._connection.command_timeout_s)
        replies = wire.converse(commands)
        wire.wait_at_most(self._connection.command_timeout_s)
        return is_confirmed(replies, level, number)

    def _see_it_wait(self, wire: BlockingWire, info: dict[str, str], policy: str, left_s: float) -> None:
        """WAITAOF has to prove itself: what is written right after a sync cannot be on the disk at once."""
        give_up_at, key = time.monotonic() + left_s, self._keys.synced(new_token())
        try:
            for attempt in range(WAITS_TO_SEE):
                waited_s = self._write_and_wait(wire, key, give_up_at - time.monotonic())
                if attempt and waited_s < TRUE_WAIT_S:
                    raise answers_early(info, policy)
        except ServerRefused as error:
            raise cannot_wait(info) from error
        self._connection.true_waits.add(info.get("run_id", ""))

    def _write_and_wait(self, wire: BlockingWire, key: str, left_s: float) -> float:
        """How long the server waits for its disk, without the way there and back."""
        wait_ms = max(1, int(min(left_s, 5.0) * 1000))
        began = time.monotonic()
        wire.call("SET", key, "", "PX", 10_000)
        written = time.monotonic()
        wire.wait_at_most(wait_ms / 1000 + self._connection.command_timeout_s)
        acknowledged = count_acknowledged(wire.call("WAITAOF", 1, 0, wait_ms))
        wire.wait_at_most(self._connection.command_timeout_s)
        if acknowledged < 1:
            raise ServerUnavailable("the disk has not confirmed yet")
        return time.monotonic() - written - (written - began)
