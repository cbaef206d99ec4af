"""What a stolen login can do by plain SQL: every statement is tried on PostgreSQL itself, none through our code.

One database for all; each statement has a transaction of its own that is rolled back. The world that is attacked: two
tenants, 100 credits each, a run of alice in each status, all submitted and run by the functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import psycopg
import pytest

from bullpen.errors import LedgerError
from bullpen.ledger import tables
from bullpen.ledger.security import SERVICE_FUNCTIONS, TENANT_TABLES, WORKER_FUNCTIONS
from bullpen.testing.postgres import PostgresServer
from tests.databases import OWNER, ROLES, MakeLedger

Execute = Callable[..., list[Any]]

QUEUED, RUNNING, FAILED, DONE, BOBS = (f"00000000-0000-0000-0000-00000000000{number}" for number in range(1, 6))
NEW = "00000000-0000-0000-0000-0000000000ff"
TURN = "0" * 64
S = "core_outbox"

REFUSED = (
    psycopg.errors.InsufficientPrivilege,  # no right on the table or function, or a policy says no
    psycopg.errors.IntegrityConstraintViolation,  # a trigger says no
    psycopg.errors.CheckViolation,
)


def _rows_of(tenant: str, number: int) -> list[str]:
    """A row in each table that has one per tenant and is not filled otherwise."""
    rows = {
        "bullpen_recipients (tenant_id, id, zone, channel, address)": f"'{tenant}', 'r', 'UTC', 'email', 'a@b.c'",
        "bullpen_occasions (tenant_id, recipient_id, occasion, on_date)": f"'{tenant}', 'r', 'birthday', '--01-01'",
        "bullpen_inbox (tenant_id, scope, key)": f"'{tenant}', 's', 'k'",
        "bullpen_tenant_limits (tenant_id, integration_type)": f"'{tenant}', '*'",
        "bullpen_endpoints (id, tenant_id, url, events, secrets)": f"'of {tenant}', '{tenant}', 'u', '[]', '[]'",
        "bullpen_events (tenant_id, stream_id, version, event_id, event_type, data, metadata)": (
            f"'{tenant}', 'of {tenant}', 1, 'of {tenant}', 't', '{{}}', '{{}}'"
        ),
        "bullpen_workflow_history (tenant_id, workflow, urn, version, event, source, target, kind, event_key, step)": (
            f"'{tenant}', 'w', 'u', {number}, 'e', 'a', 'b', 'event', 'k', 0"
        ),
    }
    return [f"INSERT INTO {S}.{columns} VALUES ({values})" for columns, values in rows.items()]


@pytest.fixture(scope="module")
def world(postgres_server: PostgresServer, guarded_template: str) -> Iterator[str]:
    name = postgres_server.create_database(guarded_template)

    def run(role: str, tenant: str, *statements: str) -> None:
        with postgres_server.connect(name, role=role) as connection, connection.transaction():
            connection.execute("SELECT set_config('app.current_tenant', %s, true)", [tenant])
            for statement in statements:
                connection.execute(statement.encode())

    for tenant in ("alice", "bob"):
        run(ROLES.service, tenant, f"SELECT {S}.credits_grant('{tenant}', 100, 'g', 'bank')")
    for run_id in (QUEUED, RUNNING, FAILED, DONE):
        run(ROLES.tenant, "alice", f"SELECT {S}.run_submit('alice', '{run_id}', 'v', '{{}}', true, false, 10, 'ada')")
    run(ROLES.tenant, "bob", f"SELECT {S}.run_submit('bob', '{BOBS}', 'v', '{{}}', true, false, 10, 'bea')")
    for run_id in (RUNNING, FAILED, DONE):
        run(ROLES.worker, "alice", f"SELECT {S}.run_start('alice', '{run_id}', 1, 1)")
    run(
        ROLES.worker,
        "alice",
        f"SELECT {S}.run_save_step('alice', '{RUNNING}', 1, 'charge', 4, '5')",
        f"SELECT {S}.run_fail('alice', '{FAILED}', 'no', 1, 1)",
        f"SELECT {S}.run_complete('alice', '{DONE}', 1, '5')",
    )
    run(
        ROLES.service,
        "alice",
        f"INSERT INTO {S}.integration_outbox (source_stream_id, source_event_id, route_key, integration_type, "
        "event_type, payload, tenant_id) VALUES ('s', 'e', 'r', 'webhook:x', 't', '{}', 'alice')",
        f"INSERT INTO {S}.bullpen_destinations (integration_type) VALUES ('webhook:x')",
        f"INSERT INTO {S}.bullpen_messages (id, tenant_id, recipient_id, occasion, period, channel, zone, local_at, "
        f"due_at) VALUES ('{NEW}', 'alice', 'r', 'birthday', '2026', 'email', 'UTC', '2026-01-01T00:00', now())",
        *(statement for number, tenant in enumerate(("alice", "bob")) for statement in _rows_of(tenant, number)),
        f"INSERT INTO {S}.bullpen_turns VALUES ('{TURN}', 'hers', now() + interval '10 s')",
        f"INSERT INTO {S}.bullpen_parked_events (projector, position, stream_id, event_id, event_type, version, data, "
        "metadata, recorded_at, error, tries) VALUES ('p', 1, 's', 'e', 't', 1, '', '', now(), 'no', 1)",
    )
    yield name
    postgres_server.drop_database(name)


@pytest.fixture(scope="module")
def connections(postgres_server: PostgresServer, world: str) -> Iterator[dict[str, psycopg.Connection[Any]]]:
    opened = {duty: postgres_server.connect(world, role=role) for duty, role in asdict(ROLES).items()}
    for connection in opened.values():
        connection.autocommit = True
    yield opened
    for connection in opened.values():
        connection.close()


@pytest.fixture
def execute(connections: dict[str, psycopg.Connection[Any]]) -> Execute:
    def run(duty: str, *statements: str, tenant: str = "alice") -> list[Any]:
        """The rows of the last statement; then everything is rolled back."""
        connection = connections[duty]
        with connection.transaction(force_rollback=True):
            connection.execute("SELECT set_config('app.current_tenant', %s, true)", [tenant])
            for statement in statements:
                cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    return run


RUN_COLUMNS = "(id, tenant_id, version_id, payload"
GRANT_ENTRY = f"INSERT INTO {S}.bullpen_credit_entries (tenant_id, kind, amount, reference)"
AUDIT = f"INSERT INTO {S}.bullpen_audit (actor, action, subject, tenant_id)"

MINTING = {
    "more balance": f"UPDATE {S}.bullpen_credit_accounts SET balance = balance + 1000",
    "a new account": f"INSERT INTO {S}.bullpen_credit_accounts (tenant_id, balance) VALUES ('alice', 1000)",
    "no account": f"DELETE FROM {S}.bullpen_credit_accounts",
    "a grant": f"{GRANT_ENTRY} VALUES ('alice', 'grant', 1000, 'mine')",
    "a grant by the function": f"SELECT {S}.credits_grant('alice', 1000, 'mine', 'ada')",
    "a refund": f"INSERT INTO {S}.bullpen_credit_entries (tenant_id, kind, amount, run_id) "
    f"VALUES ('alice', 'refund', 1000, '{DONE}')",
    "a refund by the function inside": f"SELECT {S}.run_return(r) FROM {S}.bullpen_runs r WHERE id = '{DONE}'",
    "a reservation by the function inside": f"SELECT {S}.run_reserve(r) FROM {S}.bullpen_runs r",
    "a reservation that gives": f"INSERT INTO {S}.bullpen_credit_entries (tenant_id, kind, amount, run_id, round) "
    f"VALUES ('alice', 'reserve', 50, '{QUEUED}', 7)",
    "no entries": f"DELETE FROM {S}.bullpen_credit_entries",
    "an entry of another amount": f"UPDATE {S}.bullpen_credit_entries SET amount = 0 WHERE kind = 'reserve'",
    "a settlement taken back": f"DELETE FROM {S}.bullpen_credit_entries WHERE kind = 'settle'",
    "all entries at once": f"TRUNCATE {S}.bullpen_credit_entries",
    "a cheaper run": f"UPDATE {S}.bullpen_runs SET cost = 0",
    "a run for nothing, afterwards": f"UPDATE {S}.bullpen_runs SET is_test_run = true",
    "another round": f"UPDATE {S}.bullpen_runs SET redrives = redrives + 1",
    "a cheaper step": f"UPDATE {S}.bullpen_run_steps SET price = 0",
    "no step": f"DELETE FROM {S}.bullpen_run_steps",
    "a negative cost": f"SELECT {S}.run_submit('alice', '{NEW}', 'v', '{{}}', true, false, -50, 'ada')",
    "credits of another": f"UPDATE {S}.bullpen_credit_accounts SET balance = 0 WHERE tenant_id = 'bob'",
}
STATUS = {
    "its own run completed": f"UPDATE {S}.bullpen_runs SET status = 'COMPLETED', result = '1' WHERE id = '{QUEUED}'",
    "its own run failed": f"UPDATE {S}.bullpen_runs SET status = 'FAILED' WHERE id = '{RUNNING}'",
    "a completed run queued": f"UPDATE {S}.bullpen_runs SET status = 'QUEUED' WHERE id = '{DONE}'",
    "a larger fence": f"UPDATE {S}.bullpen_runs SET fence = 99",
    "another result": f"UPDATE {S}.bullpen_runs SET result = '\"forged\"' WHERE id = '{DONE}'",
    "another payload": f"UPDATE {S}.bullpen_runs SET payload = '{{}}'",
    "a run that was never run": f"INSERT INTO {S}.bullpen_runs {RUN_COLUMNS}, status, result) "
    f"VALUES ('{NEW}', 'alice', 'v', '{{}}', 'COMPLETED', '1')",
    "a run past the function": f"INSERT INTO {S}.bullpen_runs {RUN_COLUMNS}) VALUES ('{NEW}', 'alice', 'v', '{{}}')",
    "no run": f"DELETE FROM {S}.bullpen_runs",
    "all runs at once": f"TRUNCATE {S}.bullpen_runs CASCADE",
    "a step that was never done": f"INSERT INTO {S}.bullpen_run_steps (run_id, name, tenant_id, fence, result) "
    f"VALUES ('{RUNNING}', 'forged', 'alice', 1, '1')",
    "another result of a step": f"UPDATE {S}.bullpen_run_steps SET result = '1'",
    "a running run taken away": f"SELECT {S}.run_lost_job('alice', '{RUNNING}', 1)",
}
DELIVERY = {
    "a message that says it was sent": f"UPDATE {S}.integration_outbox SET status = 'SENT'",
    "a message that never goes": f"UPDATE {S}.integration_outbox SET due_at = now() + interval '1 year'",
    "an attempt that never was": f"INSERT INTO {S}.integration_outbox_attempts (outbox_id, number, fence, outcome, "
    f"tenant_id) SELECT id, 1, 1, 'SENT', 'alice' FROM {S}.integration_outbox",
}
FORGING = {
    "a greeting that says it was sent": f"UPDATE {S}.bullpen_messages SET status = 'SENT', sent_at = now()",
    "a greeting for somebody else": f"UPDATE {S}.bullpen_messages SET recipient_id = 'other'",
    "a greeting about something else": f"UPDATE {S}.bullpen_messages SET occasion = 'x'",
    "a greeting that was sent before it was": f"UPDATE {S}.bullpen_messages SET sent_at = now()",
    "an answer to a greeting": f"UPDATE {S}.bullpen_messages SET response = '1'",
    "another id of a greeting": f"UPDATE {S}.bullpen_messages SET id = '{QUEUED}'",
    "a greeting of its own making": f"INSERT INTO {S}.bullpen_messages SELECT * FROM {S}.bullpen_messages",
    "a grant that never was": f"{AUDIT} VALUES ('bank', 'credits.grant', 'g', 'alice')",
    "a cancellation that never was": f"{AUDIT} VALUES ('ada', 'run.cancel', '{DONE}', 'alice')",
    "a redrive by somebody else": f"{AUDIT} VALUES ('bea', 'run.redrive', '{DONE}', 'alice')",
    "a line of the outbox": f"{AUDIT} VALUES ('ada', 'outbox.discard', 'x', 'alice')",
    "a line about another tenant": f"{AUDIT} VALUES ('ada', 'dead_letter.redrive', 'x', 'bob')",
    "a line about no tenant": f"{AUDIT} VALUES ('ada', 'dead_letter.redrive', 'x', NULL)",
    "a line of yesterday": f"INSERT INTO {S}.bullpen_audit (at, actor, action, subject, tenant_id) "
    "VALUES (now() - interval '1 day', 'ada', 'dead_letter.redrive', 'x', 'alice')",
    "a line of another login": f"INSERT INTO {S}.bullpen_audit (login, actor, action, subject, tenant_id) "
    "VALUES ('postgres', 'ada', 'dead_letter.redrive', 'x', 'alice')",
    "another actor": f"UPDATE {S}.bullpen_audit SET actor = 'eve'",
    "no audit": f"DELETE FROM {S}.bullpen_audit",
    "all of the audit at once": f"TRUNCATE {S}.bullpen_audit",
    "the fence of a message": f"INSERT INTO {S}.integration_outbox_fences VALUES ('a', 'b', 'c', gen_random_uuid())",
    "a message stored as sent": f"INSERT INTO {S}.integration_outbox (source_stream_id, source_event_id, route_key, "
    "integration_type, event_type, payload, tenant_id, status) VALUES ('s', 'f', 'r', 'x', 't', '{}', 'alice', 'SENT')",
    "another content of a message": f"UPDATE {S}.integration_outbox SET payload = '{{}}'",
    "no message": f"DELETE FROM {S}.integration_outbox",
    "another identity of the ledger": f"UPDATE {S}.bullpen_ledger SET id = 'mine'",
    "another version of the tables": f"UPDATE {S}.bullpen_ledger_version SET version_num = '9999'",
}
FOR_ALL = {
    "a destination switched off for all": f"UPDATE {S}.bullpen_destinations SET disabled_at = now()",
    "a new destination that is off": f"INSERT INTO {S}.bullpen_destinations (integration_type, disabled_at) "
    "VALUES ('webhook:y', now())",
    "a destination forgotten": f"DELETE FROM {S}.bullpen_destinations",
    "checkpoints": f"UPDATE {S}.bullpen_checkpoints SET position = '0'",
    "another checkpoint": f"INSERT INTO {S}.bullpen_checkpoints (name, position) VALUES ('mine', '0')",
    "no checkpoints": f"DELETE FROM {S}.bullpen_checkpoints",
    "incidents": f"DELETE FROM {S}.bullpen_incidents",
    "limits of channels": f"DELETE FROM {S}.bullpen_message_limits",
    "a channel that is free in a year": f"INSERT INTO {S}.bullpen_message_limits (channel, free_at) "
    "VALUES ('email', now() + interval '1 year')",
    "parked events tried again": f"UPDATE {S}.bullpen_parked_events SET retry_wanted = true",
    "parked events with another content": f"UPDATE {S}.bullpen_parked_events SET data = 'eA=='",
    "parked events forgotten": f"DELETE FROM {S}.bullpen_parked_events",
    "a parked event": f"INSERT INTO {S}.bullpen_parked_events (projector, position, stream_id, event_id, event_type, "
    "version, data, metadata, recorded_at, error, tries) VALUES ('p', 2, 's', 'e', 't', 1, '', '', now(), 'no', 1)",
    "entities that nobody else gets": f"UPDATE {S}.bullpen_turns SET until = 'infinity'",
    "an entity that nobody else gets": f"INSERT INTO {S}.bullpen_turns VALUES ('{'1' * 64}', 'mine', "
    "now() + interval '61 minutes')",
    "all turns at once": f"TRUNCATE {S}.bullpen_turns",
}
BREAKER = {
    "a destination broken for all": f"UPDATE {S}.bullpen_destinations SET broken_until = now() + interval '1 day'",
}
CROSSING = {
    "a recipient of another": f"INSERT INTO {S}.bullpen_recipients (tenant_id, id, zone, channel, address) "
    "VALUES ('bob', 'x', 'UTC', 'email', 'a@b.c')",
    "a recipient given away": f"UPDATE {S}.bullpen_recipients SET tenant_id = 'bob', id = 'x'",
    "an occasion of another": f"INSERT INTO {S}.bullpen_occasions (tenant_id, recipient_id, occasion, on_date) "
    "VALUES ('bob', 'r', 'name day', '--01-02')",
    "an occasion given away": f"UPDATE {S}.bullpen_occasions SET tenant_id = 'bob', occasion = 'x'",
    "a message that another would have applied": f"INSERT INTO {S}.bullpen_inbox (tenant_id, scope, key) "
    "VALUES ('bob', 's', 'x')",
    "a move of another's entity": f"INSERT INTO {S}.bullpen_workflow_history (tenant_id, workflow, urn, version, "
    "event, source, target, kind, event_key, step) VALUES ('bob', 'w', 'u', 9, 'e', 'a', 'b', 'event', 'x', 0)",
    "a move that was otherwise": f"UPDATE {S}.bullpen_workflow_history SET target = 'paid'",
    "a move that never was": f"DELETE FROM {S}.bullpen_workflow_history",
    "an event that was otherwise": f"UPDATE {S}.bullpen_events SET data = '{{}}'",
    "an event that never was": f"DELETE FROM {S}.bullpen_events",
    "the next number of messages": f"SELECT nextval('{S}.integration_outbox_seq_seq')",
    "another next number of messages": f"SELECT setval('{S}.integration_outbox_seq_seq', 1)",
    "another next number of events": f"SELECT setval('{S}.bullpen_events_id_seq', 1)",
    "a message in front of all others": f"INSERT INTO {S}.integration_outbox (seq, source_stream_id, source_event_id, "
    "route_key, integration_type, event_type, payload, tenant_id, ordering_key) OVERRIDING SYSTEM VALUE "
    "VALUES (-1, 's', 'f', 'r', 'x', 't', '{}', 'alice', 'shared')",
    "an event behind which none has a number": f"INSERT INTO {S}.bullpen_events (position, stream_id, version, "
    "event_id, event_type, data, metadata, tenant_id) "
    "VALUES (9223372036854775807, 's', 1, 'e', 't', '{}', '{}', 'alice')",
    "an event in front of all others": f"INSERT INTO {S}.bullpen_events (id, stream_id, version, event_id, "
    "event_type, data, metadata, tenant_id) OVERRIDING SYSTEM VALUE "
    "VALUES (-1, 's', 1, 'e', 't', '{}', '{}', 'alice')",
    "a run for another": f"SELECT {S}.run_submit('bob', '{NEW}', 'v', '{{}}', true, false, 0, 'ada')",
    "a message for another": f"INSERT INTO {S}.integration_outbox (source_stream_id, source_event_id, route_key, "
    "integration_type, event_type, payload, tenant_id) VALUES ('s', 'f', 'r', 'x', 't', '{}', 'bob')",
    "a message for nobody": f"INSERT INTO {S}.integration_outbox (source_stream_id, source_event_id, route_key, "
    "integration_type, event_type, payload) VALUES ('s', 'f', 'r', 'x', 't', '{}')",
    "an event for another": f"INSERT INTO {S}.bullpen_events (stream_id, version, event_id, event_type, data, "
    "metadata, tenant_id) VALUES ('s', 1, 'e', 't', '{}', '{}', 'bob')",
    "its own row given away": f"UPDATE {S}.bullpen_runs SET tenant_id = 'bob'",
    "the service role": f"SET ROLE {ROLES.service}",
    "the owner": "SET ROLE shop_owner",
    "a policy": f"DROP POLICY bullpen_tenant ON {S}.bullpen_runs",
    "row-level security": f"ALTER TABLE {S}.bullpen_runs DISABLE ROW LEVEL SECURITY",
    "a trigger": f"ALTER TABLE {S}.bullpen_audit DISABLE TRIGGER audit_line",
    "triggers of the session": "SET session_replication_role = replica",
    "a function": f"CREATE OR REPLACE FUNCTION {S}.run_lock(p_tenant text, p_run uuid) RETURNS "
    f"SETOF {S}.bullpen_runs LANGUAGE sql AS 'SELECT * FROM {S}.bullpen_runs'",
    "a table of its own in our schema": f"CREATE TABLE {S}.mine (id int)",
}
FUNCTIONS = {
    f"the function {name}": f"SELECT {S}.{name}({arguments})"
    for name, arguments in {
        "run_lock": f"'alice', '{RUNNING}'",
        "run_start": f"'alice', '{QUEUED}', 5, 5",
        "run_beat": f"'alice', '{RUNNING}', 1, NULL",
        "run_release": f"'alice', '{RUNNING}', 1",
        "run_attempt_failed": f"'alice', '{RUNNING}', 1, 1, '[]', true",
        "run_save_step": f"'alice', '{RUNNING}', 1, 'forged', 0, '1'",
        "run_complete": f"'alice', '{RUNNING}', 1, '1'",
        "run_fail": f"'alice', '{RUNNING}', 'no', 9, 9",
    }.items()
}

AS_TENANT = {**MINTING, **STATUS, **DELIVERY, **FORGING, **FOR_ALL, **BREAKER, **CROSSING, **FUNCTIONS}
AS_WORKER = {**MINTING, **STATUS, **FORGING, **FOR_ALL, **CROSSING}
AS_SERVICE = {
    **{
        name: statement
        for name, statement in MINTING.items()
        if name not in ("a grant by the function", "no step")  # its duty
    },
    **{name: statement for name, statement in STATUS.items() if name not in ("no run", "a running run taken away")},
    **{name: FORGING[name] for name in ("a line of yesterday", "a line of another login", "another actor", "no audit")},
    "all of the audit at once": FORGING["all of the audit at once"],
}


TABLES = tables.metadata.sorted_tables
PLAIN = ("integration_outbox_attempts", "integration_outbox_fences", "bullpen_messages", "bullpen_run_steps")
"""Tables that have rows of one tenant only here."""
VERBS = {"INSERT": "INSERT INTO", "UPDATE": "UPDATE", "DELETE": "DELETE FROM"}
MAY: dict[str, dict[str, set[str]]] = {
    "tenant": {
        "bullpen_recipients": {"INSERT", "UPDATE", "DELETE"},
        "bullpen_occasions": {"INSERT", "UPDATE", "DELETE"},
        "bullpen_endpoints": {"INSERT", "UPDATE", "DELETE"},
        "bullpen_turns": {"INSERT", "UPDATE", "DELETE"},
        "bullpen_messages": {"UPDATE"},
        "bullpen_inbox": {"INSERT", "DELETE"},
        "integration_outbox": {"INSERT"},
        "bullpen_events": {"INSERT"},
        "bullpen_workflow_history": {"INSERT"},
        "bullpen_audit": {"INSERT"},
    }
}
MAY["worker"] = {
    **MAY["tenant"],
    "integration_outbox": {"INSERT", "UPDATE"},
    "integration_outbox_attempts": {"INSERT"},
    "bullpen_destinations": {"INSERT", "UPDATE"},
}
"""What they may write, of some columns or rows at least. Everything else is refused without a look at the row."""


@pytest.mark.parametrize("duty", MAY)
def test_no_table_has_been_forgotten(execute: Execute, duty: str) -> None:
    """A new table must say here what these logins may do with it."""
    for table in TABLES:
        name = f"{S}.{table.name}"
        for verb in (*VERBS, "TRUNCATE", "REFERENCES", "TRIGGER"):
            some = "has_any_column_privilege" if verb in ("INSERT", "UPDATE") else "has_table_privilege"
            ((granted,),) = execute(duty, f"SELECT {some}('{name}', '{verb}')")
            assert granted == (verb in MAY[duty].get(table.name, ())), f"{verb} on {table.name}"
        if table.name not in MAY[duty]:
            for words in ("INSERT INTO {} DEFAULT VALUES", "DELETE FROM {}", "TRUNCATE {}"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    execute(duty, words.format(name))


@pytest.mark.requirement("X-23")
@pytest.mark.parametrize("duty", MAY)
@pytest.mark.parametrize("table", TENANT_TABLES)
def test_rows_of_another_tenant_are_not_there(execute: Execute, duty: str, table: str) -> None:
    """Not to be seen, changed, removed, or added to."""
    may = MAY[duty].get(table, set())
    others = f"SELECT count(*) FROM {S}.{table} WHERE tenant_id = 'bob'"

    assert execute(duty, others) == [(0,)]
    assert execute("service", others) != [(0,)] or table in ("integration_outbox", *PLAIN), "the test tests nothing"
    if "INSERT" in may:
        with pytest.raises(REFUSED):
            execute(duty, f"INSERT INTO {S}.{table} (tenant_id) VALUES ('bob')")
    if "DELETE" in may:
        assert execute(duty, f"DELETE FROM {S}.{table} WHERE tenant_id = 'bob' RETURNING 1") == []


def test_there_are_enough_of_them() -> None:
    assert len(AS_TENANT) >= 40
    assert {f"the function {name}" for name in WORKER_FUNCTIONS} == {*FUNCTIONS}
    assert all(any(name in statement for statement in AS_WORKER.values()) for name in SERVICE_FUNCTIONS)


@pytest.mark.requirement("X-23", "X-113")
@pytest.mark.parametrize("what", AS_TENANT)
def test_the_login_of_an_api_is_refused(execute: Execute, what: str) -> None:
    with pytest.raises(REFUSED):
        execute("tenant", AS_TENANT[what])


@pytest.mark.requirement("X-23", "R-52")
@pytest.mark.parametrize("what", AS_WORKER)
def test_the_login_of_a_worker_is_refused(execute: Execute, what: str) -> None:
    with pytest.raises(REFUSED):
        execute("worker", AS_WORKER[what])


@pytest.mark.requirement("X-23")
@pytest.mark.parametrize("what", AS_SERVICE)
def test_even_the_service_is_refused(execute: Execute, what: str) -> None:
    with pytest.raises(REFUSED):
        execute("service", AS_SERVICE[what])


@pytest.mark.parametrize(
    "statement",
    [
        f"DELETE FROM {S}.bullpen_audit",
        f"UPDATE {S}.bullpen_audit SET actor = 'eve'",
        f"TRUNCATE {S}.bullpen_audit",
        f"DELETE FROM {S}.bullpen_credit_entries",
        f"TRUNCATE {S}.bullpen_credit_entries",
    ],
)
def test_a_superuser_needs_more_than_a_slip_of_the_hand(
    postgres_server: PostgresServer, world: str, statement: str
) -> None:
    with (
        postgres_server.connect(world) as connection,
        pytest.raises(psycopg.errors.IntegrityConstraintViolation, match="only ever added"),
    ):
        connection.execute(statement.encode())


def test_the_world_is_as_the_statements_expect(execute: Execute) -> None:
    """Otherwise they would be refused for another reason."""
    rows = execute("tenant", f"SELECT CAST(id AS text), status FROM {S}.bullpen_runs ORDER BY id")

    assert rows == [(QUEUED, "QUEUED"), (RUNNING, "RUNNING"), (FAILED, "FAILED"), (DONE, "COMPLETED")]
    assert execute("tenant", f"SELECT balance FROM {S}.bullpen_credit_accounts") == [(70,)]
    assert execute("tenant", f"SELECT count(*) FROM {S}.integration_outbox") == [(1,)]


# What is allowed changes nothing that it should not -----------------------------------------------------------------

BALANCE = f"SELECT balance FROM {S}.bullpen_credit_accounts"


@pytest.mark.requirement("R-52")
@pytest.mark.parametrize(
    ("call", "balance"),
    [
        (f"run_cancel('alice', '{QUEUED}', 'ada')", 80),
        (f"run_cancel('alice', '{RUNNING}', 'ada')", 76),  # its step has spent 4
        (f"run_cancel('alice', '{DONE}', 'ada')", 70),
        (f"run_cancel('alice', '{FAILED}', 'ada')", 70),
        (f"run_cancel('alice', '{BOBS}', 'ada')", 70),
        (f"run_cancel('bob', '{BOBS}', 'ada')", 70),
        (f"run_redrive('alice', '{FAILED}', 'ada')", 60),
        (f"run_redrive('alice', '{DONE}', 'ada')", 70),
        (f"run_submit('alice', '{NEW}', 'v', '{{}}', true, false, 10, 'ada')", 60),
        (f"run_submit('alice', '{DONE}', 'v', '{{}}', true, false, 10, 'ada')", 70),
        (f"run_submit('alice', '{BOBS}', 'v', '{{}}', true, false, 10, 'ada')", 70),
        (f"run_needs_job('alice', '{RUNNING}', 1)", 70),
    ],
)
def test_what_a_tenant_may_call_moves_its_own_credits_once(execute: Execute, call: str, balance: int) -> None:
    again = f"SELECT {S}.{call}"

    assert execute("tenant", again, again, BALANCE) == [(balance,)]
    assert execute("tenant", again, again, "SELECT set_config('app.current_tenant', 'bob', true)", BALANCE) == [(90,)]


@pytest.mark.requirement("R-52", "X-110")
@pytest.mark.parametrize(
    ("calls", "balance"),
    [
        ([f"run_complete('alice', '{RUNNING}', 1, '1')"], 70),
        ([f"run_complete('alice', '{RUNNING}', 0, '1')", f"run_cancel('alice', '{RUNNING}', 'x')"], 76),
        ([f"run_complete('alice', '{RUNNING}', 1, '1')", f"run_fail('alice', '{RUNNING}', 'no', 9, 9)"], 70),
        ([f"run_fail('alice', '{RUNNING}', 'no', 1, 1)"], 76),
        ([f"run_fail('alice', '{RUNNING}', 'no', 1, 0)"], 70),  # of a take that was overtaken
        ([f"run_fail('alice', '{FAILED}', 'no', 9, 9)"], 70),
        ([f"run_fail('alice', '{DONE}', 'no', 9, 9)"], 70),
        ([f"run_fail('bob', '{BOBS}', 'no', 9, 9)"], 70),
        # A step that costs more than the run spends what the run costs, and one that costs less than nothing is none.
        ([f"run_save_step('alice', '{RUNNING}', 1, 'b', 999, '1')", f"run_cancel('alice', '{RUNNING}', 'x')"], 70),
        ([f"run_save_step('alice', '{RUNNING}', 1, 'b', -999, '1')", f"run_cancel('alice', '{RUNNING}', 'x')"], 76),
        # Failing and sending back again and again costs what the steps cost, once.
        (
            [
                f"run_fail('alice', '{RUNNING}', 'no', 1, 1)",
                f"run_redrive('alice', '{RUNNING}', 'x')",
                f"run_start('alice', '{RUNNING}', 1, 2)",
                f"run_fail('alice', '{RUNNING}', 'no', 1, 2)",
            ],
            76,
        ),
    ],
)
def test_what_a_worker_may_call_mints_nothing(execute: Execute, calls: list[str], balance: int) -> None:
    statements = [f"SELECT {S}.{call}" for call in calls for _ in range(2)]

    assert execute("worker", *statements, BALANCE) == [(balance,)]
    booked = f"SELECT CAST(sum(amount) AS bigint) FROM {S}.bullpen_credit_entries"
    assert execute("worker", *statements, booked) == [(balance,)]
    other = "SELECT set_config('app.current_tenant', 'bob', true)"
    assert execute("worker", *statements, other, BALANCE) == [(90,)]


def test_the_path_of_a_caller_does_not_lead_a_function_astray(execute: Execute) -> None:
    """A table of the caller's own, found first in its path, is not what the function writes."""
    statements = [
        "CREATE TEMP TABLE bullpen_credit_accounts (tenant_id text, balance bigint, updated_at timestamptz)",
        "CREATE FUNCTION pg_temp.now() RETURNS timestamptz LANGUAGE sql AS 'SELECT NULL::timestamptz'",
        "SET LOCAL search_path = pg_temp, core_outbox, pg_catalog",
        f"SELECT {S}.run_cancel('alice', '{QUEUED}', 'ada')",
    ]

    assert execute("tenant", *statements, BALANCE) == [(80,)]


def test_the_database_writes_the_audit_and_says_when_and_by_which_login(execute: Execute) -> None:
    lines = f"SELECT actor, action, subject, login FROM {S}.bullpen_audit ORDER BY id"
    cancel = f"SELECT {S}.run_cancel('alice', '{QUEUED}', 'ada')"
    redrive = f"SELECT {S}.run_redrive('alice', '{FAILED}', NULL)"
    told = f"{AUDIT} VALUES ('ada', 'dead_letter.redrive', 'queue/1', 'alice')"

    assert execute("tenant", cancel, redrive, told, lines) == [
        ("bank", "credits.grant", "g", ROLES.service),
        *(("ada", "run.submit", run_id, ROLES.tenant) for run_id in (QUEUED, RUNNING, FAILED, DONE)),
        ("ada", "run.cancel", QUEUED, ROLES.tenant),
        (ROLES.tenant, "run.redrive", FAILED, ROLES.tenant),
        ("ada", "dead_letter.redrive", "queue/1", ROLES.tenant),
    ]
    recent = f"SELECT DISTINCT abs(extract(epoch FROM clock_timestamp() - at)) < 3600 FROM {S}.bullpen_audit"
    assert execute("tenant", told, recent) == [(True,)]


@pytest.mark.parametrize("duty", ["tenant", "worker", "service"])
@pytest.mark.parametrize("action", ["dead_letter.redrive", "run.dead_letters.read", "run.security"])
def test_a_false_actor_stands_beside_the_login_that_wrote_it(execute: Execute, duty: str, action: str) -> None:
    """What queues do the database cannot see, so their lines are the program's own word: whoever holds its login may
    name anybody, and cannot hide that it was this login."""
    forged = f"{AUDIT} VALUES ('the chief', '{action}', 'queue/1', 'alice')"
    lines = f"SELECT actor, login FROM {S}.bullpen_audit WHERE action = '{action}'"
    role = getattr(ROLES, duty)

    assert execute(duty, forged, lines) == [("the chief", role)]
    assert execute(duty, f"SET LOCAL ROLE {role}", forged, lines) == [("the chief", role)]


def test_whoever_holds_the_login_can_name_any_tenant(execute: Execute) -> None:
    """What row-level security does not guard against, as the guide says: it separates transactions, not people."""
    mine = execute("tenant", f"SELECT DISTINCT tenant_id FROM {S}.bullpen_runs")
    as_bob = ["SELECT set_config('app.current_tenant', 'bob', true)", f"SELECT tenant_id FROM {S}.bullpen_runs"]

    assert mine == [("alice",)]
    assert execute("tenant", *as_bob) == [("bob",)]


@pytest.mark.parametrize("until", ["infinity", "-infinity", "9999-01-01", "290000-01-01"])
def test_a_worker_says_that_a_destination_is_broken_for_a_day_at_most(execute: Execute, until: str) -> None:
    """Not switched off for good, and nothing that makes reading or counting it fail for all others."""
    broken = f"UPDATE {S}.bullpen_destinations SET broken_until = '{until}', trips = 2147483647, updated_at = '{until}'"
    left = (
        "SELECT CAST(extract(epoch FROM broken_until - clock_timestamp()) AS bigint) <= 86400, trips + 1 < 10000, "
        f"extract(epoch FROM updated_at - clock_timestamp()) < 1 FROM {S}.bullpen_destinations"
    )
    assert execute("worker", broken, left) == [(True, True, True)]
    new = (
        f"INSERT INTO {S}.bullpen_destinations (integration_type, broken_until) VALUES ('webhook:y', '{until}') "
        "RETURNING CAST(extract(epoch FROM broken_until - clock_timestamp()) AS bigint) <= 86400"
    )
    assert execute("worker", new) == [(True,)]


def test_functions_of_the_callers_own_schema_write_no_time(
    execute: Execute, postgres_server: PostgresServer, world: str
) -> None:
    """A login that may create something somewhere puts its own clock in front of the database's."""
    with postgres_server.connect(world) as connection:
        connection.execute("CREATE SCHEMA IF NOT EXISTS app")
        connection.execute(f"GRANT USAGE, CREATE ON SCHEMA app TO {ROLES.tenant}, {ROLES.worker}".encode())
    returns = "RETURNS timestamptz LANGUAGE sql AS"
    clock = f"CREATE FUNCTION app.clock_timestamp() {returns} $$ SELECT 'epoch'::timestamptz $$"
    later = (
        f"CREATE FUNCTION app.later(timestamptz, interval) {returns} $$ SELECT '9999-01-01'::timestamptz $$",
        "CREATE OPERATOR app.+ (LEFTARG = timestamptz, RIGHTARG = interval, FUNCTION = app.later)",
    )
    path = "SET LOCAL search_path = app, pg_catalog"
    told = f"{AUDIT} VALUES ('ada', 'dead_letter.redrive', 'x', 'alice') RETURNING at > '2020-01-01'"
    broken = (
        f"UPDATE {S}.bullpen_destinations SET broken_until = '9999-01-01' "
        "RETURNING broken_until < '9000-01-01', updated_at > '2020-01-01'"
    )
    sent = f"UPDATE {S}.integration_outbox SET due_at = now() RETURNING updated_at > '2020-01-01'"

    assert execute("tenant", clock, path, told) == [(True,)]
    assert execute("worker", clock, *later, path, broken) == [(True, True)]
    assert execute("worker", clock, path, sent) == [(True,)]


def test_a_paid_run_that_was_deleted_does_not_begin_again_for_nothing(execute: Execute) -> None:
    """What it paid the first time counted for the second."""
    again = f"SELECT {S}.run_submit('alice', '{DONE}', 'v', '{{}}', true, false, 10, 'ada')"
    deleted = f"DELETE FROM {S}.bullpen_runs WHERE id = '{DONE}'"

    with pytest.raises(psycopg.errors.DatabaseError, match="used before"):
        execute("service", deleted, again)


async def test_migrating_again_takes_back_what_was_granted_too_much(
    postgres_server: PostgresServer, guarded_database: str, make_ledger: MakeLedger
) -> None:
    """By an earlier version, or by hand. A superuser may do it: functions stay the owner's."""
    accounts = f"{S}.bullpen_credit_accounts"
    postgres_server.execute(f"GRANT UPDATE, UPDATE (balance) ON {accounts} TO shop_tenant", database=guarded_database)
    with postgres_server.connect(guarded_database, role=ROLES.tenant) as connection:
        connection.execute(MINTING["more balance"].encode())

    await make_ledger(postgres_server.url(guarded_database), roles=ROLES).migrate()

    with postgres_server.connect(guarded_database, role=ROLES.tenant) as connection, pytest.raises(REFUSED):
        connection.execute(MINTING["more balance"].encode())
    owners = (
        "SELECT DISTINCT pg_get_userbyid(proowner) FROM pg_proc WHERE prosecdef AND pronamespace = %s::regnamespace"
    )
    assert [tuple(row) for row in postgres_server.execute(owners, [S], database=guarded_database)] == [(OWNER,)]
    service = make_ledger(postgres_server.url(guarded_database, role=ROLES.service), roles=ROLES)
    assert await service.transactions.run("alice", lambda runs: runs.grant(5, reference="g", actor="bank"))
    assert await service.transactions.run("alice", lambda runs: runs.balance()) == 5


@pytest.mark.parametrize("table", ["bullpen_audit", "bullpen_credit_entries"])
async def test_what_was_written_down_stays_on_sqlite_too(sqlite_url: str, make_ledger: MakeLedger, table: str) -> None:
    ledger = make_ledger(sqlite_url)
    await ledger.transactions.run("alice", lambda runs: runs.grant(5, reference="g", actor="bank"))

    with pytest.raises(LedgerError, match="only ever added"):
        async with ledger.database.transaction() as connection:
            await connection.exec_driver_sql(f"DELETE FROM {table}")


async def test_nobody_else_may_call_a_function(postgres_server: PostgresServer, guarded_database: str) -> None:
    """Everybody may call a new function of PostgreSQL until that is taken away."""
    may = (
        "SELECT proname FROM pg_proc p, aclexplode(coalesce(proacl, acldefault('f', proowner))) a "
        "WHERE prosecdef AND pronamespace = %s::regnamespace AND a.grantee = 0"
    )

    assert postgres_server.execute(may, [S], database=guarded_database) == []
