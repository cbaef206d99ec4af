"""Dead letters for the commands, wherever they are kept.

In: a program, or only settings, and the name of a queue or store. Out: a console that holds it. Which queues a
transport carries only the program knows. Elsewhere: the commands (`dead_letters`, `edit`), the console over all stores
(`bullpen.ops.dead_letters`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bullpen.app import Bullpen
from bullpen.cli import show
from bullpen.cli.context import answers, brokers_of
from bullpen.cli.programs import OnProgram
from bullpen.ops.dead_letters import DeadLetterConsole
from bullpen.wiring.dead_letters import OUTBOX_STORE

__all__ = ["console_of", "is_queue", "name_of_store", "opened", "warn_about_brokers"]

_SUFFIX = "-dlq"


@asynccontextmanager
async def opened(at: OnProgram) -> AsyncIterator[Bullpen]:
    """The named program's app, else the configured one. A server of queues that is configured must answer."""
    async with at.made() as app:
        if app.settings.has_redis() or at.redis is not None or not (brokers_of(app) or app.settings.has_ledger()):
            await answers(app)
        if app.settings.messages.transport == "rabbitmq" and app.settings.has_ledger():
            app.use_messages()  # settings say where its letters are: nobody needs to name the program for them
        yield app


def warn_about_brokers(at: OnProgram, app: Bullpen) -> bool:
    """Whether there may be dead letters that only a program knows; reported on stderr."""
    transport = app.settings.workflows.transport
    if at.program is not None or transport not in ("rabbitmq", "kafka"):
        return False
    show.warn(
        f"dead letters of workflows on {transport} are not included: name the program that has them, --app MODULE:APP"
    )
    return True


def name_of_store(console: DeadLetterConsole, named: str) -> str:
    """A store by its own name, or by that of the queue whose dead letters it holds."""
    return next((each for each in _names(named) if each in console.stores), named)


async def console_of(app: Bullpen, named: str, tenant: str | None) -> tuple[DeadLetterConsole, str]:
    """A console that holds this store, and its name. It may also be named by its queue. No keys are searched."""
    others = {store.name for store in app.other_dead_letters()}
    elsewhere = [each for each in _names(named) if each in others or each == OUTBOX_STORE]
    queues = [] if elsewhere else [f"{named.removesuffix(_SUFFIX)}{_SUFFIX}"]
    return await app.dead_letters(tenant_id=tenant, queues=queues), (elsewhere or queues)[0]


def is_queue(app: Bullpen, store: str) -> bool:
    """Whether a store is a queue of the server, which exists only when something was added to it."""
    return store.endswith(_SUFFIX) and store not in {each.name for each in app.other_dead_letters()}


def _names(named: str) -> tuple[str, ...]:
    return (named, f"{named}{_SUFFIX}", f"{named}.dlq")
