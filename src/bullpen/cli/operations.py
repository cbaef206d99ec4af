"""`bullpen operations`: stored bulk actions: list, show, stop and resume them.

In: operations that the dashboard or `bullpen dead-letters … --stored` stored in the server. Out: their results.
Elsewhere: what they do (`bullpen.ops.operations`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Annotated, Any

from bullpen.cli import show
from bullpen.cli.arguments import LimitOption
from bullpen.cli.context import Done, OnServer, Output, whoami
from bullpen.cli.programs import OnProgram
from bullpen.cli.show import Column, Record
from bullpen.cli.tree import Argument, Group

if TYPE_CHECKING:
    from bullpen.app import Bullpen
    from bullpen.ledger import Ledger
    from bullpen.ops.operations import Operation, Operations, OperationView

app = Group()

_LOOK_EVERY_S = 0.2

OperationArgument = Annotated[str, Argument("OPERATION", "Id of the operation, as listed.")]


@asynccontextmanager
async def operations_of(opened: Bullpen) -> AsyncIterator[Operations]:
    """Those of the app's server."""
    from bullpen.ops.operations import Operations

    async def ledger() -> Ledger | None:
        return opened.ledger if opened.settings.has_ledger() else None

    operations = Operations(opened.connection, opened.prefix, opened.actions, opened.dead_letters, ledger=ledger)
    try:
        yield operations
    finally:
        await operations.aclose()


@app.command("list")
async def list_(at: OnServer, limit: LimitOption = 20) -> None:
    """List operations, newest first."""
    async with at.app() as opened, operations_of(opened) as operations:
        found = await operations.list(count=limit)
    at.list(OPERATIONS, found, empty="no operations")


@app.command("show")
async def show_(at: OnServer, operation: OperationArgument) -> None:
    """Show the progress of one operation and what failed."""
    async with at.app() as opened, operations_of(opened) as operations:
        found = await _found(operations, operation)
    at.fields(to_json(found))


@app.command()
async def stop(at: OnServer, operation: OperationArgument) -> None:
    """Stop an operation before its next object. What is done is not undone."""
    from bullpen.ops.actions import Actor

    async with at.app() as opened, operations_of(opened) as operations:
        await _found(operations, operation)
        await operations.stop(operation, by=Actor(whoami(), "cli"))
    at.say({"stopped": operation}, f"stopping: {operation}")


@app.command()
async def resume(at: OnProgram) -> None:
    """Continue operations whose process has died, until none is left."""
    from bullpen.cli.dead_letter_stores import opened

    async with opened(at) as app_, operations_of(app_) as operations:
        left = [each.id for each in await operations.list(count=1_000) if each.is_open]
        operations.wake()
        done = [await _ended(operations, number) for number in reversed(left)]
    at.list(OPERATIONS, done, empty="nothing to do")


async def run_stored(at: Output, opened: Bullpen, operation: Operation) -> None:
    """Store it, do it, and report the result. If interrupted, it stays stored."""
    async with operations_of(opened) as operations:
        number = await operations.submit(operation)
        try:
            found = await _ended(operations, number, at)
        except asyncio.CancelledError:
            at.warn(
                f"operation {number} stays stored: bullpen operations resume continues it, "
                f"bullpen operations stop {number} ends it"
            )
            raise
    at.say(to_json(found), f"{found.title}: {found.done} of {found.total}, operation {number} {found.state}")
    if found.failed or found.state == "failed":
        at.warn(*found.failed.values(), *([found.error] if found.error else []))
        raise at.failed(f"not done: {found.total - found.done}")


async def _ended(operations: Operations, number: str, at: Output | None = None) -> OperationView:
    with show.bar("processing the entries", None, hidden=at is None or at.as_json) as move:
        while (found := await _found(operations, number)).is_open:
            move(found.done + found.skipped, total=found.total)
            await asyncio.sleep(_LOOK_EVERY_S)
    return found


async def _found(operations: Operations, number: str) -> OperationView:
    found = await operations.get(number)
    if found is None:
        raise Done(f"there is no operation {number!r}; `bullpen operations list` shows the stored ones")
    return found


def to_json(view: OperationView) -> dict[str, Any]:
    import msgspec

    found: dict[str, Any] = msgspec.to_builtins(view)
    return {name: value for name, value in found.items() if name != "link"}


OPERATIONS = Record(
    to_json,
    (
        *(Column("operation", "id"), Column("state"), Column("done"), Column("of", "total"), Column("title", least=16)),
        *(Column("by", worth=2), Column("created", lambda each: show.instant(each["createdMs"]), worth=1)),
    ),
)
