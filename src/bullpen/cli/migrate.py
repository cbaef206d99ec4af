"""`bullpen migrate`: make the ledger's tables, or print the statements for somebody else to run."""

from __future__ import annotations

from typing import Annotated

import typer

from bullpen.cli import common
from bullpen.cli.outbox import DatabaseOption, settings_for
from bullpen.settings import Settings


def migrate(
    database: DatabaseOption = None,
    schema: Annotated[str | None, typer.Option(metavar="NAME", help="Schema on PostgreSQL.")] = None,
    tenant_role: Annotated[str | None, typer.Option(metavar="ROLE", help="Role of APIs.")] = None,
    worker_role: Annotated[
        str | None, typer.Option(metavar="ROLE", help="Role of workers of deliveries and runs.")
    ] = None,
    service_role: Annotated[
        str | None, typer.Option(metavar="ROLE", help="Role of dispatchers and maintenance.")
    ] = None,
    create_roles: Annotated[bool, typer.Option("--create-roles", help="Create the roles if they are missing.")] = False,
    parts: Annotated[
        str | None,
        typer.Option(
            "--for",
            metavar="PARTS",
            help="Make only the tables of these: outbox, runs, messages, workflows, projector, alerts; with commas "
            "between them. The outbox always belongs to them. Else all.",
        ),
    ] = None,
    print_sql: Annotated[bool, typer.Option("--print-sql", help="Print the statements and run nothing.")] = False,
) -> None:
    """Make the ledger's tables or bring them up to date. With three roles also row-level security. Safe to repeat.

    Parts can be added later with another --for; those that are there stay and are brought up to date.
    """
    settings = settings_for(database, schema, tenant_role, worker_role, service_role)
    wanted = None if parts is None else [part.strip() for part in parts.split(",") if part.strip()]
    if wanted == []:
        raise common.WrongCommand("--for: name one part or several, such as outbox,runs")
    if print_sql:
        print(_render(settings, create_roles=create_roles, parts=wanted))
        return
    where, there = common.wait_for(_migrate(settings, create_roles=create_roles, parts=wanted))
    common.out.print(f"the ledger in {where} is up to date: {there}", markup=False)


def _render(settings: Settings, *, create_roles: bool, parts: list[str] | None) -> str:
    from bullpen.ledger.migrate import render_sql
    from bullpen.wiring.ledger import roles_of

    dialect = "sqlite" if settings.database_url().startswith("sqlite") else "postgresql"
    return render_sql(
        "sqlite" if dialect == "sqlite" else "postgresql",
        schema=settings.ledger.schema,
        roles=roles_of(settings),
        create_roles=create_roles,
        parts=parts,
    )


async def _migrate(settings: Settings, *, create_roles: bool, parts: list[str] | None) -> tuple[str, str]:
    from bullpen.cli.outbox import open_ledger
    from bullpen.ledger.parts import PARTS

    async with open_ledger(settings) as ledger:
        await ledger.migrate(create_roles=create_roles, parts=parts)
        there = await ledger.parts()
        return ledger.database.address, ", ".join(part for part in PARTS if part in there)
