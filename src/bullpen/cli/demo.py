"""`bullpen demo`: runs the example `demo`, which the wheel carries beside the package and a checkout in `examples`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Any

from bullpen.cli.context import OnServer, WrongCommand
from bullpen.cli.tree import Option

_NAME = "bullpen._demo"


async def demo(
    at: OnServer,
    jobs: Annotated[int, Option(min=1, max=200_000, help="How many jobs.")] = 3_000,
    duration: Annotated[float, Option(min=1, max=600, help="Approximate duration in seconds.")] = 12.0,
    stay: Annotated[bool, Option("--stay", help="Then keep running one job per second until Ctrl-C.")] = False,
    plain: Annotated[bool, Option("--plain", help="Print lines instead of a live display.")] = False,
    dashboard: Annotated[bool, Option("--dashboard", help="Also serve the dashboard until Ctrl-C.")] = False,
    jobs_only: Annotated[bool, Option("--jobs-only", help="Skip the other systems.")] = False,
) -> None:
    """Run a few thousand jobs in three worker processes, kill one process, and check that every job ended once.

    Then run tasks, a workflow, the outbox, a run and a scheduled message, each with a deliberate fault.

    Without --redis, a temporary server is started and removed at the end.
    """
    if stay and at.as_json:
        raise WrongCommand("--stay is for a person, --json for a program; choose one")
    if dashboard and at.as_json:
        raise WrongCommand("--dashboard is for a person, --json for a program; choose one")
    report, lines = await load("stage").run(
        *(jobs, duration, at.redis, at.prefix),
        stay=stay,
        plain=plain,
        quiet=at.as_json,
        with_systems=at.redis is None and not jobs_only,
        dashboard=dashboard,
    )
    if at.as_json:
        at.say({**report.to_json(), "systems": [line.to_json() for line in lines]})
    if not report.adds_up or not all(line.is_right for line in lines):
        raise at.failed("the demo does not add up; please report this")


def load(module: str) -> Any:
    """A module of the example."""
    if _NAME not in sys.modules and importlib.util.find_spec(_NAME) is None:
        place = Path(__file__).parents[3] / "examples" / "demo"
        spec = importlib.util.spec_from_file_location(
            _NAME, place / "__init__.py", submodule_search_locations=[str(place)]
        )
        if spec is None or spec.loader is None or not place.is_dir():
            raise WrongCommand(f"this installation has no demo: neither {_NAME} nor {place}")
        sys.modules[_NAME] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[_NAME])
    return importlib.import_module(f"{_NAME}.{module}")
