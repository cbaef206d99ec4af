"""The statements of scheduled messages, with the reason above each. Elsewhere: running them (`messages`)."""

from __future__ import annotations

from functools import cached_property
from typing import Final

from bullpen.ledger import tables
from bullpen.ledger._words import Words

_TEXT: Final = frozenset({"id", "response"})
COLUMNS: Final = ", ".join(
    f"CAST(m.{column.name} AS text) AS {column.name}" if column.name in _TEXT else f"m.{column.name}"
    for column in tables.messages.columns
)
_KEYS: Final = {"tenant_id": "text", "recipient_id": "text", "occasion": "text", "label": "text"}
RECIPIENT: Final = ("tenant_id", "id", "name", "zone", "channel", "address", "locale", "attributes")


class MessageSql(Words):
    """The statements for one database, schema and clock."""

    @cached_property
    def recipients(self) -> str:
        return self._table(tables.recipients.name)

    @cached_property
    def occasions(self) -> str:
        return self._table(tables.occasions.name)

    @cached_property
    def messages(self) -> str:
        return self._table(tables.messages.name)

    @cached_property
    def limits(self) -> str:
        return self._table(tables.message_limits.name)

    def _instant(self, milliseconds: str) -> str:
        """An instant that travels as milliseconds since 1970."""
        return f"to_timestamp({milliseconds} / 1000.0)" if self._is_postgres else milliseconds

    def _greatest(self, *parts: str) -> str:
        return f"{'greatest' if self._is_postgres else 'max'}({', '.join(parts)})"

    def _moved(self, instant: str, milliseconds: str) -> str:
        by = f"{milliseconds} * interval '1 millisecond'" if self._is_postgres else milliseconds
        return f"{instant} + {by}"

    @property
    def _skip_locked(self) -> str:
        return "SKIP LOCKED" if self._is_postgres else ""

    @cached_property
    def read_now(self) -> str:
        return f"SELECT {self.now} AS now_at"

    # ---- recipients ---------------------------------------------------------------------------------------------

    @cached_property
    def save_recipients(self) -> str:
        columns = dict.fromkeys(RECIPIENT, "text")
        values = ", ".join(self._json(f"s_{name}") if name == "attributes" else f"s_{name}" for name in RECIPIENT)
        changes = ", ".join(f"{name} = excluded.{name}" for name in RECIPIENT[2:])
        # ORDER BY: two imports of the same people lock them in the same order.
        return f"""\
INSERT INTO {self.recipients} ({", ".join(RECIPIENT)}) SELECT {values} FROM {self._batch(columns)} WHERE true
ORDER BY s_tenant_id, s_id
ON CONFLICT (tenant_id, id) DO UPDATE SET {changes}, updated_at = {self.now}"""

    @cached_property
    def save_occasions(self) -> str:
        columns = {**_KEYS, "on_date": "text", "send_at": "text", "next_period": "text", "next_due": "bigint"}
        plain = list(columns)[:-1]
        return f"""\
INSERT INTO {self.occasions} ({", ".join(columns)})
SELECT {", ".join(f"s_{name}" for name in plain)}, {self._instant("s_next_due")} FROM {self._batch(columns)} WHERE true
ON CONFLICT (tenant_id, recipient_id, occasion, label) DO UPDATE SET
    on_date = excluded.on_date, send_at = excluded.send_at, next_due = excluded.next_due,
    next_period = excluded.next_period"""

    @cached_property
    def remove_occasions(self) -> str:
        return f"""\
DELETE FROM {self.occasions} WHERE (tenant_id, recipient_id, occasion, label) IN (
    SELECT {", ".join(f"s_{name}" for name in _KEYS)} FROM {self._batch(_KEYS)})"""

    @cached_property
    def occasions_of(self) -> str:
        # FOR UPDATE: a planner that is about to use the old date must be done, or come after us.
        lock = "FOR UPDATE OF o" if self._is_postgres else ""
        return f"""\
SELECT o.tenant_id, o.recipient_id, o.occasion, o.label, o.on_date, o.send_at, o.next_due,
    o.next_period, r.zone, r.channel
FROM {self._batch({"tenant_id": "text", "id": "text"})}
JOIN {self.recipients} r ON r.tenant_id = s_tenant_id AND r.id = s_id
JOIN {self.occasions} o ON o.tenant_id = r.tenant_id AND o.recipient_id = r.id
ORDER BY o.tenant_id, o.recipient_id, o.occasion, o.label {lock}"""

    @cached_property
    def remove_recipients(self) -> str:
        return f"""\
DELETE FROM {self.recipients} WHERE (tenant_id, id) IN (
    SELECT s_tenant_id, s_id FROM {self._batch({"tenant_id": "text", "id": "text"})})
RETURNING id"""

    def find_recipients(self, *, by_tenant: bool, by_ids: bool) -> str:
        columns = ", ".join(f"CAST({name} AS text) AS {name}" if name == "attributes" else name for name in RECIPIENT)
        where = "(tenant_id, id) > (:after_tenant, :after_id)"
        if by_tenant:
            where += " AND tenant_id = :tenant_id"
        if by_ids:
            where += f" AND id IN (SELECT s_id FROM {self._batch({'id': 'text'})})"
        return f"SELECT {columns} FROM {self.recipients} WHERE {where} ORDER BY tenant_id, id LIMIT :limit"

    # ---- planning -----------------------------------------------------------------------------------------------

    @cached_property
    def due_occasions(self) -> str:
        # SKIP LOCKED: what another planner plans, or somebody is changing right now, is passed over, not waited for.
        # Only kinds that this program knows: another one may know the others.
        lock = f"FOR UPDATE OF o {self._skip_locked}" if self._is_postgres else ""
        horizon = self._later("CAST(:horizon_ms AS bigint)")
        return f"""\
SELECT o.tenant_id, o.recipient_id, o.occasion, o.label, o.on_date, o.send_at, o.next_due,
    o.next_period, r.zone, r.channel
FROM {self.occasions} o JOIN {self.recipients} r ON r.tenant_id = o.tenant_id AND r.id = o.recipient_id
WHERE o.next_due <= {horizon} AND o.occasion IN (SELECT s_name FROM {self._batch({"name": "text"})})
ORDER BY o.next_due LIMIT :limit {lock}"""

    @cached_property
    def create(self) -> str:
        columns = {
            "id": "uuid",
            **_KEYS,
            "period": "text",
            "number": "int",
            "channel": "text",
            "zone": "text",
            "local_at": "text",
            "late_policy": "text",
            "due_at": "bigint",
            "late_at": "bigint",
        }
        plain = [name for name in columns if name not in ("due_at", "late_at")]
        # A message that was cancelled comes back with its recipient. All others stay as they are: planned is planned,
        # and SENT is sent.
        changed = ("number", "channel", "zone", "local_at", "late_policy", "due_at", "late_at")
        return f"""\
INSERT INTO {self.messages} ({", ".join(plain)}, due_at, late_at)
SELECT {", ".join(f"s_{name}" for name in plain)}, {self._instant("s_due_at")}, {self._instant("s_late_at")}
FROM {self._batch(columns)} WHERE true
ON CONFLICT (id) DO UPDATE SET
    status = 'CREATED', fence = {self.messages}.fence + 1, error_code = NULL, last_error = NULL, attempts = 0,
    {", ".join(f"{name} = excluded.{name}" for name in changed)}
WHERE {self.messages}.status = 'CANCELLED'
RETURNING CAST(id AS text) AS id"""

    @cached_property
    def plan_next(self) -> str:
        keys = " AND ".join(f"{name} = s_{name}" for name in _KEYS)
        return f"""\
UPDATE {self.occasions} SET next_due = {self._instant("s_next_due")}, next_period = s_next_period
FROM {self._batch({**_KEYS, "next_period": "text", "next_due": "bigint"})} WHERE {keys}"""

    @cached_property
    def open_messages(self) -> str:
        # Those that can still be moved. FOR UPDATE: a sender that is about to take one comes first, or sees our change.
        lock = "FOR UPDATE OF m" if self._is_postgres else ""
        return f"""\
SELECT CAST(m.id AS text) AS id, m.tenant_id, m.recipient_id, m.occasion, m.label, m.period, m.zone, m.channel, m.due_at
FROM {self._batch({"tenant_id": "text", "id": "text"})}
JOIN {self.messages} m ON m.tenant_id = s_tenant_id AND m.recipient_id = s_id
WHERE {self._is("CREATED", "QUEUED", of="m.status")} ORDER BY m.id {lock}"""

    @cached_property
    def move(self) -> str:
        # Back to CREATED with another fence: a delivery that is on its way for the old instant finds that it is stale.
        columns = {
            "id": "uuid",
            "number": "int",
            "channel": "text",
            "zone": "text",
            "local_at": "text",
            "due_at": "bigint",
            "late_at": "bigint",
        }
        plain = [name for name in columns if name not in ("id", "due_at", "late_at")]
        return f"""\
UPDATE {self.messages} SET status = 'CREATED', fence = fence + 1, publish_again_at = NULL, updated_at = {self.now},
    {", ".join(f"{name} = s_{name}" for name in plain)}, due_at = {self._instant("s_due_at")},
    late_at = {self._instant("s_late_at")}
FROM {self._batch(columns)} WHERE id = s_id AND {self._is("CREATED", "QUEUED")}"""

    @cached_property
    def cancel(self) -> str:
        return f"""\
UPDATE {self.messages} SET status = 'CANCELLED', fence = fence + 1, publish_again_at = NULL, error_code = s_code,
    updated_at = {self.now}
FROM {self._batch({"id": "uuid", "code": "text"})} WHERE id = s_id AND {self._is("CREATED", "QUEUED")}
RETURNING CAST(id AS text) AS id"""

    # ---- publishing ---------------------------------------------------------------------------------------------

    @cached_property
    def give_up_late(self) -> str:
        # `due_at <= now` is implied, and lets the partial index of CREATED rows be used.
        return f"""\
UPDATE {self.messages} SET status = CASE WHEN late_policy = 'skip' THEN 'SKIPPED' ELSE 'EXPIRED' END,
    fence = fence + 1, error_code = 'LATE', updated_at = {self.now}
WHERE status = 'CREATED' AND due_at <= {self.now} AND late_at <= {self.now}
RETURNING status, occasion, channel"""

    def _claim(self, which: str, order: str) -> str:
        # QUEUED is a lease: if no confirm is noted before it ends, the row is published again.
        lock = f"FOR UPDATE {self._skip_locked}" if self._is_postgres else ""
        return f"""\
UPDATE {self.messages} SET
    status = CASE WHEN status = 'CREATED' THEN 'QUEUED' ELSE status END,
    publication = publication + 1, publish_again_at = {self._later("CAST(:lease_ms AS bigint)")},
    updated_at = {self.now}
FROM (
    SELECT id AS s_id FROM {self.messages} WHERE {which} ORDER BY {order} LIMIT :limit {lock}
) AS s
WHERE id = s_id
RETURNING CAST(id AS text) AS id, tenant_id, occasion, due_at, publication, {self.now} AS now_at"""

    @cached_property
    def claim_due(self) -> str:
        # No lower bound: what was missed while no scheduler ran is due all the more.
        return self._claim(f"status = 'CREATED' AND due_at <= {self._later('CAST(:ahead_ms AS bigint)')}", "due_at")

    @cached_property
    def claim_again(self) -> str:
        return self._claim(f"status IN ('QUEUED', 'SENDING') AND publish_again_at <= {self.now}", "publish_again_at")

    @cached_property
    def confirm(self) -> str:
        # From now on the broker has it. Should it lose it all the same, the row comes round again much later. One that
        # the broker holds back comes round soon after its instant, once: after an outage a broker may let the rest of a
        # delay run in full.
        lost = self._later("CAST(:lost_after_ms AS bigint)")
        late = self._moved("due_at", "CAST(:late_after_ms AS bigint)")
        return f"""\
UPDATE {self.messages} SET published_at = {self.now},
    publish_again_at = CASE WHEN due_at > {self.now} THEN {late} ELSE {lost} END
FROM {self._batch({"id": "uuid", "publication": "int"})}
WHERE id = s_id AND publication = s_publication AND {self._is("QUEUED", "SENDING")}"""

    @cached_property
    def unclaim(self) -> str:
        # Refused by the broker: it stays here, and the next run tries again.
        return f"""\
UPDATE {self.messages} SET status = 'CREATED', publish_again_at = NULL, last_error = s_error, updated_at = {self.now}
FROM {self._batch({"id": "uuid", "publication": "int", "error": "text"})}
WHERE id = s_id AND publication = s_publication AND {self._is("QUEUED")}"""

    # ---- sending ------------------------------------------------------------------------------------------------

    def _select(self, source: str, where: str) -> str:
        recipient = ", ".join(
            f"CAST(r.{name} AS text) AS r_{name}" if name == "attributes" else f"r.{name} AS r_{name}"
            for name in RECIPIENT
        )
        return f"""\
SELECT {COLUMNS}, {self.now} AS now_at, {recipient}
FROM {source} LEFT JOIN {self.recipients} r ON r.tenant_id = m.tenant_id AND r.id = m.recipient_id {where}"""

    @cached_property
    def look(self) -> str:
        return self._select(f"{self._batch({'id': 'uuid'})} JOIN {self.messages} m ON m.id = s_id", "")

    def find(self, where: str) -> str:
        return self._select(f"{self.messages} m", f"WHERE {where} ORDER BY m.due_at, m.id LIMIT :limit")

    @property
    def behind(self) -> str:
        """Messages that come behind one, in the order of `find`."""
        uuid = "CAST(:after_id AS uuid)" if self._is_postgres else ":after_id"
        return f"(m.due_at, m.id) > ({self._instant('CAST(:after_ms AS bigint)')}, {uuid})"

    @cached_property
    def hours(self) -> str:
        return self._hours("")

    @cached_property
    def hours_of_tenant(self) -> str:
        return self._hours("AND tenant_id = :tenant_id ")

    def _hours(self, more: str) -> str:
        # The first condition is that of an index: rows that were sent cost nothing.
        until = self._later("CAST(:within_ms AS bigint)")
        return f"""\
SELECT substr(local_at, 1, 13) AS local_hour, zone, count(*) AS number, min(due_at) AS first_due
FROM {self.messages} WHERE status <> 'SENT' AND status IN ('CREATED', 'QUEUED') AND due_at <= {until} {more}
GROUP BY 1, 2 ORDER BY 1, 2"""

    @cached_property
    def take(self) -> str:
        # Compare and set: of all who saw this row in this state, one gets it. Its fence is what settling must show.
        return f"""\
UPDATE {self.messages} SET status = 'SENDING', fence = fence + 1, attempts = attempts + 1, locked_by = s_worker,
    locked_until = {self._later("CAST(:lease_ms AS bigint)")},
    publish_again_at = {self._later("CAST(:again_ms AS bigint)")}, updated_at = {self.now}
FROM {self._batch({"id": "uuid", "fence": "int", "worker": "text"})}
WHERE id = s_id AND fence = s_fence AND {self._is("QUEUED", "SENDING", "FAILED")} AND due_at <= {self.now}
RETURNING CAST(id AS text) AS id"""

    @cached_property
    def settle(self) -> str:
        # Guarded by the fence: who lost the row to another sender changes nothing.
        columns = {
            "id": "uuid",
            "fence": "int",
            "status": "text",
            "response": "text",
            "error": "text",
            "code": "text",
            "again_ms": "bigint",
        }
        return f"""\
UPDATE {self.messages} SET status = s_status, response = coalesce({self._json("s_response")}, response),
    last_error = s_error, error_code = s_code, locked_by = NULL, locked_until = NULL,
    publish_again_at = CASE WHEN s_status = 'QUEUED' THEN {self._later("s_again_ms")} END,
    sent_at = CASE WHEN s_status = 'SENT' THEN {self.now} ELSE sent_at END, updated_at = {self.now}
FROM {self._batch(columns)}
WHERE id = s_id AND fence = s_fence AND {self._is("SENDING")}
RETURNING CAST(id AS text) AS id"""

    @cached_property
    def settle_untaken(self) -> str:
        # What is decided without sending: too late, or nobody knows whether it was sent.
        return f"""\
UPDATE {self.messages} SET status = s_status, fence = fence + 1, last_error = s_error, error_code = s_code,
    locked_by = NULL, locked_until = NULL, publish_again_at = NULL, updated_at = {self.now}
FROM {self._batch({"id": "uuid", "fence": "int", "status": "text", "error": "text", "code": "text"})}
WHERE id = s_id AND fence = s_fence AND {self._is("QUEUED", "SENDING", "FAILED")}
RETURNING CAST(id AS text) AS id"""

    @cached_property
    def open_limit(self) -> str:
        return f"""\
INSERT INTO {self.limits} (channel, free_at) SELECT s_channel, {self.now} FROM {self._batch({"channel": "text"})}
WHERE true ON CONFLICT DO NOTHING"""

    @cached_property
    def reserve(self) -> str:
        # The next free slots belong to whoever moves the mark over them; a mark in the past starts at now.
        started = self._greatest("free_at", self.now)
        return f"""\
UPDATE {self.limits} SET free_at = {self._moved(started, "CAST(:take_ms AS bigint)")}
WHERE channel = :channel AND free_at <= {self._later("CAST(:most_ms AS bigint)")}
RETURNING free_at, {self.now} AS now_at"""

    @cached_property
    def read_limit(self) -> str:
        return f"SELECT free_at, {self.now} AS now_at FROM {self.limits} WHERE channel = :channel"

    # ---- looking after ------------------------------------------------------------------------------------------

    @cached_property
    def retry(self) -> str:
        # By hand: due is due, so its lateness is forgiven.
        return f"""\
UPDATE {self.messages} SET status = 'CREATED', fence = fence + 1, attempts = 0, late_at = NULL, late_policy = 'send',
    publish_again_at = NULL, locked_by = NULL, locked_until = NULL, updated_at = {self.now}
FROM {self._batch({"id": "uuid"})}
WHERE id = s_id AND {self._is("FAILED", "PARKED", "SKIPPED", "EXPIRED")}
RETURNING CAST(id AS text) AS id, tenant_id, occasion"""

    @cached_property
    def resolve(self) -> str:
        return f"""\
UPDATE {self.messages} SET status = 'SENT', fence = fence + 1, sent_at = {self.now}, locked_by = NULL,
    locked_until = NULL, publish_again_at = NULL, updated_at = {self.now}
FROM {self._batch({"id": "uuid"})}
WHERE id = s_id AND {self._is("PARKED")}
RETURNING CAST(id AS text) AS id, tenant_id, occasion"""

    @cached_property
    def counts(self) -> str:
        return f"""\
SELECT occasion, status, count(*) AS number, min(due_at) AS oldest FROM {self.messages} GROUP BY occasion, status
ORDER BY occasion, status"""

    @cached_property
    def oldest_waiting(self) -> str:
        # Two probes of partial indexes: what the scheduler has not found, and what no sender has done. The second is
        # written as a range of (status, due_at): with `status = 'QUEUED'` PostgreSQL may choose the index of what is
        # published again instead, and walk over all that the broker has, while its statistics know nothing of them.
        return f"""\
SELECT (SELECT min(due_at) FROM {self.messages} WHERE status = 'CREATED' AND due_at <= {self.now}) AS unqueued,
    (SELECT due_at FROM {self.messages} WHERE status <> 'SENT' AND status >= 'QUEUED'
        AND (status, due_at) <= ('QUEUED', {self.now}) ORDER BY status, due_at LIMIT 1) AS unsent,
    {self.now} AS now_at"""
