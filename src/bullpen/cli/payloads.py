"""`bullpen payloads`: which keys sealed what is stored, and objects that no job needs any more.

In: the configured codec and the names of queues. Out: a table, or JSON. Elsewhere: counting and sweeping
(`bullpen.queue.payloads`).
"""

from __future__ import annotations

from dataclasses import asdict
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated

from bullpen.cli import context
from bullpen.cli.arguments import QueuesArgument, duration
from bullpen.cli.context import OnServer, WrongCommand
from bullpen.cli.show import Column
from bullpen.cli.tree import Group, Option

if TYPE_CHECKING:
    from bullpen.app import Bullpen

app = Group()


@app.command("list")
async def list_(at: OnServer, queues: QueuesArgument = None) -> None:
    """Count sealed payloads by key. A key without payloads may be removed."""
    async with at.app() as opened:
        known = () if opened.codec is None else opened.codec.key_ids
        found = {name: await opened.queue(name).payload_report() for name in await _names(opened, queues)}
    if at.as_json:
        at.say({"keys": list(known), "queues": {name: asdict(report) for name, report in found.items()}})
        return
    rows = []
    for name, report in found.items():
        rows += [(name, key, count, "" if key in known else "not known here") for key, count in report.by_key.items()]
        if report.unencrypted_in_store:
            rows.append((name, "(not encrypted)", report.unencrypted_in_store, "in the object store"))
    if rows:
        at.table([Column(title, itemgetter(place)) for place, title in enumerate(_TITLES)], rows)
    else:
        at.warn("no sealed payloads; BULLPEN_CODEC_KEYS and BULLPEN_CODEC_STORE seal new ones")


_TITLES = ("queue", "key", "payloads", "note")


@app.command()
async def sweep(
    at: OnServer,
    queues: QueuesArgument = None,
    older_than: Annotated[
        str, Option(metavar="TIME", help="Keep objects younger than this: 90m, 2h, 1d; at least a minute.")
    ] = "1d",
    delete: Annotated[bool, Option("--delete", help="Remove them; without this option they are only counted.")] = False,
) -> None:
    """Find objects in the store that no job, schedule or dead letter uses; with --delete, remove them."""
    age = duration("--older-than", older_than)
    async with at.app() as opened:
        if opened.codec is None or opened.codec.store is None:
            raise WrongCommand("there is no object store; set BULLPEN_CODEC_STORE")
        found = {
            name: await opened.queue(name).sweep_payloads(older_than=age, dry_run=not delete)
            for name in await _names(opened, queues)
        }
    if at.as_json:
        at.say({name: asdict(report) for name, report in found.items()})
        return
    columns = (
        Column("queue", lambda row: row[0]),
        Column("in use", lambda row: row[1].in_use),
        Column("young", lambda row: row[1].young),
        Column("of others", lambda row: row[1].foreign),
        Column("removed" if delete else "without a job", lambda row: len(row[1].orphans)),
    )
    at.table(columns, found.items())


async def _names(opened: Bullpen, given: list[str] | None) -> list[str]:
    """The named ones, else all but the dead-letter queues, which are read with their queue."""
    for name in given or ():
        await context.must_exist(opened, name)
    return given or await context.queue_names(opened)
