"""What a handler of runs is: its name, its queue, its price, its limits and its retries.

In: options, checked once. Out: `RunOptions`, and a `RunRoute` for each name: what submitting, running and looking after
runs of that handler need. No I/O but making queue objects.
Elsewhere: registering handlers (`runs`), submitting (`service`), running (`processor`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, Final, TypedDict

from bullpen._kernel import json
from bullpen._kernel.breaker import CircuitBreaker
from bullpen._kernel.duration import check_int, to_ms
from bullpen._kernel.policy import WORKFLOW_RUN, RetryPolicy
from bullpen.errors import InvalidOption, require
from bullpen.ledger import check_tenant
from bullpen.queue import Queue
from bullpen.runs.payload import RunPayload
from bullpen.runs.providers import Provider
from bullpen.worker.auto import AutoConcurrency, Concurrency, read_concurrency

__all__ = [
    "MAX_RESULT_BYTES",
    "QUEUE",
    "HandlerOptions",
    "Price",
    "Routes",
    "RunArguments",
    "RunOptions",
    "RunRoute",
    "job_options",
    "queue_for",
]

QUEUE: Final = "workflow-execution"
MAX_RESULT_BYTES: Final = 1024 * 1024
"""A result is a receipt, not a file."""

Price = int | Callable[[RunPayload], int]

_is_name = re.compile(r"[a-z0-9][a-z0-9_.-]{0,59}").fullmatch
_AUTO: Final = AutoConcurrency(most=100)
_LETTERS: Final = "-dlq"
_OURS: Final = frozenset({"dead_letters", "retry_owner"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How runs are run. A named handler begins with those of the app, at a concurrency of 20 and without a breaker."""

    concurrency: Concurrency = 100
    """Runs handled at the same time by one worker (WORKER_CONCURRENCY; 20 for handlers with a name). `"auto"`: as many
    as event loop and memory can take, at most 100; `AutoConcurrency` says another bound."""
    lock: int | timedelta = WORKFLOW_RUN.lock_ms or 300_000
    """How long a run stays with a worker that died. Renewed while a handler works, so a short one is safe."""
    stalled_interval: int | timedelta = 10_000
    """How often to check for runs of dead workers: after a crash another worker has the run within `lock` plus
    twice this."""
    timeout: int | timedelta | None = None
    """How long one attempt may take; longer is a failed attempt. None: as long as it takes."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """Attempts, pauses and permanent errors. What it does not name: 3 attempts, 5 s doubling."""
    price: Price = 0
    """What a run costs in credits when `submit` does not say: a number, or a function of the payload."""
    max_payload_bytes: int = json.MAX_PAYLOAD_BYTES
    """Of the payload as JSON; at most 10 MiB."""
    max_result_bytes: int = MAX_RESULT_BYTES
    """Of what the handler returns, as JSON; at most 1 MiB."""
    rate_limit_rpm: int | None = None
    """Runs started per minute, over all workers; None: as many as come."""
    providers: Mapping[str, Provider] = field(default_factory=dict)
    """What runs may call (`run.provider(name)`), each with its limits."""
    breaker: CircuitBreaker | None = field(default=None, compare=False)
    """When handlers only fail, stop taking runs for a while; None: never."""
    lane_per_tenant: bool = True
    """Tenants share the queue: who submits much does not keep the others waiting. False: all wait in one line."""
    heartbeat_ms: int = 15_000
    """How often a running run shows that it lives, and notices that it was cancelled."""
    patience_ms: int = 60_000
    """How long finished work waits for an unreachable database before the run goes back to the queue."""
    idle_ms: int = 60_000
    """How long a run must be without progress before maintenance checks it. More than a heartbeat."""
    sweep_every_ms: int = 30_000
    """How often maintenance runs."""

    def __post_init__(self) -> None:
        read_concurrency(self.concurrency)
        for name in ("heartbeat_ms", "patience_ms", "sweep_every_ms"):
            check_int(name, getattr(self, name), minimum=1)
        check_int("idle_ms", self.idle_ms, minimum=0)
        check_int("max_payload_bytes", self.max_payload_bytes, minimum=1, maximum=json.MAX_PAYLOAD_BYTES)
        check_int("max_result_bytes", self.max_result_bytes, minimum=1, maximum=MAX_RESULT_BYTES)
        if self.rate_limit_rpm is not None:
            check_int("rate_limit_rpm", self.rate_limit_rpm, minimum=1)
        if self.timeout is not None:
            to_ms("timeout", self.timeout, minimum=1)
        require("lane_per_tenant", isinstance(self.lane_per_tenant, bool), "True or False", self.lane_per_tenant)
        if not callable(self.price):
            check_int("price", self.price, minimum=0)
        require("retry", isinstance(self.retry, RetryPolicy), "a RetryPolicy", self.retry)
        # The row of a run follows the dead-letter queue of its job: neither can be elsewhere.
        fixed = sorted(self.retry.named & _OURS)
        require("retry", not fixed, "attempts, backoff and permanent errors only", ", ".join(fixed))

    @property
    def own_concurrency(self) -> int | AutoConcurrency:
        """What the worker gets: `"auto"` with a bound that fits the pool of connections that nobody has configured."""
        return _AUTO if self.concurrency == "auto" else read_concurrency(self.concurrency)

    @property
    def policy(self) -> RetryPolicy:
        """The whole policy: what `retry` names, and what holds for all runs."""
        return self.retry.over(WORKFLOW_RUN.policy)


class _Common(TypedDict, total=False):
    concurrency: Concurrency
    lock: int | timedelta
    stalled_interval: int | timedelta
    timeout: int | timedelta | None
    retry: RetryPolicy
    price: Price
    max_payload_bytes: int
    max_result_bytes: int
    rate_limit_rpm: int | None
    providers: Mapping[str, Provider]
    breaker: CircuitBreaker | None
    lane_per_tenant: bool
    heartbeat_ms: int
    patience_ms: int


class RunArguments(_Common, total=False):
    """What `app.runs.configure` takes: the fields of `RunOptions`, which says what each does."""

    sweep_every_ms: int
    idle_ms: int


class HandlerOptions(_Common, total=False):
    """Keywords of `@app.runs.handler("name", …)`: fields of `RunOptions`, and where its runs go."""

    queue: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRoute:
    """Where runs of one handler go, and how."""

    name: str | None = None
    """None: the handler without a name."""
    queue: Queue
    options: RunOptions = field(default_factory=RunOptions)

    def job_options(self, tenant_id: str) -> dict[str, Any]:
        """The options of the job of a run."""
        lane = {"lane": check_tenant(tenant_id)} if self.options.lane_per_tenant else {}
        return {**job_options(self.options.policy), **lane}

    def cost_of(self, payload: RunPayload) -> int:
        """The price of a run, by the handler's own rule."""
        price = self.options.price
        return check_int("price", price(payload) if callable(price) else price, minimum=0)


def queue_for(name: str) -> str:
    """The queue of a named handler without a queue of its own. Raises InvalidOption for an invalid name."""
    fits = isinstance(name, str) and _is_name(name) is not None and not name.endswith(_LETTERS)
    require("handler", fits, "a name of 1 to 60 of a-z, 0-9, '_', '.', '-' that does not end in '-dlq'", name)
    return f"{QUEUE}.{name}"


def job_options(policy: RetryPolicy = WORKFLOW_RUN.policy) -> dict[str, Any]:
    """The options of a run's job: attempts 3, exponential from 5 s, the last 100 completed and all failed are kept."""
    preset = WORKFLOW_RUN
    return {
        "attempts": policy.attempts,
        "backoff": policy.backoff,
        "remove_on_complete": False if preset.keep_completed is None else preset.keep_completed,
        "remove_on_fail": False if preset.keep_failed is None else preset.keep_failed,
    }


class Routes:
    """The handlers that a process knows, by name; `None` is the one without a name and always there."""

    def __init__(self, queue: Queue, options: RunOptions | None = None) -> None:
        self._main = queue
        self._by_name: dict[str | None, RunRoute] = {None: RunRoute(queue=queue, options=options or RunOptions())}
        self._queues: dict[str, Queue] = {queue.name: queue}

    def set(self, name: str | None, queue: str | None, options: RunOptions) -> RunRoute:
        """Declare a handler, or change the one without a name. Raises InvalidOption for what cannot be told apart."""
        if name is None:
            require("queue", queue is None, f"a handler with a name; the one without works on {QUEUE!r}", queue)
            route = replace(self._by_name[None], options=options)
        else:
            wanted = queue_for(name) if queue is None else queue
            known = self._by_name.get(name)
            others = {each.queue.name: each for each in self._by_name.values() if each.name != name}
            require("queue", wanted not in others, "a queue that no other handler of this app uses", wanted)
            letters = {f"{each}{_LETTERS}" for each in (*others, wanted)}
            require("queue", wanted not in letters, "no dead-letter queue", wanted)
            require("handler", known is None or known.queue.name == wanted, "one queue for a name", name)
            route = RunRoute(name=name, queue=self.queue(wanted), options=options)
        self._by_name[name] = route
        return route

    def get(self, name: str | None) -> RunRoute:
        """Raises InvalidOption for an undeclared handler."""
        route = self._by_name.get(name)
        if route is None:
            known = ", ".join(sorted(each for each in self._by_name if each is not None))
            raise InvalidOption(
                "handler", f"one that this app registers or declares ({known or 'there is none'})", name
            )
        return route

    @property
    def all(self) -> tuple[RunRoute, ...]:
        """The one without a name first."""
        return tuple(self._by_name.values())

    def queue(self, name: str | None) -> Queue:
        """The queue that a run's row names, whether or not its handler is known here."""
        found = self._queues.get(name or QUEUE)
        if found is None:
            main = self._main
            found = Queue(name or QUEUE, connection=main.connection, prefix=main.keys.prefix, **job_options())
            self._queues[found.name] = found
        return found

    async def aclose(self) -> None:
        """Close all queues."""
        for queue in self._queues.values():
            await queue.close()
