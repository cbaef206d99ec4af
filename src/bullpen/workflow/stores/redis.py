"""Entities as dictionaries in Redis: data, version, past and applied events of one entity in four keys of one slot.

In: dictionaries that JSON can hold. Out: the port; every change is one script call that checks the version first. Past
and applied events are bounded: an event that comes again after `keep_applied` others of its entity is not recognised.
Elsewhere: the script (`bullpen.wire.lua.commit_entity`), durability of Redis itself (docs/guides/durability.md).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, Generic, TypeVar

from bullpen._kernel import json
from bullpen._kernel.duration import check_int, is_text
from bullpen._kernel.ids import encode_segment
from bullpen.errors import EntityChanged, InvalidOption, require, word
from bullpen.ports.entity import AllowedStates, Applied, Change, HistoryEntry, Loaded
from bullpen.redis import Connection
from bullpen.redis.socket import translate
from bullpen.wire.scripts import SCRIPTS

__all__ = ["RedisEntities"]

S = TypeVar("S")
Entity = dict[str, Any]
_FIELDS: Final = ("job_id", "attempt", "tenant_id", "user_id", "correlation_id")


def _itself(status: str) -> Any:
    return status


class RedisEntities(Generic[S]):
    """Dictionaries in Redis, with the keys `urn` and `status`.

    orders = RedisEntities(app.connection, "orders", status_type=OrderStatus)
    await orders.create({"urn": "urn:order:1", "status": OrderStatus.NEW, "amount": 5})

    An entity that was made with a `tenant_id` exists for that tenant only; one without is everybody's.
    """

    can_send = False

    def __init__(
        self,
        connection: Connection,
        name: str,
        *,
        status_type: Callable[[str], S] = _itself,
        blank: Mapping[str, Any] | None = None,
        prefix: str = "bullpen:entities",
        keep_history: int = 1_000,
        keep_applied: int = 10_000,
    ) -> None:
        """`status_type` makes a status of its text, such as an Enum; `blank` is what `new` begins with."""
        require("name", is_text(name) and ":" not in name, "non-empty text without ':'", name)
        self._connection, self._status_type, self._blank = connection, status_type, dict(blank or {})
        self._base = f"{prefix}:{name}:"
        self._states = AllowedStates()
        self._keep_history = check_int("keep_history", keep_history, minimum=1)
        self._keep_applied = check_int("keep_applied", keep_applied, minimum=1)

    @property
    def connection(self) -> Connection:
        return self._connection

    @property
    def kind(self) -> str:
        """Tells these entities from others of the same server."""
        return self._base

    # ---- for programs -------------------------------------------------------------------------------------------

    def allow(self, states: Sequence[Any]) -> None:
        """Let `create` take entities in these states; a workflow that is registered does it."""
        self._states.allow(states)

    async def create(self, entity: Entity, *, tenant_id: str | None = None) -> Entity:
        """Store a new entity. Raises EntityChanged when its urn exists already, also another tenant's."""
        urn = self.urn(entity)
        require("entity.status", entity.get("status") is not None, "a status", entity.get("status"))
        self._states.check(entity["status"])
        keys = self._keys(urn)
        stored = await self._evaluate(
            keys, 0, entity, is_failed=False, reason="", applied=(), past=(), tenant_id=tenant_id
        )
        if stored < 0:
            raise EntityChanged(urn, exists=True)
        return entity

    async def delete(self, urn: str, *, tenant_id: str | None = None) -> bool:
        """Forget an entity with its past. False when there was none, or none of this tenant."""
        keys = self._keys(urn)
        door = self._connection.shared_door(keys[0])
        return bool(await door.evaluate(SCRIPTS["delete_entity"], keys, [tenant_id or ""]))

    async def load(self, urn: str, *, tenant_id: str | None = None) -> Entity | None:
        loaded = await self.read("", urn, tenant_id=tenant_id)
        return None if loaded is None else loaded.entity

    # ---- the port -----------------------------------------------------------------------------------------------

    def new(self) -> Entity:
        return dict(self._blank)

    def status(self, entity: Entity) -> S:
        return self._status_type(word(entity["status"]))

    def urn(self, entity: Entity) -> str:
        urn = entity.get("urn") if isinstance(entity, dict) else None
        if not is_text(urn):
            raise InvalidOption("entity.urn", "non-empty text that names the entity", urn)
        return str(urn)

    async def read(
        self, workflow: str, urn: str, keys: Sequence[str] = (), *, tenant_id: str | None = None
    ) -> Loaded[Entity] | None:
        entity_key, applied_key, outcomes_key, _ = self._keys(urn)
        # In one transaction: an event that is applied between two reads would look like a new one.
        commands: list[tuple[str | int, ...]] = [("HMGET", entity_key, "data", "version", "tenant")]
        for member in _members(workflow, keys):
            commands += [("ZSCORE", applied_key, member), ("HGET", outcomes_key, member)]
        (data, version, owner), *found = await self._together(entity_key, commands)
        if data is None or not _is_seen(owner, tenant_id):
            return None
        applied = {
            key: Applied("applied") if reason is None else Applied("failed", reason.decode())
            for key, score, reason in zip(keys, found[::2], found[1::2], strict=True)
            if score is not None
        }
        return Loaded(json.decode(data), int(version), applied)

    async def advance(self, entity: Entity, status: S) -> Entity:
        return {**entity, "status": word(status)}

    async def commit(self, change: Change[Entity]) -> Entity:
        now_ms = int(time.time() * 1000)
        past = [
            {
                "version": change.version + 1,
                "event": move.event,
                "source": move.source,
                "target": move.target,
                "kind": move.kind,
                "key": change.keys[0] if change.keys else "",
                "at": now_ms,
                **{name: value for name in _FIELDS if (value := getattr(change, name)) is not None},
                **({"reason": change.reason} if move.kind == "failed" else {}),
            }
            for move in change.moves
        ]
        is_failed = any(move.kind == "failed" for move in change.moves)
        stored = await self._evaluate(
            self._keys(change.urn),
            change.version,
            change.entity,
            is_failed=is_failed,
            reason=change.reason,
            applied=_members(change.workflow, change.keys),
            past=past,
            tenant_id=change.tenant_id,
        )
        if stored < 0:
            raise EntityChanged(change.urn)
        return change.entity

    async def history(
        self, workflow: str, urn: str, *, limit: int = 100, tenant_id: str | None = None
    ) -> list[HistoryEntry]:
        entity_key, *_, history_key = self._keys(urn)
        # In one transaction: between two reads it may become the entity of another tenant.
        owner, entries = await self._together(
            entity_key, [("HGET", entity_key, "tenant"), ("LRANGE", history_key, -limit, -1)]
        )
        if not _is_seen(owner, tenant_id):
            return []
        past = [_entry(urn, json.decode(each)) for each in entries]
        # Of an entity that is everybody's, a tenant sees what it did itself, and what nobody in particular did.
        return past if tenant_id is None else [each for each in past if each.tenant_id in (None, tenant_id)]

    # ---- inside -------------------------------------------------------------------------------------------------

    def _keys(self, urn: str) -> tuple[str, str, str, str]:
        base = f"{self._base}{{{encode_segment(urn)}}}"  # in braces: one slot of a cluster
        return base, f"{base}:applied", f"{base}:outcomes", f"{base}:history"

    async def _together(self, key: str, commands: Sequence[tuple[str | int, ...]]) -> list[Any]:
        """The replies to commands that see one moment. Raises what the server says to any of them: inside of the reply
        to EXEC it is an error too, which must not pass for a value."""
        replies = await self._connection.shared_door(key).call_many([("MULTI",), *commands, ("EXEC",)])
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        found: list[Any] = replies[-1]
        for reply in found:
            if isinstance(reply, Exception):
                raise translate(reply)
        return found

    async def _evaluate(
        self,
        keys: tuple[str, ...],
        version: int,
        entity: Entity,
        *,
        is_failed: bool,
        reason: str,
        applied: Sequence[str],
        past: Sequence[Mapping[str, Any]],
        tenant_id: str | None,
    ) -> int:
        data = json.encode({**entity, "status": word(entity["status"])}, what="entity")
        stored = await self._connection.shared_door(keys[0]).evaluate(
            SCRIPTS["commit_entity"],
            keys,
            [
                *(version, data, self._keep_applied, self._keep_history, int(is_failed), reason, len(applied)),
                tenant_id or "",
                *applied,
                *(json.encode(each, what="history") for each in past),
            ],
        )
        return int(stored)


def _is_seen(owner: bytes | None, tenant_id: str | None) -> bool:
    return owner is None or owner == (tenant_id or "").encode()


def _members(workflow: str, keys: Sequence[str]) -> list[str]:
    """Several workflows may move the same entities: each has its own events."""
    return [f"{encode_segment(workflow)}/{key}" for key in keys]


def _entry(urn: str, stored: dict[str, Any]) -> HistoryEntry:
    at = datetime.fromtimestamp(stored.pop("at") / 1000, UTC)
    return HistoryEntry(urn=urn, at=at, **stored)
