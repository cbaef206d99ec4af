"""`bullpen payloads`: which keys sealed what is stored, and objects that no job needs any more.

In: the configured codec and the names of queues. Out: a table, or JSON. Elsewhere: counting and sweeping
(`bullpen.queue.payloads`).
"""

from __future__ import annotations

from dataclasses import asdict
from datetime import timedelta
from typing import Annotated, Any

import typer

from bullpen.app import Bullpen
from bullpen.cli import common
from bullpen.cli.common import JsonOption, PrefixOption, RedisOption
from bullpen.queue import find_queues
from bullpen.queue.payloads import PayloadReport, SweepReport

app = typer.Typer(help="Sealed payloads: keys in use, and objects without a job.", no_args_is_help=True)

QueuesArgument = Annotated[
    list[str] | None, typer.Argument(metavar="QUEUE", help="Queues to look at.", show_default="all")
]


@app.command()
def keys(
    queues: QueuesArgument = None, redis: RedisOption = None, prefix: PrefixOption = None, as_json: JsonOption = False
) -> None:
    """Count sealed payloads by key: one that none needs any more may be removed."""
    known, found = common.wait_for(_report(queues, redis, prefix))
    if as_json:
        common.print_json({"keys": list(known), "queues": {name: asdict(report) for name, report in found.items()}})
        return
    rows: list[list[Any]] = []
    for name, report in found.items():
        rows += [[name, key, count, "" if key in known else "not known here"] for key, count in report.by_key.items()]
        if report.unencrypted_in_store:
            rows.append([name, "(not encrypted)", report.unencrypted_in_store, "in the object store"])
    common.print_table(("queue", "key", "payloads", "note"), rows, numbers=("payloads",))


@app.command()
def sweep(
    queues: QueuesArgument = None,
    older_than: Annotated[
        str, typer.Option(metavar="TIME", help="Leave younger objects alone: 90m, 2h, 1d; a minute at least.")
    ] = "1d",
    delete: Annotated[bool, typer.Option("--delete", help="Remove them; without this they are only counted.")] = False,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find objects of the store that no job, scheduler or dead letter names; with --delete, remove them."""
    age = common.duration("--older-than", older_than)
    found = common.wait_for(_sweep(queues, age, delete, redis, prefix))
    if as_json:
        common.print_json({name: asdict(report) for name, report in found.items()})
        return
    columns = ("queue", "in use", "young", "of others", "removed" if delete else "without a job")
    rows = [[name, report.in_use, report.young, report.foreign, len(report.orphans)] for name, report in found.items()]
    common.print_table(columns, rows, numbers=columns[1:])


async def _report(
    queues: list[str] | None, redis: str | None, prefix: str | None
) -> tuple[tuple[str, ...], dict[str, PayloadReport]]:
    async with common.opened(redis, prefix) as opened:
        known = () if opened.codec is None else opened.codec.key_ids
        return known, {name: await opened.queue(name).payload_report() for name in await _names(opened, queues)}


async def _sweep(
    queues: list[str] | None, age: timedelta, delete: bool, redis: str | None, prefix: str | None
) -> dict[str, SweepReport]:
    async with common.opened(redis, prefix) as opened:
        if opened.codec is None or opened.codec.store is None:
            raise common.WrongCommand("there is no object store; set BULLPEN_CODEC_STORE")
        return {
            name: await opened.queue(name).sweep_payloads(older_than=age, dry_run=not delete)
            for name in await _names(opened, queues)
        }


async def _names(opened: Bullpen, given: list[str] | None) -> list[str]:
    """Those that were named, else all but the dead-letter queues, which are looked at with their queue."""
    if given:
        for name in given:
            await common.must_exist(opened, name)
        return given
    names = await find_queues(opened.connection, opened.prefix)
    return [name for name in names if not (name.endswith("-dlq") and name.removesuffix("-dlq") in names)]
