"""Changes of runs and credits on PostgreSQL: each is a function of the owner, called with one statement.

The login needs no right to write the tables. Which function checks what is in the migration that makes them; which role
may call which, in `security`. In: a connection with an open transaction. Out: records, as in `runs`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import sqlalchemy as sa

from bullpen.errors import InsufficientCredits
from bullpen.ledger.runs import ACTOR, COLUMNS, JSON_COLUMNS, NewRun, RunRow, TenantRuns, to_row, used_before

__all__ = ["FunctionRuns"]

_TOO_FEW_CREDITS: Final = "BP001"
_USED_BEFORE: Final = "BP002"
_FIELDS: Final = ", ".join(
    f"CAST({column.name} AS text) AS {column.name}" if column.name in JSON_COLUMNS else column.name
    for column in COLUMNS
)


class FunctionRuns(TenantRuns):
    """As `TenantRuns`, by the functions of the owner."""

    async def add(self, run: NewRun, *, actor: str | None = None) -> RunRow | None:
        return await self._row(
            "run_submit",
            run.id,
            (run.version_id, "text"),
            (run.payload_json, "jsonb"),
            (run.payload_in_job, "boolean"),
            (run.is_test_run, "boolean"),
            (run.cost, "bigint"),
            (actor, "text"),
            (run.handler, "text"),
            (run.queue, "text"),
            (run.job_options_json, "jsonb"),
        )

    async def get(self, run_id: str, *, lock: bool = False) -> RunRow | None:
        return await self._row("run_lock", run_id) if lock else await super().get(run_id)

    async def start(self, run_id: str, *, job_timestamp: int, job_fence: int) -> RunRow | None:
        return await self._row("run_start", run_id, (job_timestamp, "bigint"), (job_fence, "int"))

    async def complete(self, run_id: str, fence: int, result_json: str) -> RunRow | None:
        return await self._row("run_complete", run_id, (fence, "int"), (result_json, "jsonb"))

    async def note_failure(
        self, run_id: str, fence: int, *, history_json: str, attempts: int, will_retry: bool
    ) -> RunRow | None:
        return await self._row(
            "run_attempt_failed",
            run_id,
            (fence, "int"),
            (attempts, "int"),
            (history_json, "jsonb"),
            (will_retry, "boolean"),
        )

    async def release(self, run_id: str, fence: int) -> RunRow | None:
        return await self._row("run_release", run_id, (fence, "int"))

    async def fail(self, run_id: str, *, error_message: str, job_timestamp: int, job_fence: int) -> RunRow | None:
        return await self._row(
            "run_fail", run_id, (error_message, "text"), (job_timestamp, "bigint"), (job_fence, "int")
        )

    async def cancel(self, run_id: str, *, actor: str = ACTOR) -> RunRow | None:
        return await self._row("run_cancel", run_id, (actor, "text"))

    async def requeue(self, run_id: str, *, actor: str = ACTOR) -> RunRow | None:
        return await self._row("run_redrive", run_id, (actor, "text"))

    async def expect_new_job(self, run_id: str, fence: int, *, is_lost: bool = False) -> RunRow | None:
        return await self._row("run_lost_job" if is_lost else "run_needs_job", run_id, (fence, "int"))

    async def beat(self, run_id: str, fence: int, *, progress_json: str | None = None) -> bool:
        return await self._row("run_beat", run_id, (fence, "int"), (progress_json, "jsonb")) is not None

    async def save_step(self, run_id: str, name: str, fence: int, result_json: str, *, price: int = 0) -> bool:
        arguments = ((run_id, "uuid"), (fence, "int"), (name, "text"), (price, "bigint"), (result_json, "jsonb"))
        return bool((await self._call("run_save_step", "SELECT {}", *arguments)).scalar_one())

    async def grant(self, amount: int, *, reference: str, actor: str = ACTOR) -> bool:
        arguments = ((amount, "bigint"), (reference, "text"), (actor, "text"))
        return bool((await self._call("credits_grant", "SELECT {}", *arguments)).scalar_one())

    async def _row(self, function: str, run_id: str, *arguments: tuple[Any, str]) -> RunRow | None:
        row = (await self._call(function, f"SELECT {_FIELDS} FROM {{}} AS r", (run_id, "uuid"), *arguments)).first()
        return None if row is None else to_row(row)

    async def _call(self, function: str, query: str, *arguments: tuple[Any, str]) -> sa.CursorResult[Any]:
        """Call a function for this tenant. Raises InsufficientCredits, or InvalidOption for an id that was used."""
        values = {f"a{number}": value for number, (value, _) in enumerate([(self.tenant_id, ""), *arguments])}
        kinds = tuple(kind for _, kind in arguments)
        statement = _statement(self._database.table(function), query, kinds)
        try:
            result: sa.CursorResult[Any] = await self._connection.execute(statement, values)
        except sa.exc.DBAPIError as error:
            state = getattr(error.orig, "sqlstate", None)
            if state == _USED_BEFORE:
                raise used_before(str(values["a1"])) from None
            if state != _TOO_FEW_CREDITS:
                raise
            detail: Any = getattr(error.orig, "diag", None)
            needed, balance = str(detail.message_detail).split()
            raise InsufficientCredits(self.tenant_id, needed=int(needed), balance=int(balance)) from None
        return result


@lru_cache(maxsize=200)
def _statement(function: str, query: str, kinds: tuple[str, ...]) -> Any:
    """The call of a function; made once. It sets the tenant of its transaction itself, since arguments are evaluated
    first: so a call that is alone needs no transaction around it."""
    names = ["set_config('app.current_tenant', CAST(:a0 AS text), true)"]
    names += [f"CAST(:a{number} AS {kind})" for number, kind in enumerate(kinds, 1)]
    statement = sa.text(query.format(f"{function}({', '.join(names)})"))
    return statement.columns(*COLUMNS) if "FROM" in query else statement
