"""`bullpen migrate`: create or update the ledger's tables, or print the statements."""

from __future__ import annotations

from typing import Annotated

from bullpen.cli import show
from bullpen.cli.context import DatabaseOption, WrongCommand, open_ledger
from bullpen.cli.tree import Option


async def migrate(
    database: DatabaseOption = None,
    schema: Annotated[str | None, Option(metavar="NAME", help="Schema on PostgreSQL.")] = None,
    tenant_role: Annotated[str | None, Option(metavar="ROLE", help="Role of APIs.")] = None,
    worker_role: Annotated[str | None, Option(metavar="ROLE", help="Role of workers of deliveries and runs.")] = None,
    service_role: Annotated[str | None, Option(metavar="ROLE", help="Role of dispatchers and maintenance.")] = None,
    create_roles: Annotated[bool, Option("--create-roles", help="Create the roles if they are missing.")] = False,
    parts: Annotated[
        str | None,
        Option(
            "--for",
            metavar="PARTS",
            help="Create only the tables of these parts, separated by commas: outbox, runs, messages, workflows, "
            "projector, alerts. The outbox is always included. Default: all.",
        ),
    ] = None,
    print_sql: Annotated[bool, Option("--print-sql", help="Print the statements; run nothing.")] = False,
) -> None:
    """Create or update the ledger's tables. With three roles also row-level security. Safe to repeat.

    Add parts later with another --for; existing tables stay and are updated.
    """
    from bullpen.ledger.migrate import render_sql
    from bullpen.ledger.parts import PARTS
    from bullpen.settings import Settings
    from bullpen.wiring.ledger import roles_of

    settings = Settings.load(
        ledger_url=database,
        ledger_schema=schema,
        ledger_tenant_role=tenant_role,
        ledger_worker_role=worker_role,
        ledger_service_role=service_role,
    )
    wanted = None if parts is None else [part.strip() for part in parts.split(",") if part.strip()]
    if wanted == []:
        raise WrongCommand("--for: name one part or several, such as outbox,runs")
    if print_sql:
        dialect = "sqlite" if settings.database_url().startswith("sqlite") else "postgresql"
        print(
            render_sql(
                "sqlite" if dialect == "sqlite" else "postgresql",
                schema=settings.ledger.schema,
                roles=roles_of(settings),
                create_roles=create_roles,
                parts=wanted,
            )
        )
        return
    async with open_ledger(settings) as ledger:
        await ledger.migrate(create_roles=create_roles, parts=wanted)
        there = await ledger.parts()
        names = ", ".join(part for part in PARTS if part in there)
        show.say(f"the ledger in {ledger.database.address} is up to date: {names}")
