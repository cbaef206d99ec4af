"""An API of ours on a port, and a machine that reads its description and tries what nobody thought of."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

import schemathesis
import uvicorn
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable


@asynccontextmanager
async def served(application: Any) -> AsyncIterator[str]:
    """The application on a port of its own: the machine talks to it as anybody would."""
    server = uvicorn.Server(uvicorn.Config(application, port=0, log_config=None, lifespan="off"))
    serving = asyncio.create_task(server.serve())
    async with asyncio.timeout(20):
        while not server.started:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    await serving


async def problems_of(address: str, token: str, *, examples: int, without: Collection[str] = ()) -> list[str]:
    """What was wrong with answers to requests that schemathesis made from the description, right and wrong ones."""
    problems: list[str] = []
    quietly = settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )

    def fuzz() -> None:
        schema: Any = schemathesis.openapi.from_url(f"{address}/openapi.json")
        names = ("not_a_server_error", "status_code_conformance", "content_type_conformance")
        checks = [schemathesis.checks.CHECKS.get_one(name) for name in (*names, "response_schema_conformance")]
        for operation in schema.get_all_operations():
            loaded = operation.ok()
            if loaded.path in without:
                continue
            for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):

                def try_it(case: Any) -> None:
                    case.headers = {**(case.headers or {}), "Authorization": f"Bearer {token}"}
                    case.call_and_validate(checks=checks, timeout=20)

                try:
                    quietly(given(case=loaded.as_strategy(generation_mode=mode))(try_it))()
                except Unsatisfiable:
                    assert mode is schemathesis.GenerationMode.NEGATIVE  # nothing there that could be wrong
                except BaseException as error:
                    problems.append(f"{mode} {loaded.method} {loaded.path}: {error!r:.900}")

    thread = threading.Thread(target=fuzz)
    thread.start()
    while thread.is_alive():  # noqa: ASYNC110 - the server lives in this loop
        await asyncio.sleep(0.05)
    thread.join()
    return problems
