"""A program with arq as it was before; with SHOP_FORWARD its worker adds jobs of bullpen instead."""

import asyncio
import os
import sys
from datetime import timedelta

from arq import Retry, create_pool, run_worker
from arq.connections import RedisSettings
from arq.worker import func

import shop

SERVER = RedisSettings.from_dsn(os.environ["SHOP_REDIS"])


async def send_receipt(ctx: dict, number: int, to: str = "ada") -> str:
    if shop.is_first_try(number):
        raise Retry(defer=0.1)
    shop.write_down("arq", number)
    return f"receipt {number} to {to}"


class WorkerSettings:
    redis_settings = SERVER
    functions = [func(send_receipt, name="send_receipt")]
    poll_delay = 0.05
    on_startup = staticmethod(lambda ctx: asyncio.sleep(0, print("ready", flush=True)))


if os.environ.get("SHOP_FORWARD"):
    from bullpen.compat.arq import forwarding_functions

    WorkerSettings.functions = forwarding_functions({"send_receipt": shop.send_receipt})


async def produce(first: int, last: int) -> None:
    pool = await create_pool(SERVER)
    for number in range(first, last):
        later = {"_defer_by": timedelta(seconds=1)} if number % 7 == 0 else {}
        await pool.enqueue_job("send_receipt", number, to="grace", **later)
    await pool.aclose()


if __name__ == "__main__":
    if sys.argv[1] == "work":
        run_worker(WorkerSettings)
    else:
        asyncio.run(produce(int(sys.argv[1]), int(sys.argv[2])))
