"""A position is stored with what was read, or not at all."""

from __future__ import annotations

import pytest

from bullpen.errors import InvalidOption
from bullpen.ledger import Ledger
from tests.databases import item


async def test_a_position_is_written_and_overwritten(ledger: Ledger) -> None:
    assert await ledger.checkpoints.read("projector") is None

    for position in ("1/10", "1/20"):
        async with ledger.database.transaction() as connection:
            await ledger.checkpoints.write(connection, "projector", position)

    assert await ledger.checkpoints.read("projector") == "1/20"
    assert await ledger.checkpoints.read("other") is None


async def test_rows_and_position_share_one_fate(ledger: Ledger) -> None:
    async def crash() -> None:
        async with ledger.database.transaction() as connection:
            await ledger.enqueuer.enqueue(connection, item())
            await ledger.checkpoints.write(connection, "projector", "1/10")
            raise RuntimeError("crash")

    with pytest.raises(RuntimeError, match="crash"):
        await crash()

    assert await ledger.checkpoints.read("projector") is None
    assert await ledger.outbox.find() == []


@pytest.mark.parametrize(("name", "position"), [("", "1"), ("n" * 201, "1"), ("n", ""), ("n", "1" * 201)])
async def test_names_and_positions_must_fit(ledger: Ledger, name: str, position: str) -> None:
    with pytest.raises(InvalidOption, match="characters"):
        async with ledger.database.transaction() as connection:
            await ledger.checkpoints.write(connection, name, position)
