"""A Celery app as it was before; with SHOP_FORWARD its worker adds jobs of bullpen instead."""

import os
import sys

from celery import Celery

import shop

celery = Celery("shop", broker=os.environ["SHOP_REDIS"], backend=os.environ["SHOP_REDIS"])
celery.conf.update(
    broker_transport_options={"visibility_timeout": int(os.environ.get("SHOP_VISIBILITY_S", "3600"))},
    task_acks_late=True,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
)


@celery.task(name="shop.send_receipt", bind=True)
def send_receipt(self, number: int, to: str = "ada") -> str:
    if shop.is_first_try(number):
        raise self.retry(countdown=0.1)
    shop.write_down("celery", number)
    return f"receipt {number} to {to}"


@celery.task(name="shop.other")
def other(number: int) -> int:
    return number + 1


if os.environ.get("SHOP_FORWARD"):
    from bullpen.compat.celery import forward

    forward(
        celery, {"shop.send_receipt": shop.send_receipt}, wait=60_000 if "wait" in os.environ["SHOP_FORWARD"] else None
    )

if __name__ == "__main__" and sys.argv[1] == "ask":
    print(send_receipt.delay(3, to="grace").get(timeout=60))
    print(other.delay(7).get(timeout=60))
    print(send_receipt.delay(5).get(timeout=60))
elif __name__ == "__main__":
    first, last = map(int, sys.argv[1:3])
    for number in range(first, last):
        later = {"countdown": 1} if number % 7 == 0 else {}
        send_receipt.apply_async((number,), {"to": "grace"}, **later)
