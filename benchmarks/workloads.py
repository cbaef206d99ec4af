"""What is measured, and at which size. No I/O.

A workload says which processes play which roles; a metric is one number that comes out of it. Elsewhere: running it
(`arena`), who takes part (`contestants`).
"""

from dataclasses import dataclass
from typing import Literal

Kind = Literal["add", "drain", "latency", "delayed", "memory"]


@dataclass(frozen=True)
class Metric:
    """One number of a workload, with the words that a reader sees."""

    name: str
    title: str
    unit: str = "jobs/s"
    more_is_better: bool = True


@dataclass(frozen=True)
class Workload:
    """One thing to measure. Fields that a kind does not use keep their defaults."""

    name: str
    kind: Kind
    jobs: int
    metrics: tuple[Metric, ...]
    how: str = "bulk"
    """How jobs are added: one_by_one, in_flight (100 at a time), bulk (500 per call)."""
    handler: str = "noop"
    processes: int = 1
    concurrency: int | None = None
    """None: what suits the contestant best."""
    attempts: int = 1
    left_waiting: int = 0
    """So many jobs more are added than drained."""
    held_active: int = 0
    """So many jobs are held by another worker while the drain is measured."""
    server: str = "plain"
    variant: tuple[str, ...] = ()


@dataclass(frozen=True)
class Sizes:
    """How many jobs. `full` is what is published; `quick` shows in minutes that all works."""

    one_by_one: int = 5_000
    many: int = 20_000
    io: int = 10_000
    cpu: int = 1_000
    asks: int = 1_000
    most_waiting: int = 1_000_000


QUICK = Sizes(one_by_one=500, many=2_000, io=2_000, cpu=200, asks=100, most_waiting=100_000)
FULL = Sizes()


def _rate(name: str, title: str) -> tuple[Metric, ...]:
    return (Metric(name, title),)


def contest(sizes: Sizes) -> list[Workload]:
    """What all contestants do."""
    return [
        Workload(
            "add_one_by_one", "add", sizes.one_by_one, _rate("add_one_by_one", "add one by one"), how="one_by_one"
        ),
        Workload("add_in_flight", "add", sizes.many, _rate("add_in_flight", "100 adds in flight"), how="in_flight"),
        Workload("add_bulk", "add", sizes.many, _rate("add_bulk", "bulk add"), how="bulk"),
        Workload("drain_one", "drain", sizes.many, _rate("drain_one", "drain no-op jobs, one process")),
        Workload("drain_two", "drain", sizes.many, _rate("drain_two", "drain no-op jobs, two processes"), processes=2),
        Workload(
            *("io", "drain", sizes.io, _rate("io", "10 ms I/O handlers, concurrency 200")),
            handler="sleep",
            concurrency=200,
        ),
        Workload(
            *("cpu", "drain", sizes.cpu, _rate("cpu", "5 ms CPU handlers, two processes")),
            handler="burn",
            processes=2,
            concurrency=1,
        ),
        Workload(
            *(
                "cpu_children",
                "drain",
                sizes.cpu,
                _rate("cpu_children", "5 ms CPU handlers, two children of one worker"),
            ),
            handler="burn",
            concurrency=2,
            variant=("processes",),
        ),
        Workload(
            *("latency", "latency", sizes.asks),
            metrics=(
                Metric("latency_start_p50", "idle queue: add → handler starts, p50", "ms", more_is_better=False),
                Metric("latency_start_p99", "idle queue: add → handler starts, p99", "ms", more_is_better=False),
                Metric("latency_result_p50", "idle queue: add → result visible, p50", "ms", more_is_better=False),
                Metric("latency_result_p99", "idle queue: add → result visible, p99", "ms", more_is_better=False),
            ),
            concurrency=10,
            variant=("results",),
        ),
        Workload(
            *("delayed", "delayed", sizes.many),
            (Metric("delayed", "delayed jobs due at one instant: due → last started", "s", more_is_better=False),),
            variant=("delayed",),
        ),
        Workload(
            *("retries", "drain", sizes.io, _rate("retries", "jobs that fail once, no backoff")),
            handler="fail_once",
            attempts=2,
        ),
        Workload(
            *("memory", "memory", sizes.many),
            # The same job from everybody: three attempts, exponential backoff.
            attempts=3,
            variant=("backoff",),
            metrics=(
                Metric("memory_waiting", "server memory per waiting job", "bytes", more_is_better=False),
                Metric("memory_completed", "server memory per completed job", "bytes", more_is_better=False),
            ),
        ),
    ]


def growth(sizes: Sizes) -> list[Workload]:
    """The same drain beside ever more other jobs: only for us, and the rates should be equal."""
    waiting = [count for count in (10_000, 100_000, 1_000_000) if count <= sizes.most_waiting]
    drains = [
        Workload(
            *(f"growth_{count}", "drain", sizes.many, _rate(f"growth_{count}", f"drain with {count:,} more waiting")),
            left_waiting=count,
        )
        for count in waiting
    ]
    active = Workload(
        *("growth_active", "drain", sizes.many, _rate("growth_active", "drain with 10,000 others active")),
        held_active=10_000,
    )
    return [*drains, active]


def costs(sizes: Sizes) -> list[Workload]:
    """What a promise costs: pairs (or more) of the same work with it and without. Only for us."""
    return [
        Workload("guarded_drain", "drain", sizes.many, _rate("guarded_drain", "drain, as it is")),
        Workload(
            *("unguarded_drain", "drain", sizes.many),
            _rate("unguarded_drain", "drain without protection against lost replies and looks before a batch"),
            variant=("unguarded",),
        ),
        Workload(
            "guarded_add", "add", sizes.many, _rate("guarded_add", "100 adds in flight, as they are"), how="in_flight"
        ),
        Workload(
            *("unguarded_add", "add", sizes.many),
            _rate("unguarded_add", "100 adds in flight without protection against lost replies"),
            how="in_flight",
            variant=("unguarded",),
        ),
        Workload(
            *("failures", "drain", sizes.io, _rate("failures", "jobs that fail finally, no dead letters")),
            handler="fail",
        ),
        Workload(
            *("dead_letters", "drain", sizes.io, _rate("dead_letters", "jobs that fail finally, with dead letters")),
            handler="fail",
            variant=("dead_letters",),
        ),
        *(_durable("memory", "plain", sizes, "level memory, server without append-only file")),
        *(_durable("memory_aof", "everysec", sizes, "level memory, appendfsync everysec")),
        *(_durable("fsync_always", "always", sizes, "level fsync, appendfsync always", "fsync")),
        *(_durable("replicated", "replica", sizes, "level replicated(1)", "replicated")),
    ]


def _durable(name: str, server: str, sizes: Sizes, title: str, *variant: str) -> list[Workload]:
    alone, crowd = max(100, sizes.one_by_one // 10), sizes.many // 4
    return [
        Workload(
            *(f"{name}_one_by_one", "add", alone, _rate(f"{name}_one_by_one", f"add one by one, {title}")),
            how="one_by_one",
            server=server,
            variant=variant,
        ),
        Workload(
            *(f"{name}_in_flight", "add", crowd, _rate(f"{name}_in_flight", f"100 adds in flight, {title}")),
            how="in_flight",
            server=server,
            variant=variant,
        ),
    ]
