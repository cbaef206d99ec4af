"""A program with RQ as it was before; with SHOP_FORWARD its worker adds jobs of bullpen instead."""

import os
import sys
from datetime import timedelta

import redis
from rq import Queue, Retry, SimpleWorker
from rq.job import Job

import shop

connection = redis.Redis.from_url(os.environ["SHOP_REDIS"])


def send_receipt(number: int, to: str = "ada") -> str:
    if shop.is_first_try(number):
        raise ConnectionError("try again")
    shop.write_down("rq", number)
    return f"receipt {number} to {to}"


def work(name: str) -> None:
    job_class: type[Job] = Job
    if os.environ.get("SHOP_FORWARD"):
        from bullpen.compat.rq import forwarding_job

        job_class = forwarding_job({"rq_shop.send_receipt": shop.send_receipt})
    queue = Queue("default", connection=connection, job_class=job_class)
    print("ready", flush=True)
    SimpleWorker([queue], name=name, connection=connection, job_class=job_class).work(with_scheduler=True)


def produce(first: int, last: int) -> None:
    import rq_shop

    queue = Queue("default", connection=connection)
    for number in range(first, last):
        given = {"args": (number,), "kwargs": {"to": "grace"}, "retry": Retry(max=5)}
        if number % 7 == 0:
            queue.enqueue_in(timedelta(seconds=1), rq_shop.send_receipt, **given)
        else:
            queue.enqueue(rq_shop.send_receipt, **given)


if __name__ == "__main__":
    if sys.argv[1] == "work":
        work(sys.argv[2])
    else:
        produce(int(sys.argv[1]), int(sys.argv[2]))
