"""Found by itself: nothing imports it."""

from bullpen.integrations.django import app

from .models import Order

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task


@app.task("emails", attempts=1)
def send_receipt(order: int) -> str:
    """In a thread, with a connection of that thread."""
    found = Order.objects.get(pk=order)
    found.receipts += 1
    found.save()
    return found.email


@app.task("async-emails", attempts=1)
async def send_receipt_async(order: int) -> str:
    """On the loop, with the connection that Django uses for it."""
    found = await Order.objects.aget(pk=order)
    return found.email


@task
def add(first: int, second: int = 1) -> int:
    return first + second


@task(takes_context=True, queue_name="reports", priority=10)
def attempt(context) -> int:
    return context.attempt


@task
async def wait() -> str:
    return "waited"


@task
def fail() -> None:
    raise ValueError("no such report")
