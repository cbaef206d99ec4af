"""The ledger of an application: where it is, who we are in it, and whether it may be used.

In: settings. Out: a `Ledger` that has not connected yet, and a way to make it ready. The file beside the embedded
server is ours, so its tables are made without asking; a database that somebody configured is only checked.
"""

from __future__ import annotations

from bullpen._kernel.ending import to_its_end
from bullpen.errors import InvalidOption, LedgerNotReady
from bullpen.ledger import Ledger, Roles
from bullpen.settings import Settings

__all__ = ["make_ledger", "prepare", "roles_of"]


def make_ledger(settings: Settings) -> Ledger:
    """The configured ledger. Nothing is opened or created yet."""
    return Ledger(
        settings.database_url(),
        schema=settings.ledger.schema,
        roles=roles_of(settings),
        duty=settings.ledger.duty,
        pool_size=settings.ledger.pool_size,
        strict_sources=settings.outbox.strict_sources,
        max_attempts=settings.outbox.max_attempts,
        dead_letter_type=settings.outbox.dead_letter_type,
        make_directory=settings.ledger.url is None,
    )


def roles_of(settings: Settings) -> Roles | None:
    """The three database roles, or None for a ledger without row-level security."""
    chosen = settings.ledger
    tenant, worker, service = chosen.tenant_role, chosen.worker_role, chosen.service_role
    if tenant and worker and service:
        return Roles(tenant=tenant, worker=worker, service=service)
    if tenant or worker or service:
        given = {"tenant_role": tenant, "worker_role": worker, "service_role": service}
        missing = ", ".join(name for name, role in given.items() if role is None)
        raise InvalidOption(missing, "all three roles or none", None)
    return None


async def prepare(ledger: Ledger, settings: Settings, *, connections: int = 2) -> None:
    """Make the tables of the default file; refuse a configured database that is not ready or not safe.

    To its end, also when nobody waits for it any more: a connection that is left in the middle of a query is lost.
    """
    await to_its_end(_prepare(ledger, settings, connections))


async def _prepare(ledger: Ledger, settings: Settings, connections: int) -> None:
    if settings.ledger.url is None:
        try:
            # Asked before they are made: what makes them would stay loaded, 15 MB, for as long as the process runs.
            await ledger.check(connections=connections)
            return
        except LedgerNotReady:
            await ledger.migrate()
    await ledger.check(connections=connections)
