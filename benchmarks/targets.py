"""What the benchmark must show, and whether it does. No I/O."""

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks import loaded
from benchmarks.contestants import NODE, OURS
from benchmarks.results import Results, best


@dataclass(frozen=True)
class Target:
    """A bound on our best result divided by somebody else's; None: no bound."""

    metric: str
    title: str
    more_is_better: bool
    against_node: float | None
    against_python: float | None


CONTEST = (
    Target("add_one_by_one", "add one by one", True, 1.2, None),
    Target("add_in_flight", "100 adds in flight", True, 1.5, 3.5),
    Target("add_bulk", "bulk add", True, 3.0, 3.5),
    Target("drain_one", "drain no-op jobs, one process", True, 2.0, 6.0),
    Target("drain_two", "drain no-op jobs, two processes", True, 3.0, 5.0),
    Target("io", "10 ms I/O handlers, concurrency 200", True, 1.4, 3.0),
    Target("latency_start_p50", "idle queue: add → handler starts, p50", False, 0.45, 0.9),
    Target("latency_result_p50", "idle queue: add → result visible, p50", False, 0.4, 0.6),
    Target("delayed", "delayed jobs due at one instant: due → last started", False, 0.5, 0.25),
    Target("retries", "jobs that fail once, no backoff", True, 2.0, 4.0),
    Target("memory_waiting", "server memory per waiting job", False, 0.97, None),
    Target("memory_completed", "server memory per completed job", False, 0.97, None),
)
LIFE_AGAINST_FLOOR = 1.25
CLIENT_US_PER_JOB = 22.0
CLIENT_AGAINST_NODE = 0.47
"""The bound above was set on a machine where Node needs 47 µs; this is the same on a slower or a faster one."""
GROWTH = 0.9
GUARDED_SHARE = 0.9


@dataclass(frozen=True)
class Verdict:
    """One line of the table. `holds` is None when there is nothing to compare with."""

    title: str
    found: str
    wanted: str
    holds: bool | None

    @property
    def word(self) -> str:
        return {True: "holds", False: "does not hold", None: "not measured"}[self.holds]


def judge(results: Results) -> list[Verdict]:
    """All targets, in the order of the workloads."""
    return [
        *(verdict for target in CONTEST for verdict in _contest(results, target)),
        _blocking_add(results),
        _floor(results),
        *_client(results),
        _growth(results),
        *_guards(results),
        *_latencies(results),
    ]


def _contest(results: Results, target: Target) -> Iterator[Verdict]:
    ours = results.ours(target.metric, more_is_better=target.more_is_better)
    rivals = (
        (target.against_node, "Node", results.node(target.metric)),
        (
            target.against_python,
            "the fastest Python peer",
            results.fastest_python(target.metric, more_is_better=target.more_is_better),
        ),
    )
    for bound, rival, theirs in rivals:
        if bound is not None:
            yield _ratio(f"{target.title}, against {rival}", ours, theirs, bound, at_least=target.more_is_better)


def _blocking_add(results: Results) -> Verdict:
    ours = results.ours("add_one_by_one", more_is_better=True, blocking=True)
    theirs = results.fastest_python("add_one_by_one", more_is_better=True, blocking=True)
    return _ratio("add one by one, blocking, against the fastest blocking peer", ours, theirs, 1.0, at_least=True)


def _floor(results: Results) -> Verdict:
    minimal, ours = results.floor.get("minimal"), results.floor.get("ours")
    return _ratio(
        "server CPU per job life, against minimal scripts",
        ("ours", ours["life"]) if ours else None,
        ("minimal", minimal["life"]) if minimal else None,
        LIFE_AGAINST_FLOOR,
        at_least=False,
    )


def _client(results: Results) -> Iterator[Verdict]:
    title, wanted = "client CPU per no-op job in a drain", f"≤ {CLIENT_US_PER_JOB:.0f} µs"
    ours, node = (
        best(
            {
                name: value
                for name, value in results.client_us.get("drain_one", {}).items()
                if name in results.of_camp("drain_one", camp)
            },
            more_is_better=False,
        )
        for camp in (OURS, NODE)
    )
    if ours is None:
        yield Verdict(title, "–", wanted, None)
    else:
        yield Verdict(title, f"{ours[1]:.1f} µs", wanted, ours[1] <= CLIENT_US_PER_JOB)
    yield _ratio(f"{title}, against Node", ours, node, CLIENT_AGAINST_NODE, at_least=False)


def _growth(results: Results) -> Verdict:
    sizes = sorted(int(name.removeprefix("growth_")) for name in results.medians if name[7:].isdigit())
    if len(sizes) < 2:
        return Verdict("drain with many more waiting, against 10,000", "–", f"≥ {GROWTH:.2f}x", None)
    few, many = (results.ours(f"growth_{size}", more_is_better=True) for size in (sizes[0], sizes[-1]))
    title = f"drain with {sizes[-1]:,} more waiting, against {sizes[0]:,}"
    return _ratio(title, many, few, GROWTH, at_least=True)


def _guards(results: Results) -> Iterator[Verdict]:
    for kind, title in (("drain", "drain with guards, against without"), ("add", "adds with guards, against without")):
        with_guards, without = (
            results.ours(f"{word}_{kind}", more_is_better=True) for word in ("guarded", "unguarded")
        )
        yield _ratio(title, with_guards, without, GUARDED_SHARE, at_least=True)


def _latencies(results: Results) -> Iterator[Verdict]:
    for name, limit in loaded.LIMITS_MS.items():
        title = f"{loaded.TITLES[name]}, {loaded.ACTIVE:,} active and {loaded.WAITING:,} waiting, p99"
        found = results.loaded.get(name)
        holds = None if found is None else found["p99"] < limit
        yield Verdict(title, "–" if found is None else f"{found['p99']:.2f} ms", f"< {limit:.0f} ms", holds)


def _ratio(
    title: str, ours: tuple[str, float] | None, theirs: tuple[str, float] | None, bound: float, *, at_least: bool
) -> Verdict:
    wanted = f"{'≥' if at_least else '≤'} {bound:.2f}x"
    if ours is None or theirs is None or not theirs[1]:
        return Verdict(title, "–", wanted, None)
    ratio = ours[1] / theirs[1]
    return Verdict(title, f"{ratio:.2f}x", wanted, ratio >= bound if at_least else ratio <= bound)
