"""The new home of the function that moves: a task of bullpen. What has run is written down on the server."""

import os
from functools import cache
from typing import Any

from bullpen import Backoff, Bullpen

app = Bullpen(os.environ["SHOP_REDIS"])
RAN = "shop:ran"


@cache
def book() -> Any:
    """redis-py, which every process here has."""
    import redis

    return redis.Redis.from_url(os.environ["SHOP_REDIS"])


def write_down(library: str, number: int) -> None:
    book().rpush(RAN, f"{library} {number}")


def is_first_try(number: int) -> bool:
    """Every tenth fails once."""
    return number % 10 == 0 and bool(book().sadd("shop:tried", number))


@app.task("receipts", attempts=5, backoff=Backoff.fixed(50))
def send_receipt(number: int, *, to: str = "ada") -> str:
    if is_first_try(number):
        raise ConnectionError("try again")
    write_down("bullpen", number)
    return f"receipt {number} to {to}"
