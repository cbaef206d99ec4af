"""Orders that failed finally are in the one view of all dead letters, on RabbitMQ too, and cannot be edited there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bullpen import Bullpen
from bullpen.errors import DeadLetterNotEditable
from bullpen.ports.dead_letters import DeadLetter
from bullpen.settings import Settings
from bullpen.testing.rabbitmq import RabbitServer
from tests.messages.kit import Provider


@pytest.mark.requirement("X-5", "X-40")
async def test_orders_on_rabbitmq_are_among_all_dead_letters(
    rabbit: RabbitServer, redis_url: str, tmp_path: Path
) -> None:
    base = f"letters-{os.urandom(4).hex()}"
    settings = Settings.load(
        redis_url=redis_url,
        ledger_url=f"sqlite:///{tmp_path / 'ledger.sqlite3'}",
        messages_transport="rabbitmq",
        rabbitmq_url=rabbit.url,
        rabbitmq_queue_name=f"{base}.queue",
        rabbitmq_dlq_name=f"{base}.dlq",
        rabbitmq_exchange_name=base,
        rabbitmq_dlx_name=f"{base}.dlx",
    )
    async with Bullpen(redis_url, settings=settings) as app:
        await app.ledger.migrate()
        app.use_messages().channel("email", Provider(), after_crash="same_key")
        console = await app.dead_letters()
        assert await console.depths() == {"integration_outbox": 0, f"{base}.dlq": 0}
        transport = app.use_messages().messaging.transport  # type: ignore[attr-defined]  # every client that is made has one
        await transport.dead_letters(f"{base}.queue").put(
            DeadLetter(
                id="dl-1-6",
                source=f"{base}.queue",
                message_id="1",
                name="birthday",
                data={"urn": "urn:message:1", "payload": {"messageId": "1"}},
                error_message="no",
                failed_at="2030-01-01T00:00:00.000Z",
                entry={"originalJobId": "1", "originalData": {"urn": "urn:message:1"}, "error": {"message": "no"}},
            )
        )

        (found,) = [each async for each in console.find()]
        assert found.store == f"{base}.dlq"
        with pytest.raises(DeadLetterNotEditable, match="correct the recipient"):
            await console.edit(found.store, found.letter.id, merge={"x": 1})
        await console.discard(found.store, found.letter.id, by="ada")
        (entry,) = await app.ledger.audit.read()
        assert (entry.action, entry.actor, entry.subject) == (
            "dead_letter.discard",
            "ada",
            f"{base}.dlq/{found.letter.id}",
        )
