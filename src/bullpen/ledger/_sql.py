"""The statements of the outbox, with the reason above each. One text for both databases where they agree.

Elsewhere: how batches travel and where the databases differ (`_words`), running the statements (`outbox`, `enqueue`),
the tables (`tables`).
"""

from __future__ import annotations

from functools import cached_property
from typing import Final

from bullpen.ledger import tables
from bullpen.ledger._words import Words

_TEXT_COLUMNS: Final = frozenset({"id", "payload", "headers", "backoff"})

COLUMNS: Final = ", ".join(
    f"CAST({column.name} AS text) AS {column.name}" if column.name in _TEXT_COLUMNS else column.name
    for column in tables.outbox.columns
)
"""All columns of a row, in the table's order. jsonb and uuid as text: our own reader is faster than the driver's."""

_WITHOUT_CONTENT: Final = COLUMNS.replace("CAST(payload AS text)", "''").replace("CAST(headers AS text)", "NULL")
LINE: Final = "line"
"""What a commit tells that ended a row with an ordering key and took no other one along."""
_OPEN: Final = "('PENDING', 'FAILED')"
_UNFINISHED: Final = "('PENDING', 'FAILED', 'CLAIMED')"
_CLAIMABLE: Final = f"status IN {_OPEN} AND NOT parked"

_ITEM: Final = {
    "n": "int",
    "source_stream_id": "text",
    "source_event_id": "text",
    "route_key": "text",
    "integration_type": "text",
    "event_type": "text",
    "payload": "text",
    "headers": "text",
    "tenant_id": "text",
    "user_id": "text",
    "correlation_id": "text",
    "ordering_key": "text",
    "backoff": "text",
    "due_ms": "bigint",
    "delay_ms": "bigint",
    "max_attempts": "int",
}

_OUTCOME: Final = {
    "id": "uuid",
    "fence": "int",
    "kind": "text",
    "counted": "int",
    "error": "text",
    "code": "text",
    "delay_ms": "bigint",
    "worker": "text",
    "receipt": "text",
    "started_ms": "bigint",
    "next_ms": "bigint",
}
_RUN: Final = {"head": "uuid", "head_fence": "int", "run": "int"}


def _few(most: int) -> int:
    """A LIMIT that cuts nothing but tells the planner how few rows there are: its own guess from a long backlog is so
    high that it would read the whole table to join them, two seconds with a million rows. Powers of two: few different
    statements."""
    return 1 << max(0, most - 1).bit_length()


class Sql(Words):
    """The statements of the outbox."""

    @cached_property
    def outbox(self) -> str:
        return self._table(tables.outbox.name)

    @cached_property
    def attempts(self) -> str:
        return self._table(tables.attempts.name)

    @cached_property
    def fences(self) -> str:
        return self._table(tables.fences.name)

    @cached_property
    def audit(self) -> str:
        return self._table(tables.audit.name)

    @property
    def channel(self) -> str:
        """Where a commit with new rows is told on PostgreSQL."""
        return f"{self.schema}_outbox"

    # ---- storing ------------------------------------------------------------------------------------------------

    def enqueue(self, *, notify: bool) -> str:
        # An event that retention has removed is still known by its fence. ORDER BY: `seq` follows the caller's order.
        # DO NOTHING names the fence's index, so that any other conflict is an error and not a "duplicate".
        due = "to_timestamp(s_due_ms / 1000.0)" if self._is_postgres else "s_due_ms"
        insert = f"""\
INSERT INTO {self.outbox} (source_stream_id, source_event_id, route_key, integration_type, event_type, payload, headers,
    tenant_id, user_id, correlation_id, ordering_key, backoff, due_at, max_attempts)
SELECT s_source_stream_id, s_source_event_id, s_route_key, s_integration_type, s_event_type, {self._json("s_payload")},
    {self._json("s_headers")}, s_tenant_id, s_user_id, s_correlation_id, s_ordering_key, {self._json("s_backoff")},
    coalesce({due}, {self._later("s_delay_ms")}), s_max_attempts
FROM {self._batch(_ITEM)}
WHERE NOT EXISTS (
    SELECT 1 FROM {self.fences} f
    WHERE f.source_stream_id = s_source_stream_id AND f.source_event_id = s_source_event_id
    AND f.route_key = s_route_key
)
ORDER BY s_n
ON CONFLICT (source_stream_id, source_event_id, route_key) DO NOTHING
RETURNING CAST(id AS text) AS id, source_stream_id, source_event_id, route_key"""
        if not (notify and self._is_postgres):
            return insert
        # One notification per statement, and PostgreSQL folds equal ones of a transaction into one.
        return f"WITH added AS ({insert})\nSELECT added.*, (SELECT pg_notify('{self.channel}', '')) FROM added"

    @cached_property
    def existing(self) -> str:
        source = {name: _ITEM[name] for name in ("source_stream_id", "source_event_id", "route_key")}
        names = ", ".join(f"s_{name}" for name in source)

        def join(table: str, alias: str) -> str:
            return f"LEFT JOIN {table} {alias} ON " + " AND ".join(f"{alias}.{name} = s_{name}" for name in source)

        return f"""\
SELECT CAST(o.id AS text) AS id, {names}, coalesce(o.tenant_id, f.tenant_id) AS tenant_id
FROM {self._batch(source)} {join(self.outbox, "o")} {join(self.fences, "f")}
WHERE o.id IS NOT NULL OR f.route_key IS NOT NULL"""

    # ---- claiming -----------------------------------------------------------------------------------------------

    def _by(self, index: str, alias: str = "") -> str:
        """The outbox, read through one index. SQLite keeps no statistics and would walk the whole backlog by status,
        at every look; PostgreSQL knows better than we do."""
        table = f"{self.outbox} {alias}".rstrip()
        return table if self._is_postgres else f"{table} INDEXED BY {index}"

    @cached_property
    def notify(self) -> str:
        """Tell dispatchers to look: what a settlement has made ready, or due at a time that nobody knows yet."""
        return f"SELECT {self._notified()}"

    def _notified(self, payload: str = "") -> str:
        return f"pg_notify('{self.channel}', '{payload}')"

    @cached_property
    def next_due_ms(self) -> str:
        rows = f"FROM {self._by('ix_outbox_lane_due')} WHERE {_CLAIMABLE}"
        first = f"min((SELECT min(due_at) {rows} AND integration_type = t))"
        left = f"{first} - {self.now}"
        if self._is_postgres:
            # Within a day either way: infinity, which another program may have written, has no distance from now.
            day, now = "interval '1 day'", self.now
            left = f"extract(epoch FROM least(greatest({first}, {now} - {day}), {now} + {day}) - {now}) * 1000"
        return f"""\
WITH RECURSIVE lane(t) AS (
    SELECT min(integration_type) {rows}
    UNION ALL
    SELECT (SELECT min(integration_type) {rows} AND integration_type > t) FROM lane WHERE t IS NOT NULL
)
SELECT {left} FROM lane WHERE t IS NOT NULL"""

    @cached_property
    def due_types(self) -> str:
        # A loose index scan: two probes per type, however many rows each has. Types whose rows all wait for a later
        # time are left out: they would take their share of the batch from those that have work. min() and not EXISTS,
        # of which PostgreSQL makes a join that reads the whole backlog.
        types = f"SELECT min(integration_type) FROM {self._by('ix_outbox_lane_due')} WHERE {_CLAIMABLE}"
        return f"""\
WITH RECURSIVE lane(t) AS (
    {types}
    UNION ALL
    SELECT ({types} AND integration_type > t) FROM lane WHERE t IS NOT NULL
)
SELECT t FROM lane WHERE t IS NOT NULL AND (SELECT min(due_at) FROM {self._by("ix_outbox_lane_due")}
    WHERE {_CLAIMABLE} AND integration_type = t) <= {self.now}"""

    @cached_property
    def due_tenants(self) -> str:
        tenant = "coalesce(tenant_id, '')"
        of_type = (
            f"FROM {self._by('ix_outbox_tenant_due')} WHERE {_CLAIMABLE} AND integration_type = :integration_type "
            f"AND {tenant}"
        )
        rows, due = f"SELECT min({tenant}) {of_type}", f"SELECT min(due_at) {of_type} = t"
        return f"""\
WITH RECURSIVE lane(t) AS (
    {rows} >= :after
    UNION ALL
    SELECT ({rows} > t) FROM lane WHERE t IS NOT NULL
)
SELECT t FROM lane WHERE t IS NOT NULL AND ({due}) <= {self.now} LIMIT :most"""

    def _due(self, where: str, limit: str, *, order: str = "due_at, seq", index: str | None = None) -> str:
        """Rows to claim. `s_blocked`: another row of the same ordering key comes first or is in flight.

        SKIP LOCKED: a row that another dispatcher holds is passed over, not waited for. SQLite has one writer only.
        Two EXISTS and not one with OR: each is a single probe of its own index.
        """
        lock = "FOR UPDATE OF o SKIP LOCKED" if self._is_postgres else ""
        source = f"{self.outbox} o" if index is None else self._by(index, "o")
        same_key = "e.integration_type = o.integration_type AND e.ordering_key = o.ordering_key"
        return f"""\
SELECT o.id AS s_id, o.ordering_key IS NOT NULL AND (
    EXISTS (SELECT 1 FROM {self.outbox} e WHERE {same_key} AND e.status IN {_UNFINISHED} AND e.seq < o.seq)
    OR EXISTS (SELECT 1 FROM {self.outbox} e WHERE {same_key} AND e.status = 'CLAIMED')
) AS s_blocked
FROM {source}
WHERE o.status IN {_OPEN} AND NOT o.parked AND o.due_at <= {self.now} {where}
ORDER BY {", ".join(f"o.{column}" for column in order.split(", "))} LIMIT {limit} {lock}"""

    def _claim(self, due: str) -> str:
        # A blocked row is parked: it leaves the index that claims read, so a long line behind one key is walked once.
        # `s_starting` marks rows whose delivery begins with the claim; only their lost claims count as attempts.
        return f"""\
UPDATE {self.outbox} SET
    status = CASE WHEN s_blocked THEN status ELSE 'CLAIMED' END,
    parked = s_blocked,
    fence = fence + 1,
    locked_at = {self.now},
    locked_by = CASE WHEN s_blocked THEN NULL ELSE :worker_id END,
    locked_until = {self._later("CAST(:lease_ms AS bigint)")},
    started_at = CASE WHEN s_blocked OR :starting = 0 THEN NULL ELSE {self.now} END
FROM {due}
WHERE id = s_id
RETURNING {COLUMNS}"""

    @cached_property
    def claim_oldest(self) -> str:
        return self._claim(f"({self._due('', 'CAST(:quota AS int)')}) AS s")

    def _due_in_lane(self, type_name: str, tenant: str | None, quota: str) -> str:
        """Rows to claim of one lane. A tenant's come by `due_at` alone, which is what the tenants' index has."""
        where = f"AND o.integration_type = {type_name}"
        if tenant is None:
            return self._due(where, quota, index="ix_outbox_lane_due")
        where += f" AND coalesce(o.tenant_id, '') = {tenant}"
        return self._due(where, quota, order="due_at", index="ix_outbox_tenant_due")

    def claim_lanes(self, *, by_tenant: bool, most: int = 128) -> str:
        """PostgreSQL: all lanes in one statement. `most` is at least the sum of their quotas."""
        lanes = self._batch({"type": "text", "tenant": "text", "quota": "int"}, "lane")
        due = self._due_in_lane("lane.s_type", "lane.s_tenant" if by_tenant else None, "lane.s_quota")
        # MATERIALIZED: the rows are chosen and locked once, before the update looks at any.
        return (
            f"WITH due AS MATERIALIZED (SELECT d.* FROM {lanes} CROSS JOIN LATERAL ({due}) d LIMIT {_few(most)})\n"
            + self._claim("due")
        )

    def claim_lane(self, *, by_tenant: bool) -> str:
        """SQLite: one lane."""
        return self._claim(f"({self._due_in_lane(':type', ':tenant' if by_tenant else None, ':quota')}) AS s")

    def begin(self, *, content: bool) -> str:
        """Without `content` payload and headers stay where they are: they never change, and the caller has them."""
        # `started_at IS NULL`: a row that somebody delivers right now, or died delivering, is the reaper's business.
        # A row that came back because its job waited longer than its lease is begun too, by that job: otherwise, behind
        # a long queue, every claim would run out before its turn and nothing would ever be delivered. Only after a
        # claim (fence), and not where an order must be kept: there the next claim decides.
        return f"""\
UPDATE {self.outbox} SET status = 'CLAIMED', fence = fence + 1, started_at = {self.now}, locked_at = {self.now},
    locked_by = :worker_id, locked_until = {self._later("CAST(:lease_ms AS bigint)")}
FROM {self._batch({"id": "uuid"})}
WHERE id = s_id AND ((status = 'CLAIMED' AND started_at IS NULL) OR (status IN {_OPEN} AND fence > 0
    AND ordering_key IS NULL AND NOT parked AND due_at <= {self.now}))
RETURNING {COLUMNS if content else _WITHOUT_CONTENT}"""

    @cached_property
    def extend(self) -> str:
        return f"""\
UPDATE {self.outbox} SET locked_until = {self._later("CAST(:lease_ms AS bigint)")}
FROM {self._batch({"id": "uuid", "fence": "int"})}
WHERE id = s_id AND fence = s_fence AND status = 'CLAIMED' AND started_at IS NULL"""

    @cached_property
    def statuses(self) -> str:
        return (
            f"SELECT CAST(id AS text) AS id, status FROM {self.outbox} JOIN {self._batch({'id': 'uuid'})} ON id = s_id"
        )

    @cached_property
    def expired(self) -> str:
        # SKIP LOCKED: a row that somebody is writing just now has a holder. Waiting for one whose machine is gone would
        # keep the reaper from all others.
        lock = "FOR UPDATE SKIP LOCKED" if self._is_postgres else ""
        return (
            f"SELECT {COLUMNS} FROM {self.outbox} WHERE status = 'CLAIMED' AND locked_until < {self.now} "
            f"ORDER BY locked_until LIMIT :limit {lock}"
        )

    # ---- settling -----------------------------------------------------------------------------------------------

    def settle(self, *, notify: bool = False, take_next: bool = False, runs: int = 0) -> str:
        """Write outcomes. On PostgreSQL also the attempts and, if asked, the claims of what comes next under the same
        ordering keys: one round trip, one transaction. On SQLite those are statements of their own."""
        # One guarded UPDATE: the count grows from what is stored, the row's own maximum decides, and a claim that no
        # longer holds (another fence, or no longer CLAIMED) changes nothing. SENT and DEAD are never overwritten.
        # What an outcome does not have is left out of its record: most of them are short.
        # `runs`, the number of records: rows that left under the claim of another one are written if that claim holds.
        batch, held, advanced = self._batch(_OUTCOME), "status = 'CLAIMED'", ""
        if runs:
            batch = f"(SELECT * FROM {self._batch({**_OUTCOME, **_RUN}, 'r')} LIMIT {_few(runs)}) AS s"
            advanced = "fence = fence + CASE WHEN s_head IS NULL THEN 0 ELSE 1 END, parked = false,"
            held = f"""CASE WHEN s_head IS NULL THEN {self._is("CLAIMED")}
    ELSE {self._is("PENDING", "FAILED")} AND EXISTS (SELECT 1 FROM {self.outbox} h
        WHERE h.id = s_head AND h.fence = s_head_fence AND {self._is("CLAIMED", of="h.status")}) END"""
        counted = "coalesce(s_counted, 0)"
        dies = "s_kind = 'DEAD' OR (s_kind = 'FAILED' AND attempts + 1 >= max_attempts)"
        update = f"""\
UPDATE {self.outbox} SET
    attempts = attempts + {counted}, {advanced}
    status = CASE
        WHEN s_kind = 'SENT' THEN 'SENT'
        WHEN {dies} THEN 'DEAD'
        WHEN s_kind = 'RELEASED' AND attempts = 0 THEN 'PENDING'
        ELSE 'FAILED' END,
    due_at = CASE WHEN s_kind IN ('FAILED', 'RELEASED') THEN {self._later("s_delay_ms")} ELSE due_at END,
    sent_at = CASE WHEN s_kind = 'SENT' THEN {self.now} ELSE sent_at END,
    dead_at = CASE WHEN {dies} THEN {self.now} ELSE dead_at END,
    last_error = coalesce(s_error, last_error),
    error_code = coalesce(s_code, error_code),
    locked_at = NULL, locked_by = NULL, locked_until = NULL, started_at = NULL
FROM {batch}
WHERE id = s_id AND fence = s_fence AND {held}
RETURNING CAST(id AS text) AS id, status, attempts, integration_type, ordering_key"""
        if not self._is_postgres:
            return update
        # A row that another transaction stores and parks in this very moment is seen by nobody here. It is woken after
        # the commit; should this process die in between, dispatchers look for it, because the commit itself tells them.
        left = "d.ordering_key IS NOT NULL AND d.status IN ('SENT', 'DEAD')" + (
            " AND n.id IS NULL" if take_next else ""
        )
        told = f"WHEN d.status IN {_OPEN} THEN {self._notified()} WHEN {left} THEN {self._notified(LINE)}"
        ended = f"d.id, d.status, d.attempts, CASE {told if notify else 'WHEN true THEN NULL'} END"
        statement = f"""\
WITH done AS ({update}, id AS row_id, fence, tenant_id, s_kind, {counted} AS s_counted, s_error, s_code, s_worker,
    s_receipt, s_started_ms, s_next_ms, {"s_run" if runs else "1"} AS s_run),
logged AS (
    INSERT INTO {self.attempts} (outbox_id, number, fence, worker, outcome, error_code, error, tenant_id, receipt,
        started_at, finished_at)
    SELECT row_id, attempts + 1 - s_counted, fence, s_worker, status, s_code, s_error, tenant_id, s_receipt,
        to_timestamp(s_started_ms / 1000.0), {self.now}
    FROM done WHERE s_kind <> 'RELEASED'
)"""
        if not take_next:
            return f"{statement}\nSELECT {ended} FROM done d"
        # This statement still sees the row before it as CLAIMED, hence the comparison of ids; the index of rows in
        # flight does not, because `next` can only be computed from a row that `done` has changed already.
        return f"""\
{statement},
next AS ({self._take_next("done d", *self._behind(runs))})
SELECT {ended}, n.* FROM done d
LEFT JOIN next n ON n.integration_type = d.integration_type AND n.ordering_key = d.ordering_key"""

    @staticmethod
    def _behind(runs: int) -> tuple[str, str]:
        """What is not next, because it is being settled; and that all of a run were written."""
        if not runs:
            return "n.id <> d.row_id", "true"
        line = "x.integration_type = d.integration_type AND x.ordering_key = d.ordering_key AND x.status = 'SENT'"
        return (
            "NOT EXISTS (SELECT 1 FROM done x WHERE x.row_id = n.id)",
            f"(s_run IS NULL OR s_run = (SELECT count(*) FROM done x WHERE {line}))",
        )

    def _first_of_line(self, type_name: str, key: str, more: str = "true") -> str:
        # Not `ordering_key = …`: a key that most rows have makes the server think that the first row of all, by the
        # index of `seq`, will do, and it walks over everything that was ever sent.
        return f"""\
SELECT n.id FROM {self.outbox} n WHERE n.integration_type = {type_name} AND n.ordering_key >= {key}
        AND n.ordering_key <= {key} AND n.status IN {_UNFINISHED} AND {more}
        ORDER BY n.ordering_key, n.seq LIMIT 1"""

    def _take_next(self, source: str, other: str, ended: str = "true") -> str:
        # A tenant with limits has its rows claimed one by one: a claim counts them.
        return f"""\
UPDATE {self.outbox} SET status = 'CLAIMED', parked = false, fence = fence + 1, locked_at = {self.now},
    locked_by = s_by, locked_until = {self._later("s_for_ms")}, started_at = {self.now}
FROM (
    SELECT s_worker AS s_by, s_next_ms AS s_for_ms, (
        {self._first_of_line("d.integration_type", "d.ordering_key", other)}
    ) AS s_next_id
    FROM {source} WHERE d.ordering_key IS NOT NULL AND d.status IN ('SENT', 'DEAD') AND s_next_ms > 0 AND {ended}
) AS w
WHERE id = s_next_id AND status IN {_OPEN} AND due_at <= {self.now} AND NOT EXISTS (
    SELECT 1 FROM {self.limits} l WHERE l.tenant_id = coalesce({tables.outbox.name}.tenant_id, '')
)
RETURNING {COLUMNS}"""

    @cached_property
    def take_next(self) -> str:
        """SQLite: claim what comes next under the ordering keys of rows that have just ended."""
        ended = self._batch({"id": "text", "worker": "text", "next_ms": "bigint"})
        return self._take_next(f"{ended} JOIN {self.outbox} d ON d.id = s_id", "n.id <> d.id")

    @cached_property
    def followers(self) -> str:
        return f"""\
SELECT {COLUMNS} FROM {self.outbox} WHERE integration_type = :type AND ordering_key >= :key AND ordering_key <= :key
    AND status IN {_UNFINISHED} AND seq > :seq
ORDER BY ordering_key, seq LIMIT :most"""

    @cached_property
    def log_attempts(self) -> str:
        columns = {
            "outbox_id": "uuid",
            "number": "int",
            "fence": "int",
            "worker": "text",
            "outcome": "text",
            "error_code": "text",
            "error": "text",
            "tenant_id": "text",
            "receipt": "text",
            "started_ms": "bigint",
        }
        plain = [name for name in columns if name != "started_ms"]
        started = "to_timestamp(s_started_ms / 1000.0)" if self._is_postgres else "s_started_ms"
        return f"""\
INSERT INTO {self.attempts} ({", ".join(plain)}, started_at, finished_at)
SELECT {", ".join(f"s_{name}" for name in plain)}, {started}, {self.now} FROM {self._batch(columns)}"""

    def unpark_next(self, *, most: int) -> str:
        # The first of the line goes on. Also when it is not parked: a claim that holds it and is about to park it,
        # because it saw the world before our commit, makes us wait here, and then we have the last word.
        return f"""\
UPDATE {self.outbox} SET parked = false FROM (
    SELECT ({self._first_of_line("s_type", "s_key")}) AS s_first
    FROM {self._batch({"type": "text", "key": "text"})} LIMIT {_few(most)}
) AS w
WHERE id = s_first AND status IN {_OPEN}"""

    @cached_property
    def unpark_orphans(self) -> str:
        # A row can be parked by a claim that saw its predecessor alive when that had just ended: nobody would wake it.
        return f"""\
UPDATE {self.outbox} SET parked = false WHERE parked AND id IN (
    SELECT ({self._first_of_line("p.integration_type", "p.ordering_key")})
    FROM (SELECT DISTINCT integration_type, ordering_key FROM {self.outbox} WHERE parked) p
)"""

    # ---- destinations -------------------------------------------------------------------------------------------

    @cached_property
    def destinations(self) -> str:
        return self._table(tables.destinations.name)

    @cached_property
    def troubled(self) -> str:
        # The database compares with its own clock, and says how long it will take by the same.
        left = f"broken_until - {self.now}"
        if self._is_postgres:
            left = f"extract(epoch FROM {left}) * 1000"
        return f"""\
SELECT integration_type, disabled_at, disabled_by, reason, trips, CAST(coalesce({left}, 0) AS bigint)
FROM {self.destinations} WHERE disabled_at IS NOT NULL OR trips > 0
UNION ALL
SELECT '{tables.ENDPOINT}:' || e.id, e.state_at, e.state_by, e.reason, 0, 0 FROM {self.endpoints} e
WHERE e.state <> 'enabled' AND EXISTS (SELECT 1 FROM {self.outbox} o
    WHERE o.integration_type = '{tables.ENDPOINT}:' || e.id AND o.status IN {_OPEN} AND NOT o.parked)
ORDER BY 1"""

    @cached_property
    def endpoints(self) -> str:
        return self._table(tables.endpoints.name)

    @cached_property
    def endpoints_of(self) -> str:
        # Inside a caller's transaction, by any driver.
        return f"""\
SELECT id, events FROM {self.endpoints}
WHERE state <> 'disabled' AND tenant_id IN (SELECT s_tenant FROM {self._batch({"tenant": "text"})})
ORDER BY created_at, id"""

    @cached_property
    def take_endpoint_slot(self) -> str:
        # The row's own lock makes it exact over all processes. Who waited for it began before the one that it waited
        # for, so an instant a little ahead is in order; one far ahead was written before a clock was set back.
        is_over = f"spent_since <= {self._earlier('rate_ms')} OR spent_since > {self._later('60000')}"
        is_new = f"(spent_since IS NULL OR {is_over})"
        return f"""\
UPDATE {self.endpoints} SET spent = CASE WHEN {is_new} THEN 1 ELSE spent + 1 END,
    spent_since = CASE WHEN {is_new} THEN {self.now} ELSE spent_since END
WHERE id = :id AND (rate_max IS NULL OR {is_new} OR spent < rate_max)"""

    @cached_property
    def endpoint_slot_left(self) -> str:
        left = f"spent_since - ({self._earlier('rate_ms')})"
        if self._is_postgres:
            left = f"extract(epoch FROM {left}) * 1000"
        return f"SELECT CAST({left} AS bigint) FROM {self.endpoints} WHERE id = :id AND rate_max IS NOT NULL"

    @cached_property
    def disable(self) -> str:
        return f"""\
INSERT INTO {self.destinations} (integration_type, disabled_at, disabled_by, reason, updated_at)
VALUES (:integration_type, {self.now}, :actor, :reason, {self.now})
ON CONFLICT (integration_type) DO UPDATE SET disabled_at = excluded.disabled_at, disabled_by = excluded.disabled_by,
    reason = excluded.reason, updated_at = excluded.updated_at"""

    @cached_property
    def enable(self) -> str:
        # Somebody says that it works: the breaker forgets what it had learnt, too.
        return f"""\
UPDATE {self.destinations} SET disabled_at = NULL, disabled_by = NULL, reason = NULL, broken_until = NULL, trips = 0,
    updated_at = {self.now}
WHERE integration_type = :integration_type AND (disabled_at IS NOT NULL OR trips > 0)"""

    @cached_property
    def trip(self) -> str:
        # WHERE: of several processes that see it fail at the same time one counts. The pause doubles with each trip.
        pause = "least(:longest_ms, :pause_ms * power(2, least({trips}, 20)))"
        if not self._is_postgres:
            pause = "min(:longest_ms, :pause_ms * (1 << min({trips}, 20)))"
        first = self._later("CAST(" + pause.format(trips="0") + " AS bigint)")
        again = self._later("CAST(" + pause.format(trips="d.trips") + " AS bigint)")
        return f"""\
INSERT INTO {self.destinations} AS d (integration_type, broken_until, trips, updated_at)
VALUES (:integration_type, {first}, 1, {self.now})
ON CONFLICT (integration_type) DO UPDATE SET broken_until = {again}, trips = d.trips + 1, updated_at = {self.now}
WHERE d.broken_until IS NULL OR d.broken_until <= {self.now}
RETURNING trips"""

    @cached_property
    def mend(self) -> str:
        return f"""\
UPDATE {self.destinations} SET broken_until = NULL, trips = 0, updated_at = {self.now}
WHERE integration_type = :integration_type AND trips > 0"""

    # ---- tenants ------------------------------------------------------------------------------------------------

    @cached_property
    def limits(self) -> str:
        return self._table(tables.tenant_limits.name)

    @cached_property
    def tenant_limits(self) -> str:
        return (
            f"SELECT tenant_id, integration_type, weight, concurrency, rate_max, rate_ms FROM {self.limits} "
            "ORDER BY tenant_id, integration_type"
        )

    @cached_property
    def set_tenant_limit(self) -> str:
        return f"""\
INSERT INTO {self.limits} (tenant_id, integration_type, weight, concurrency, rate_max, rate_ms, updated_at)
VALUES (:tenant_id, :integration_type, :weight, :concurrency, :rate_max, :rate_ms, {self.now})
ON CONFLICT (tenant_id, integration_type) DO UPDATE SET weight = excluded.weight, concurrency = excluded.concurrency,
    rate_max = excluded.rate_max, rate_ms = excluded.rate_ms, updated_at = excluded.updated_at"""

    @cached_property
    def remove_tenant_limit(self) -> str:
        return f"DELETE FROM {self.limits} WHERE tenant_id = :tenant_id AND integration_type = :integration_type"

    @property
    def _rate_is_over(self) -> str:
        # A window in the future was begun before a clock was set back.
        return f"spent_since IS NULL OR spent_since > {self.now} OR {self._later('0')} >= " + (
            "spent_since + rate_ms * interval '1 millisecond'" if self._is_postgres else "spent_since + rate_ms"
        )

    @cached_property
    def lock_tenant_limits(self) -> str:
        # In the order of the key, so that no two claims wait for each other.
        lock = "FOR UPDATE OF l" if self._is_postgres else ""
        return f"""\
SELECT tenant_id, integration_type, concurrency,
    CASE WHEN rate_max IS NULL THEN NULL WHEN {self._rate_is_over} THEN rate_max ELSE rate_max - spent END
FROM {self.limits} l JOIN {self._batch({"tenant": "text", "type": "text"})}
ON tenant_id = s_tenant AND integration_type = s_type
ORDER BY tenant_id, integration_type {lock}"""

    @cached_property
    def tenants_under_way(self) -> str:
        # Rows under way are few, and have an index. What has a limit of its own does not count for `*`.
        return f"""\
SELECT s_tenant, s_type, (
    SELECT count(*) FROM {self.outbox} o WHERE o.status = 'CLAIMED' AND coalesce(o.tenant_id, '') = s_tenant
    AND (o.integration_type = s_type OR (s_type = '*' AND NOT EXISTS (SELECT 1 FROM {self.limits} l
        WHERE l.tenant_id = s_tenant AND l.integration_type = o.integration_type)))
)
FROM {self._batch({"tenant": "text", "type": "text"})}"""

    @cached_property
    def spend_tenant_limits(self) -> str:
        return f"""\
UPDATE {self.limits} SET
    spent = CASE WHEN {self._rate_is_over} THEN s_n ELSE spent + s_n END,
    spent_since = CASE WHEN {self._rate_is_over} THEN {self.now} ELSE spent_since END
FROM {self._batch({"tenant": "text", "type": "text", "n": "int"})}
WHERE tenant_id = s_tenant AND integration_type = s_type AND rate_max IS NOT NULL"""

    # ---- looking after ------------------------------------------------------------------------------------------

    @cached_property
    def redrive(self) -> str:
        return f"""\
UPDATE {self.outbox} SET status = 'PENDING', attempts = 0, parked = false, due_at = {self.now}, dead_at = NULL
FROM {self._batch({"id": "uuid"})}
WHERE id = s_id AND status = 'DEAD'
RETURNING CAST(id AS text) AS id, tenant_id, integration_type, error_code"""

    @cached_property
    def ended(self) -> str:
        return self._rows_in("SENT", "DEAD")

    @cached_property
    def dead(self) -> str:
        return self._rows_in("DEAD")

    def _rows_in(self, *statuses: str) -> str:
        wanted = ", ".join(f"'{status}'" for status in statuses)
        return (
            f"SELECT {COLUMNS} FROM {self.outbox} WHERE status IN ({wanted}) "
            f"AND id IN (SELECT s_id FROM {self._batch({'id': 'uuid'})}) ORDER BY seq"
        )

    @cached_property
    def confirm(self) -> str:
        return f"""\
UPDATE {self.outbox} SET status = 'SENT', sent_at = {self.now}, dead_at = NULL
FROM {self._batch({"id": "uuid"})}
WHERE id = s_id AND status = 'DEAD'
RETURNING CAST(id AS text) AS id, tenant_id, integration_type, error_code"""

    @cached_property
    def bury(self) -> str:
        return f"""\
UPDATE {self.outbox} SET status = 'DEAD', dead_at = {self.now}, attempts = :attempts, last_error = :error,
    error_code = :code
FROM {self._batch({"id": "uuid"})}
WHERE id = s_id AND status = 'PENDING'"""

    @cached_property
    def fence_dead(self) -> str:
        return f"""\
INSERT INTO {self.fences} (source_stream_id, source_event_id, route_key, outbox_id, tenant_id, fenced_at)
SELECT source_stream_id, source_event_id, route_key, id, tenant_id, {self.now}
FROM {self.outbox} JOIN {self._batch({"id": "uuid"})} ON id = s_id
WHERE status = 'DEAD'
ON CONFLICT DO NOTHING"""

    @cached_property
    def delete_dead(self) -> str:
        return f"""\
DELETE FROM {self.outbox} WHERE status = 'DEAD' AND id IN (SELECT s_id FROM {self._batch({"id": "uuid"})})
RETURNING CAST(id AS text) AS id, tenant_id, integration_type, error_code"""

    @cached_property
    def audit_entries(self) -> str:
        # The instant is the database's own word, and so is the login: PostgreSQL writes both by a trigger.
        return f"""\
INSERT INTO {self.audit} (actor, action, subject, tenant_id, detail)
SELECT s_actor, s_action, s_subject, s_tenant_id, {self._json("s_detail")}
FROM {self._batch({"actor": "text", "action": "text", "subject": "text", "tenant_id": "text", "detail": "text"})}"""

    @cached_property
    def receive(self) -> str:
        return f"""\
INSERT INTO {self._table(tables.inbox.name)} (scope, key) SELECT s_scope, s_key
FROM {self._batch({"scope": "text", "key": "text"})} WHERE true
ON CONFLICT DO NOTHING
RETURNING scope"""

    @cached_property
    def unreceive(self) -> str:
        # The policy of the table, or its default, makes it this tenant's key.
        tenant = "coalesce(current_setting('app.current_tenant', true), '')" if self._is_postgres else "''"
        return f"""\
DELETE FROM {self._table(tables.inbox.name)} WHERE tenant_id = {tenant}
AND (scope, key) IN (SELECT s_scope, s_key FROM {self._batch({"scope": "text", "key": "text"})})
RETURNING scope"""

    @cached_property
    def checkpoint(self) -> str:
        return f"""\
INSERT INTO {self._table(tables.checkpoints.name)} (name, position, updated_at)
SELECT s_name, s_position, {self.now} FROM {self._batch({"name": "text", "position": "text"})} WHERE true
ON CONFLICT (name) DO UPDATE SET position = excluded.position, updated_at = excluded.updated_at
RETURNING name"""

    def advance_checkpoint(self, *, first: bool) -> str:
        # A second reader of the same name waits at the row, and then finds that it has moved.
        table = self._table(tables.checkpoints.name)
        if first:
            return f"""\
INSERT INTO {table} (name, position, updated_at) VALUES (:name, :position, {self.now})
ON CONFLICT (name) DO NOTHING
RETURNING name"""
        return f"""\
UPDATE {table} SET position = :position, updated_at = {self.now} WHERE name = :name AND position = :expected
RETURNING name"""

    def take_turn(self) -> str:
        # Of many watchers one looks per interval; when that one dies, another looks an interval later. A turn in the
        # far future was written before a clock was set back; one a moment ahead is of a transaction we waited for.
        table, pause, second = self._table(tables.checkpoints.name), ":every_ms", "1000"
        if self._is_postgres:
            pause, second = f"{pause} * interval '1 millisecond'", "interval '1 second'"
        return f"""\
INSERT INTO {table} AS c (name, position, updated_at) VALUES (:name, '1', {self.now})
ON CONFLICT (name) DO UPDATE SET position = CAST(CAST(c.position AS bigint) + 1 AS text), updated_at = {self.now}
WHERE c.updated_at <= {self.now} - {pause} OR c.updated_at > {self.now} + {pause} + {second}
RETURNING position, {self.now} AS now_at"""

    @cached_property
    def hold_turn(self) -> str:
        # An update that changes nothing: it locks the row, so that two turns never write at the same time.
        table = self._table(tables.checkpoints.name)
        return f"""\
UPDATE {table} SET position = position WHERE name = :name AND position = :position
RETURNING {self.now} AS now_at"""

    @cached_property
    def fence_sent(self) -> str:
        return f"""\
INSERT INTO {self.fences} (source_stream_id, source_event_id, route_key, outbox_id, tenant_id, fenced_at)
SELECT o.source_stream_id, o.source_event_id, o.route_key, o.id, o.tenant_id, {self.now}
FROM {self.outbox} o
WHERE o.status = 'SENT' AND o.sent_at < {self._earlier("CAST(:keep_ms AS bigint)")} AND NOT EXISTS (
    SELECT 1 FROM {self.fences} f WHERE f.source_stream_id = o.source_stream_id
    AND f.source_event_id = o.source_event_id AND f.route_key = o.route_key)
ORDER BY o.sent_at LIMIT :limit
ON CONFLICT DO NOTHING"""

    @cached_property
    def delete_fenced(self) -> str:
        return f"""\
DELETE FROM {self.outbox} WHERE id IN (
    SELECT o.id FROM {self.outbox} o JOIN {self.fences} f ON f.source_stream_id = o.source_stream_id
    AND f.source_event_id = o.source_event_id AND f.route_key = o.route_key
    WHERE o.status = 'SENT' AND o.sent_at < {self._earlier("CAST(:keep_ms AS bigint)")}
    AND f.fenced_at < {self._earlier("CAST(:grace_ms AS bigint)")}
    ORDER BY o.sent_at LIMIT :limit
)"""
