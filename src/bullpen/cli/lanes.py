"""`bullpen queues lanes`: fair shares of a queue by key, with their weights, limits and jobs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import typer

from bullpen.cli import common
from bullpen.cli.common import JsonOption, PrefixOption, QueueArgument, RedisOption
from bullpen.queue.lanes import LaneInfo, Lanes, LaneSettings

app = typer.Typer(help="List the lanes of a queue; set their weights and limits, pause and resume them.")

LaneArgument = Annotated[str, typer.Argument(help="The lane; - for all that say nothing of their own.")]
_COLUMNS = ("lane", "waiting", "held", "delayed", "active", "weight", "concurrency", "rate", "size", "")
_NONE = "none"
T = TypeVar("T")


def add_to(group: typer.Typer) -> None:
    """Register the commands of this module."""
    group.add_typer(app, name="lanes")


@app.command("list")
def list_lanes(
    queue: QueueArgument, redis: RedisOption = None, prefix: PrefixOption = None, as_json: JsonOption = False
) -> None:
    """List the lanes that have settings, or jobs that wait or run."""
    found: list[LaneInfo] = common.wait_for(_with_lanes(queue, redis, prefix, lambda lanes: lanes.list()))
    if as_json:
        common.print_json([lane.to_json() for lane in found])
    elif found:
        common.print_table(_COLUMNS, map(_row, found), numbers=_COLUMNS[1:-1])
    else:
        common.err.print("no lanes here yet")


@app.command("set")
def set_lane(
    queue: QueueArgument,
    lane: LaneArgument,
    weight: Annotated[str | None, typer.Option(help="Turns per round, 1 by default; 'none' takes it back.")] = None,
    concurrency: Annotated[str | None, typer.Option(help="Jobs that run at once; 'none' takes it back.")] = None,
    rate: Annotated[
        str | None, typer.Option(metavar="JOBS/TIME", help="Jobs that start per time: 100/1m; 'none' takes it back.")
    ] = None,
    size: Annotated[
        str | None, typer.Option(help="Jobs that may wait; further adds are refused. 'none' takes it back.")
    ] = None,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Change what a lane may do. What is not given stays."""
    given: dict[str, Any] = {
        "weight": _read("--weight", weight, float),
        "concurrency": _read("--concurrency", concurrency, int),
        "rate": _read("--rate", rate, _read_rate),
        "size": _read("--size", size, int),
    }
    name = None if lane == "-" else lane
    settings = common.wait_for(_with_lanes(queue, redis, prefix, lambda lanes: lanes.set(name, **given)))
    _tell(lane, settings, as_json)


@app.command()
def pause(
    queue: QueueArgument,
    lane: Annotated[str, typer.Argument(help="The lane.")],
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let no job of a lane start; those that run finish."""

    async def work(lanes: Lanes) -> LaneSettings:
        await lanes.pause(lane)
        return await lanes.get(lane)

    _tell(lane, common.wait_for(_with_lanes(queue, redis, prefix, work)), as_json)


@app.command()
def resume(
    queue: QueueArgument,
    lane: Annotated[str, typer.Argument(help="The lane.")],
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let jobs of a lane start again."""

    async def work(lanes: Lanes) -> LaneSettings:
        await lanes.resume(lane)
        return await lanes.get(lane)

    _tell(lane, common.wait_for(_with_lanes(queue, redis, prefix, work)), as_json)


@app.command()
def remove(
    queue: QueueArgument,
    lane: LaneArgument,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Forget what was set for a lane. Its jobs stay."""
    name = None if lane == "-" else lane

    async def work(lanes: Lanes) -> LaneSettings:
        await lanes.remove(name)
        return await lanes.get(name)

    _tell(lane, common.wait_for(_with_lanes(queue, redis, prefix, work)), as_json)


async def _with_lanes(queue: str, redis: str | None, prefix: str | None, work: Callable[[Lanes], Awaitable[T]]) -> T:
    async with common.opened(redis, prefix) as opened:
        await common.must_exist(opened, queue)
        return await work(opened.queue(queue).lanes)


def _read(name: str, text: str | None, read: Callable[[str], Any]) -> Any:
    if text is None or text == _NONE:
        return None if text is None else False
    try:
        return read(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r}", param_hint=name) from None


def _read_rate(text: str) -> tuple[int, Any]:
    jobs, slash, time = text.partition("/")
    if not slash:
        raise ValueError(text)
    return int(jobs), common.duration("--rate", time)


def _row(lane: LaneInfo) -> tuple[str, ...]:
    settings, rate = lane.settings, lane.settings.rate
    return (
        *(lane.name, str(lane.waiting), str(lane.held), str(lane.delayed), str(lane.active)),
        "" if settings.weight is None else f"{settings.weight:g}",
        "" if settings.concurrency is None else str(settings.concurrency),
        "" if rate is None else f"{rate.max} per {rate.duration_ms} ms",
        "" if settings.size is None else str(settings.size),
        "paused" if settings.paused else "",
    )


def _tell(lane: str, settings: LaneSettings, as_json: bool) -> None:
    shown = LaneInfo(name=lane, settings=settings).to_json()
    own = {name: shown[name] for name in ("name", "weight", "concurrency", "rate", "size", "paused")}
    if as_json:
        common.print_json(own)
        return
    said = ", ".join(f"{name} {value}" for name, value in own.items() if name != "name" and value not in (None, False))
    common.out.print(f"lane {lane!r}: {said or 'as all others'}")
