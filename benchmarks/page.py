"""Write the results for people: tables for the terminal, and the page of the documentation. Text out, no I/O."""

from collections.abc import Iterable, Sequence

from benchmarks import loaded, targets, workloads
from benchmarks.plot import show
from benchmarks.results import Results
from benchmarks.workloads import Metric

Table = list[list[str]]
_NONE = "–"

METRICS: tuple[Metric, ...] = tuple(metric for load in workloads.contest(workloads.FULL) for metric in load.metrics)
PLOTTED = tuple(metric for metric in METRICS if not metric.name.endswith("_p99"))
_GROWTH = tuple(metric for load in workloads.growth(workloads.FULL) for metric in load.metrics)
_COSTS = tuple(metric for load in workloads.costs(workloads.FULL) for metric in load.metrics)
_CPU = {"add_one_by_one": "add one by one", "add_in_flight": "adds in flight", "add_bulk": "bulk add"} | {
    "drain_one": "drain, one process",
    "drain_two": "drain, two processes",
    "io": "I/O handlers",
    "retries": "retries",
}


def comparison(results: Results) -> Table:
    """One row per metric: ours, Node's, the fastest Python peer's, and the ratios."""
    table = [["", "unit", "bullpen", "Node", "fastest Python peer", "against Node", "against Python"]]
    for metric in METRICS:
        if metric.name not in results.medians:
            continue
        ours = results.ours(metric.name, more_is_better=metric.more_is_better)
        node = results.node(metric.name)
        python = results.fastest_python(metric.name, more_is_better=metric.more_is_better)
        table.append(
            [
                metric.title,
                metric.unit,
                show(ours[1], metric.unit) if ours else _NONE,
                show(node[1], metric.unit) if node else _NONE,
                f"{show(python[1], metric.unit)} ({python[0]})" if python else _NONE,
                f"{ours[1] / node[1]:.2f}x" if ours and node and node[1] else _NONE,
                f"{ours[1] / python[1]:.2f}x" if ours and python and python[1] else _NONE,
            ]
        )
    return table


def everybody(results: Results) -> Table:
    """One row per metric, one column per contestant."""
    names = [entrant.name for entrant in results.entrants]
    table = [["", "unit", *names]]
    for metric in METRICS:
        measured = results.medians.get(metric.name, {})
        if measured:
            cells = [show(measured[name], metric.unit) if name in measured else _NONE for name in names]
            table.append([metric.title, metric.unit, *cells])
    return table


def cpu(results: Results) -> Table:
    """Microseconds of CPU per job, client and server."""
    names = [entrant.name for entrant in results.entrants]
    table = [["µs per job, client / server", *names]]
    for load, title in _CPU.items():
        client, server = results.client_us.get(load, {}), results.server_us.get(load, {})
        if client:
            cells = [f"{client[name]:.0f} / {server[name]:.0f}" if name in client else _NONE for name in names]
            table.append([title, *cells])
    return table


def floor(results: Results) -> Table:
    table = [["server µs per job, batches of 50", "add", "take and settle", "life"]]
    for name, title in (("minimal", "minimal scripts"), ("ours", "bullpen")):
        if name in results.floor:
            each = results.floor[name]
            table.append([title, *(f"{each[part]:.1f}" for part in ("add", "take_and_settle", "life"))])
    return table


def our_own(results: Results, metrics: Iterable[Metric]) -> Table:
    table = [["", "jobs/s"]]
    for metric in metrics:
        ours = results.ours(metric.name, more_is_better=True)
        if ours:
            table.append([metric.title, show(ours[1], "jobs/s")])
    return table


def loaded_latencies(results: Results) -> Table:
    table = [["", "p50 ms", "p99 ms", "limit ms"]]
    for name, limit in loaded.LIMITS_MS.items():
        if name in results.loaded:
            found = results.loaded[name]
            table.append([loaded.TITLES[name], f"{found['p50']:.2f}", f"{found['p99']:.2f}", f"{limit:.0f}"])
    return table


def verdicts(results: Results) -> Table:
    return [
        ["target", "found", "wanted", ""],
        *([each.title, each.found, each.wanted, each.word] for each in targets.judge(results)),
    ]


SERVICES = "Options, large payloads and idle queues"


def sections(results: Results) -> list[tuple[str, Table]]:
    """All tables that have at least one row."""
    many = f"{loaded.ACTIVE:,} active and {loaded.WAITING:,} waiting jobs"
    made = [
        ("Compared", comparison(results)),
        ("Everybody", everybody(results)),
        ("CPU time", cpu(results)),
        ("The floor", floor(results)),
        ("Growth", our_own(results, _GROWTH)),
        ("What promises cost", our_own(results, _COSTS)),
        (f"Latencies beside {many}", loaded_latencies(results)),
        (SERVICES, results.services),
        ("Targets", verdicts(results)),
    ]
    return [(title, table) for title, table in made if len(table) > 1]


def terminal(results: Results) -> str:
    return "\n\n".join(f"{title}\n\n{_aligned(table)}" for title, table in sections(results))


def _aligned(table: Table) -> str:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    lines = []
    for row in table:
        cells = [
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


# ---- the page of the documentation ------------------------------------------------------------------------------

_WORDS = {
    SERVICES: (
        "bullpen (asyncio) and npm `bullmq` in turn on one server. Own options: attempts, delay, priority and an id "
        "for each job. Rates are medians; of CPU times the least of all rounds is shown."
    ),
    "Compared": (
        "bullpen at its best (uvloop where installed) beside npm `bullmq` and the fastest Python library of each line. "
        "A ratio above 1 is better for rates, below 1 for times and memory. A dash: the library does not offer it."
    ),
    "Everybody": "Medians of each library at its best settings.",
    "CPU time": "What one job costs the process that adds or handles it, and the server.",
    "The floor": (
        "The minimal scripts write what other BullMQ clients must see and check nothing; nobody should use them. The "
        "distance to them is what guards and features cost on the server."
    ),
    "Growth": "The same drain of no-op jobs beside ever more other jobs. Equal numbers are the goal.",
    "What promises cost": (
        "The same work with and without. Without guards a lost reply would lose or double jobs; the switch exists only "
        "in the benchmark. A crowd shares one confirmation of the disk, so 100 adds in flight are far ahead of one by "
        "one."
    ),
    "Targets": (
        "What we hold ourselves to, and whether this run shows it. Memory cannot be much below that of npm `bullmq`: a "
        "waiting job has the same six fields, because every client reads them, and a completed one of ours also names "
        "its worker. A setting of the server saves 40 % of it for both ([capacity](operate/capacity.md))."
    ),
}


def markdown(results: Results) -> str:
    """The page, made from stored results alone: the same results always give the same page."""
    machine = results.machine
    short = " This was a short run, with few jobs: expect noise." if results.form == "quick" else ""
    if results.in_parts:
        short += " Its parts were measured one after the other, within hours."
    if float(machine["load"]) > float(machine["cores"]):
        short += f" Other work kept the machine busy meanwhile (load average {machine['load']}): expect much noise."
    parts = [
        "# Performance",
        "<!-- Written by `python -m benchmarks` from performance.json; edits are lost. -->",
        (
            f"Measured on {results.date} on a machine with {machine['cores']} cores ({machine['system']}), Python "
            f"{machine['python']}, Node {machine['node']}, server {machine['server']} on loopback, which shares the "
            f"cores with its clients. Medians of {results.rounds_taken} interleaved rounds; drains have "
            f"{results.jobs:,} jobs with 100 bytes of data, fewer for slow libraries.{short} Absolute numbers move "
            "with the machine; ratios of one run are what counts."
        ),
        "![All results as bars](performance.svg)",
    ]
    for title, table in sections(results):
        words = _WORDS.get(title, "") + (f" Measured on {results.services_when}." if title == SERVICES else "")
        parts += [f"## {title}", words, _markdown_table(table)]
    parts += ["## How it is measured", _HOW, "## Repeat it", _REPEAT, "## Measure your own server", _YOURS]
    return "\n\n".join(part for part in parts if part) + "\n"


_HOW = """\
Producers and workers are processes of their own, started before the clock and let go together. A drain is timed from
the first handler that starts to the last job that the library reports as done; for BullMQ clients that is the server's
confirmation, for others the end of the handler, which flatters them a little. Latencies are taken on an idle queue
with 3 ms between two jobs. CPU-bound handlers use 5 ms of CPU each, in two processes with one job at a time each; and
in two children of one worker, which costs more and can be killed, for libraries that have that. Delayed jobs are all
due at one instant. Memory is the server's, with all completed jobs kept. On a virtual machine a measurement during
which its host gave more than 5 % of the wanted processor time to others is repeated, up to three times; the least
disturbed counts.

After each run of ours the ids that were added are compared with those completed, and the structures of all queues are
checked; one more run keeps all events and reads the life of every job from them. A library that loses jobs gets no
time.

Every library runs at the best settings we found: hiredis and uvloop where it can use them, results off unless asked
for, polling intervals shortened, concurrency chosen by trying."""

_REPEAT = """\
`make bench` installs all libraries into environments of their own under `.venvs` and runs everything, which takes more
than an hour; `.venv/bin/python -m benchmarks --quick` takes minutes. `--only drain_one latency` and `--contestants
bullpen node` choose; `--help` tells the rest. `.venv/bin/python -m benchmarks.lateness` measures how late delayed
jobs, retries and scheduler runs begin on an idle queue, `.venv/bin/python -m benchmarks.services` the adds with
options, the large payloads and the idle queues.

What does not depend on time is guarded by tests: the commands that the server runs per job, and the instructions of our
own code per job, are compared with recorded numbers."""

_YOURS = """\
    bullpen bench --redis redis://cache.example.com:6379

It measures round trip, adds, no-op jobs and latency of bullpen alone, on a queue with a random name that is removed
afterwards, also after Ctrl-C. What went in is compared with what came out. A server that holds data is used only after
a question (`--yes` answers it), one without room below its `maxmemory` not at all. `--jobs`, `--concurrency` and
`--payload` change the sizes; `--json` prints one document."""


def _markdown_table(table: Table) -> str:
    head, *rows = table
    rule = [" --- " if at == 0 else " ---: " for at in range(len(head))]
    return "\n".join([_row(head), f"|{'|'.join(rule)}|", *map(_row, rows)])


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
