"""A process that receives deliveries, says so, and waits to be killed. Started by `transport.die_holding_one`.

Arguments: `module:function` that makes a transport from keyword arguments, those arguments as JSON, the source, and how
many deliveries to fail (with an immediate retry) before the one it holds when it dies.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from typing import Any

from bullpen._kernel.outcome import Retry


async def main(factory: str, arguments: dict[str, Any], source: str, failures: int) -> None:
    module, _, name = factory.partition(":")
    transport = getattr(importlib.import_module(module), name)(**arguments)
    count = 0
    async for delivery in await transport.deliveries(source, prefetch=1):
        sys.stdout.write(json.dumps({"id": delivery.id, "attempt": delivery.attempt}) + "\n")
        sys.stdout.flush()
        if count < failures:
            await transport.settle(delivery, Retry("failed before it was killed", "", 0))
            count += 1


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3], int(sys.argv[4])))
