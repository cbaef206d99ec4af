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
    print_sql: Annotated[bool, typer.Option("--print-sql", help="Print the statements and run nothing.")] = False,
) -> None:
    """Make the ledger's tables or bring them up to date. With three roles also row-level security. Safe to repeat."""
    settings = settings_for(database, schema, tenant_role, worker_role, service_role)
    if print_sql:
        print(_render(settings, create_roles=create_roles))
        return
    where = common.wait_for(_migrate(settings, create_roles=create_roles))
    common.out.print(f"the ledger in {where} is up to date", markup=False)


def _render(settings: Settings, *, create_roles: bool) -> str:
    from bullpen._parts.ledger import roles_of
    from bullpen.ledger.migrate import render_sql

    dialect = "sqlite" if settings.database_url().startswith("sqlite") else "postgresql"
    return render_sql(
        "sqlite" if dialect == "sqlite" else "postgresql",
        schema=settings.ledger.schema,
        roles=roles_of(settings),
        create_roles=create_roles,
    )


async def _migrate(settings: Settings, *, create_roles: bool) -> str:
    from bullpen.cli.outbox import open_ledger

    async with open_ledger(settings) as ledger:
        await ledger.migrate(create_roles=create_roles)
        return ledger.database.address
