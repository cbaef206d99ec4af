"""A process that sends the first dead letter of a source on its way again, and may be killed while it does.

Arguments: `module:function` that makes a transport from keyword arguments, those arguments as JSON, the source.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from typing import Any


async def main(factory: str, arguments: dict[str, Any], source: str) -> None:
    module, _, name = factory.partition(":")
    transport = getattr(importlib.import_module(module), name)(**arguments)
    store = transport.dead_letters(source)
    (letter,) = await store.list()
    print("redriven", await store.redrive(letter.id), flush=True)
    await transport.aclose()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]))
