"""bullpen in Django: `INSTALLED_APPS = [..., "bullpen.integrations.django"]`.

    # tasks.py of any application
    from bullpen.integrations.django import app

    @app.task("emails", attempts=5)
    def send_receipt(order: int) -> None: ...

    # a view
    with transaction.atomic():
        order.save()
        add_in_transaction(send_receipt, order=order.pk)

The modules `tasks` of all installed applications are imported at the start. `manage.py bullpen_worker` runs the jobs.
Needs the package `django`. Elsewhere: the settings (`_options`), Django's own tasks (`backend`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from bullpen._kernel.lazy import lazy
from bullpen.queue.tasks import StoredInTransaction, Task

if TYPE_CHECKING:
    from bullpen.integrations.django._app import app

__all__ = ["add_in_transaction", "add_on_commit", "app"]

P = ParamSpec("P")
R = TypeVar("R")


def add_on_commit(task: Task[P, R], /, *args: P.args, **kwargs: P.kwargs) -> None:
    """Add a run when the transaction has committed; at once outside of one. Arguments are checked now.

    A process that dies between the commit and the add loses the run: `add_in_transaction` does not.
    """
    from django.db import transaction

    from bullpen.integrations.django._options import options

    task.call(*args, **kwargs)
    transaction.on_commit(partial(task.add_sync, *args, **kwargs), using=options().database)


def add_in_transaction(task: Task[P, R], /, *args: P.args, **kwargs: P.kwargs) -> StoredInTransaction:
    """Store a run if and only if the transaction commits. Needs `BULLPEN = {"OUTBOX": "default"}`, and `atomic()`."""
    from django.db import connections

    from bullpen.integrations.django._options import options

    return task.add_in_transaction_sync(connections[options().database], *args, **kwargs)


# Hidden from type checkers, which would otherwise believe that every name exists.
if not TYPE_CHECKING:
    __getattr__ = lazy(__name__, {"bullpen.integrations.django._app": ("app",)})
