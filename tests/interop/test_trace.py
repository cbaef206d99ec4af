"""One trace joins a Node producer, our worker, a row of the outbox and the webhook that it becomes."""

import asyncio
import json
from pathlib import Path

import pytest
import redis
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sqlalchemy.ext.asyncio import create_async_engine

from bullpen import Bullpen, Job
from bullpen.ops.tracing import install_tracing
from bullpen.plugins.channels.webhook import Webhook
from bullpen.settings import Settings
from bullpen.testing import RedisServer
from bullpen.testing.receivers import HttpReceiver

from ._sides import PeerSide

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


@pytest.mark.requirement("W-68")
async def test_one_trace_from_node_to_the_webhook(
    node: PeerSide, client: redis.Redis, interop_server: RedisServer, tmp_path: Path
) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    remove = install_tracing(provider)
    environ = {"BULLPEN_DATA_DIR": str(tmp_path), "BULLPEN_REDIS_URL": interop_server.url}
    app = Bullpen(settings=Settings.load(environ=environ, start=tmp_path))
    engine = create_async_engine(f"sqlite+aiosqlite:///{tmp_path / 'ledger.sqlite3'}")

    @app.handler("orders")
    async def paid(job: Job) -> None:
        async with engine.begin() as connection:
            await app.use_outbox().enqueue(
                connection, integration_type="webhook:partner", event_type="order.paid.v1", payload=job.data
            )

    try:
        async with HttpReceiver() as receiver:
            hook = Webhook(receiver.url, allow_http=True, allowed_networks=["127.0.0.0/8"])
            app.use_outbox().route("webhook:partner", hook)
            await app.prepare()
            run = asyncio.create_task(app.run(signals=False))
            carried = json.dumps({"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"})
            await node.add("orders", "paid", {"order": 7}, telemetry={"metadata": carried})
            try:
                (request,) = await receiver.until(1)
            finally:
                await app.stop()
                await run
    finally:
        remove()
        await engine.dispose()

    assert request.headers["traceparent"].split("-")[1] == TRACE_ID
    ours = [
        span for span in exporter.get_finished_spans() if span.context and span.context.trace_id == int(TRACE_ID, 16)
    ]
    names = {span.name for span in ours}
    assert {"process orders", "deliver webhook:partner"} <= names
