"""What names an event or an entity and cannot be stored is refused before an action has an effect."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from bullpen.app import Bullpen
from bullpen.errors import EntityChanged, InvalidOption, PermanentError
from bullpen.ledger import Ledger
from bullpen.settings import Settings
from bullpen.testing import RedisServer
from bullpen.workflow import Definition, Transition
from bullpen.workflow.engine import Engine
from bullpen.workflow.service import Workflow
from bullpen.workflow.stores import RedisEntities
from tests.databases import MakeLedger
from tests.workflow.kit import Event, Status, call, delivery, states
from tests.workflow.stored import Stored, engine_on, make_tables, put, redis_orders, sql_orders
from tests.workflow.test_stores import opened


@pytest.fixture(params=["sqlite", "postgresql", "redis"])
async def stored(request: pytest.FixtureRequest, make_ledger: MakeLedger) -> AsyncIterator[Stored]:
    if request.param == "redis":
        async with opened(request.getfixturevalue("redis_url")) as connection:
            yield redis_orders(connection)
            request.getfixturevalue("redis_server").flush()
        return
    url = {"sqlite": "sqlite_url", "postgresql": "postgres_url"}[request.param]
    ledger = make_ledger(request.getfixturevalue(url))
    await make_tables(ledger)
    yield sql_orders(ledger)


class Effects:
    """How often an action has run."""

    def __init__(self) -> None:
        self.count = 0
        self.returns: Callable[[Any], Any] = lambda entity: entity

    async def act(self, entity: Any, payload: Any) -> Any:
        self.count += 1
        return self.returns(entity)

    def transitions(self) -> list[Transition[Any, Any, Event, Status]]:
        return [Transition(event=Event.PAY, from_=Status.NEW, to=Status.NEW, actions=[self.act])]

    def engine(self, stored: Stored) -> Engine[Any, Any, Event, Status]:
        return engine_on(stored, transitions=self.transitions())


@pytest.mark.parametrize(
    "wrong",
    [
        {"key": "a\0b"},
        {"key": "a\ud800"},
        {"key": 7},
        {"headers": {"tenantId": "t\0"}},
        {"headers": {"tenantId": ""}},
    ],
    ids=repr,
)
async def test_a_name_that_cannot_be_stored_has_no_effect(stored: Stored, wrong: dict[str, Any]) -> None:
    """The action ran, then the database refused the change, and each further try ran it again."""
    effects = Effects()
    engine = effects.engine(stored)
    await stored.create("urn:1")

    with pytest.raises(InvalidOption, match=r"^(idempotency_key|tenant_id): expected"):
        await engine.emit(Event.PAY, "urn:1", 1, call(**wrong))
    with pytest.raises(PermanentError, match=r"^(idempotency_key|tenant_id): expected"):  # never better: no retry
        await engine.emit(Event.PAY, "urn:1", 1, delivery(**wrong))

    assert effects.count == 0
    assert await stored.look() == ("new", 0)


@pytest.mark.parametrize("urn", ["a\0b", "a\ud800", "", 7, None], ids=repr)
async def test_an_urn_that_cannot_be_stored_is_refused(stored: Stored, urn: Any) -> None:
    effects = Effects()
    engine = effects.engine(stored)

    with pytest.raises(InvalidOption, match="urn: expected"):
        await engine.emit(Event.PAY, urn, 1, call())
    with pytest.raises(PermanentError, match="urn: expected"):
        await engine.emit(Event.PAY, urn, 1, delivery())
    (refused,) = await engine.emit_batch(Event.PAY, urn, [(1, delivery())])
    assert isinstance(refused, PermanentError)
    if isinstance(urn, str) and stored.ledger is not None:
        with pytest.raises(InvalidOption, match=r"entity\.urn: expected"):
            await stored.create(urn)


async def test_names_that_are_too_long_for_their_columns_have_no_effect(ledger: Ledger) -> None:
    await make_tables(ledger)
    effects, stored = Effects(), sql_orders(ledger)
    engine = effects.engine(stored)
    await stored.create("urn:1")
    async with ledger.database.transaction() as connection:  # by a program of its own, past `create`
        await connection.exec_driver_sql(f"INSERT INTO orders VALUES ('{'u' * 301}', 'new', 0, 1)")

    for urn, headers, message in (
        ("u" * 301, {}, "urn: expected at most 300 characters"),
        ("urn:1", {"tenantId": "t" * 61}, "tenant_id: expected at most 60 characters"),
    ):
        with pytest.raises(InvalidOption, match=message):
            await engine.emit(Event.PAY, urn, 1, call(headers=headers))
        with pytest.raises(PermanentError, match=message):
            await engine.emit(Event.PAY, urn, 1, delivery(headers=headers))

    assert effects.count == 0
    assert await stored.look() == ("new", 0)


@pytest.mark.parametrize("wrong", [{"idempotency_key": ""}, {"tenant_id": ""}, {"user_id": 7}, {"correlation_id": ""}])
async def test_emit_takes_no_empty_names(wrong: dict[str, Any], stored: Stored) -> None:
    """An empty key was as good as none: the event counted each time."""
    app = Bullpen(settings=Settings.load(environ={}))
    workflow: Workflow[Any, Any, Event, Status] = app.workflow(
        Definition(
            name="order",
            states=states(idles=[Status.NEW]),
            transitions=Effects().transitions(),
            entity=stored.store,
        )
    )
    await stored.create("urn:1")

    with pytest.raises(InvalidOption, match=next(iter(wrong))):
        await workflow.emit(Event.PAY, "urn:1", **wrong)
    await app.aclose()


async def test_an_entity_that_exists_is_told_as_such_by_every_store(stored: Stored) -> None:
    await stored.create("urn:1", amount=5)

    with pytest.raises(EntityChanged, match="'urn:1' exists already; nothing was stored"):
        await stored.create("urn:1", amount=7)

    assert await stored.look() == ("new", 5)


@pytest.mark.parametrize("returned", [None, 7, "text", {"no": "urn"}], ids=repr)
async def test_an_action_that_returns_no_entity_is_not_tried_again(stored: Stored, returned: Any) -> None:
    """It would have its effect once more, and return the same."""
    effects = Effects()
    effects.returns = lambda entity: returned
    engine = effects.engine(stored)
    await stored.create("urn:1")

    with pytest.raises(PermanentError, match=r"act returned (None|int|str|dict) instead of the entity"):
        await engine.emit(Event.PAY, "urn:1", 1, delivery(1, of=3))

    effects.returns = lambda entity: put(entity, "amount", 3)
    await stored.create("urn:2")
    await engine.emit(Event.PAY, "urn:2", 1, delivery(1, of=3))
    assert await stored.look("urn:2") == ("new", 3)


async def test_an_entity_that_cannot_be_stored_is_not_tried_again(redis_url: str, redis_server: RedisServer) -> None:
    """A set is not JSON. Each further try would have had the effect again, and ended there."""
    async with opened(redis_url) as connection:
        stored, effects = redis_orders(connection), Effects()
        effects.returns = lambda entity: {**entity, "seen": {1}}
        engine = effects.engine(stored)
        await stored.create("urn:1")

        with pytest.raises(InvalidOption, match=r"entity\.seen: expected"):
            await engine.emit(Event.PAY, "urn:1", 1, call())
        with pytest.raises(PermanentError, match=r"entity\.seen: expected"):
            await engine.emit(Event.PAY, "urn:1", 1, delivery(1, of=3))

        assert await stored.look() == ("new", 0)
        wrong: Any
        for wrong in ([], "urn:1", None):
            with pytest.raises(InvalidOption, match=r"entity\.urn: expected"):
                await RedisEntities(connection, "orders").create(wrong)
    redis_server.flush()
