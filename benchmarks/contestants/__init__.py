"""Who takes part: a program each, and the settings at which it is fastest.

Python peers live in environments of their own under `.venvs`, made on first use; one that cannot be installed is left
out with a message. Elsewhere: what the programs share (`harness`), starting them (`benchmarks.arena`).
"""

import fcntl
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.interop._node import NODE_DIR, NodeMissing, find_node, install_packages
from tests.interop._pypi import PyBullmqMissing, ensure_environment

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".venvs"

OURS, NODE, PYTHON = "ours", "node", "python"

_BLOCKING = frozenset({"add_in_flight"})
_NO_BULK = frozenset({"add_bulk"})
_RESULT_IS_ELSEWHERE = frozenset({"memory_completed"})
_NO_CHILDREN = frozenset({"cpu_children"})
"""Its handlers run in the worker's own process."""


@dataclass(frozen=True)
class Contestant:
    """A program that takes a task as its last argument, and how it is used best."""

    name: str
    command: tuple[str, ...]
    camp: str = PYTHON
    version: str = ""
    variant: tuple[str, ...] = ()
    concurrency: int = 100
    """Jobs at a time when a workload leaves that to the contestant. Found by trying."""
    most_concurrency: int | None = None
    share: float = 1.0
    """Of the jobs of a workload: rates of slow ones are as good with fewer jobs."""
    adds_per_s: int = 1_500
    """A careful guess, to fill a queue before its jobs are due."""
    blocks: bool = False
    """Its `add` blocks the thread."""
    speaks_bullmq: bool = False
    """Its queues have BullMQ's structure, so what was added can be compared with what is completed."""
    leaves_out: frozenset[str] = field(default_factory=frozenset)
    """Workloads and metrics that make no sense for it."""


@dataclass(frozen=True)
class _Peer:
    name: str
    packages: tuple[str, ...]
    concurrency: int = 100
    most_concurrency: int | None = None
    share: float = 1.0
    blocks: bool = False
    leaves_out: frozenset[str] = _NO_BULK

    def contestant(self) -> Contestant:
        python = _environment(self.name, self.packages)
        return Contestant(
            self.name,
            (str(python), str(HERE / f"{self.name}_bench.py")),
            version=self.packages[0].partition("==")[2],
            concurrency=self.concurrency,
            most_concurrency=self.most_concurrency,
            share=self.share,
            blocks=self.blocks,
            leaves_out=self.leaves_out
            | _RESULT_IS_ELSEWHERE
            | _NO_CHILDREN
            | (_BLOCKING if self.blocks else frozenset()),
        )


_FAST = ("hiredis==3.5.0", "uvloop==0.23.0")
PEERS = (
    _Peer("dramatiq", ("dramatiq[redis]==2.2.1", "hiredis==3.5.0"), concurrency=8, share=0.5, blocks=True),
    _Peer(
        *("taskiq", ("taskiq==0.13.0", "taskiq-redis==1.2.4", *_FAST)),
        share=0.5,
        leaves_out=_NO_BULK | {"delayed"},  # its brokers on Redis know no delay
    ),
    _Peer("saq", ("saq[redis]==0.26.4", "typing-extensions", *_FAST), concurrency=50, share=0.25),
    _Peer("huey", ("huey==3.5.4", "redis==8.1.0", "hiredis==3.5.0"), concurrency=8, share=0.5, blocks=True),
    _Peer("arq", ("arq==0.28.0", *_FAST), share=0.1),
    _Peer("celery", ("celery[redis]==5.7.0", "hiredis==3.5.0"), concurrency=1, share=0.1, blocks=True),
    _Peer(
        *("rq", ("rq==2.12.0", "hiredis==3.5.0")),
        concurrency=1,
        most_concurrency=1,
        share=0.1,
        blocks=True,
        leaves_out=frozenset({"io", "delayed"}),  # one job at a time; thousands that are due take it minutes
    ),
    _Peer("streaq", ("streaq==7.2.0", "uvloop==0.23.0"), concurrency=64, share=0.25, leaves_out=frozenset()),
)


def all_contestants(names: list[str] | None, tell: Callable[[str], None]) -> list[Contestant]:
    """Those asked for, or all that can be had here; `tell` hears why one is missing."""
    found = []
    for name, make in _makers().items():
        if names and not any(name == wanted or name.startswith(f"{wanted} ") for wanted in names):
            continue
        try:
            found += make()
        except (OSError, subprocess.SubprocessError, NodeMissing, PyBullmqMissing) as error:
            output = getattr(error, "stderr", None) or b""
            tell(f"{name} takes no part: {error} {output.decode(errors='replace')[-300:]}".strip())
    return found


def _makers() -> dict[str, Callable[[], list[Contestant]]]:
    peers = {peer.name: lambda peer=peer: [peer.contestant()] for peer in PEERS}
    return {"bullpen": lambda: list(_ours()), "node": _node, "pypi": _pypi, **peers}


def _ours() -> Iterator[Contestant]:
    program = (sys.executable, str(HERE / "bullpen_bench.py"))
    for loop in ("asyncio", "uvloop"):
        if loop == "asyncio" or importlib.util.find_spec("uvloop") is not None:
            yield Contestant(
                f"bullpen ({loop})",
                program,
                OURS,
                variant=(loop,),
                concurrency=200,
                adds_per_s=4_000,
                speaks_bullmq=True,
            )
    only_adds = frozenset({"drain_one", "drain_two", "io", "cpu", "latency", "delayed", "retries", "memory"})
    yield Contestant(
        *("bullpen.sync", (sys.executable, str(HERE / "bullpen_sync_bench.py")), OURS),
        blocks=True,
        speaks_bullmq=True,
        leaves_out=only_adds | _BLOCKING | _NO_CHILDREN,
    )


def _node() -> list[Contestant]:
    tools = find_node()
    install_packages(tools)
    program = (*tools.node, str(HERE / "node_bench.mjs"), str(NODE_DIR))
    return [
        Contestant(
            *("node bullmq", program, NODE, "6.7.0"),
            concurrency=100,
            adds_per_s=4_000,
            speaks_bullmq=True,
        )
    ]


def _pypi() -> list[Contestant]:
    program = (str(ensure_environment()), str(HERE / "pypi_bullmq_bench.py"))
    return [
        Contestant(
            *(f"pypi bullmq{suffix}", program, PYTHON, "3.4.4"),
            variant=variant,
            concurrency=50,
            share=0.5,
            speaks_bullmq=True,
            leaves_out=_NO_CHILDREN,
        )
        for suffix, variant in (("", ()), (" (pool)", ("pool",)))
    ]


def _environment(name: str, packages: tuple[str, ...]) -> Path:
    """The interpreter of an environment that holds exactly these packages."""
    directory = ENVIRONMENTS / f"bench-{name}"
    python, stamp = directory / "bin" / "python", directory / "installed"
    wanted = "\n".join(packages)
    ENVIRONMENTS.mkdir(exist_ok=True)
    with (ENVIRONMENTS / f"bench-{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two runs at once make it one after the other
        if not stamp.exists() or stamp.read_text() != wanted:
            make = [sys.executable, "-m", "venv", "--clear", str(directory)]
            install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
            for command in (make, install):
                subprocess.run(command, check=True, capture_output=True, timeout=300)
            stamp.write_text(wanted)
    return python
