"""What a whole benchmark found, as plain values that can be stored as JSON and read again. No I/O."""

import statistics
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.arena import Outcome
from benchmarks.contestants import NODE, OURS, PYTHON


@dataclass(frozen=True)
class Entrant:
    """A contestant as the reader sees it."""

    name: str
    camp: str
    version: str = ""
    blocks: bool = False


@dataclass
class Results:
    """Everything that is published. Medians by metric and contestant; rates per second, times as the metric says."""

    date: str
    machine: dict[str, str]
    form: str
    """full or quick."""
    rounds: int
    jobs: int
    """Of a drain."""
    entrants: list[Entrant] = field(default_factory=list)
    medians: dict[str, dict[str, float]] = field(default_factory=dict)
    client_us: dict[str, dict[str, float]] = field(default_factory=dict)
    """CPU microseconds per job by workload and contestant."""
    server_us: dict[str, dict[str, float]] = field(default_factory=dict)
    floor: dict[str, dict[str, float]] = field(default_factory=dict)
    """Server microseconds per job: `minimal` and `ours`, of `add`, `take_and_settle` and `life`."""
    loaded: dict[str, dict[str, float]] = field(default_factory=dict)
    """Milliseconds p50 and p99 of the four latencies."""
    failures: list[str] = field(default_factory=list)
    """Measurements that gave no number, and why."""
    in_parts: bool = False
    """Parts were measured at different times: ratios between them mean less."""
    rounds_of: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Every single value behind the medians."""
    services: list[list[str]] = field(default_factory=list)
    """What `benchmarks.services` found, as the table that is shown."""
    services_when: str = ""

    def add(self, workload: str, contestant: str, outcomes: list[Outcome]) -> None:
        """Take the medians of one contestant's rounds at one workload."""
        for metric in {name for outcome in outcomes for name in outcome.metrics}:
            values = [outcome.metrics[metric] for outcome in outcomes if metric in outcome.metrics]
            self.medians.setdefault(metric, {})[contestant] = statistics.median(values)
            self.rounds_of.setdefault(metric, {})[contestant] = values
        for store, name in ((self.client_us, "client_us"), (self.server_us, "server_us")):
            times = [value for outcome in outcomes if (value := getattr(outcome, name)) is not None]
            if times:
                store.setdefault(workload, {})[contestant] = statistics.median(times)

    def replace_with(self, newer: "Results") -> None:
        """Take over what a later run has measured again."""
        known = {entrant.name for entrant in self.entrants}
        self.entrants += [entrant for entrant in newer.entrants if entrant.name not in known]
        for name in ("medians", "client_us", "server_us", "rounds_of", "floor", "loaded"):
            ours, theirs = getattr(self, name), getattr(newer, name)
            for key, values in theirs.items():
                ours.setdefault(key, {}).update(values)
        self.failures += newer.failures
        self.in_parts = True
        self.date, self.machine = newer.date, newer.machine

    def of_camp(self, metric: str, camp: str, *, blocking: bool | None = None) -> dict[str, float]:
        """The medians of one camp's contestants, of those that block only if asked so."""
        measured = self.medians.get(metric, {})
        return {
            entrant.name: measured[entrant.name]
            for entrant in self.entrants
            if entrant.camp == camp and entrant.name in measured and blocking in (None, entrant.blocks)
        }

    def ours(self, metric: str, *, more_is_better: bool, blocking: bool = False) -> tuple[str, float] | None:
        """Our best contestant and its median."""
        return best(self.of_camp(metric, OURS, blocking=blocking), more_is_better=more_is_better)

    def node(self, metric: str) -> tuple[str, float] | None:
        return best(self.of_camp(metric, NODE), more_is_better=True)

    def fastest_python(
        self, metric: str, *, more_is_better: bool, blocking: bool | None = None
    ) -> tuple[str, float] | None:
        return best(self.of_camp(metric, PYTHON, blocking=blocking), more_is_better=more_is_better)

    @property
    def rounds_taken(self) -> str:
        """How many rounds stand behind the medians, such as `3` or `1 to 3`."""
        taken = sorted({len(values) for each in self.rounds_of.values() for values in each.values()} or {self.rounds})
        return str(taken[0]) if len(taken) == 1 else f"{taken[0]} to {taken[-1]}"

    def to_json(self) -> dict[str, Any]:
        rounded: dict[str, Any] = _rounded(asdict(self))
        return rounded

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "Results":
        return cls(**{**stored, "entrants": [Entrant(**entrant) for entrant in stored["entrants"]]})


def best(measured: dict[str, float], *, more_is_better: bool) -> tuple[str, float] | None:
    choose = max if more_is_better else min
    return choose(measured.items(), key=lambda pair: pair[1]) if measured else None


def medians_of(rounds: Iterable[dict[str, float]]) -> dict[str, float]:
    """The median of each name over several dictionaries with the same names."""
    collected = list(rounds)
    return {name: statistics.median(each[name] for each in collected) for name in collected[0]}


def _rounded(value: Any) -> Any:
    """Four digits are more than the noise leaves."""
    match value:
        case float():
            return float(f"{value:.4g}") if abs(value) < 1000 else float(round(value))
        case dict():
            return {key: _rounded(each) for key, each in value.items()}
        case list():
            return [_rounded(each) for each in value]
        case _:
            return value
