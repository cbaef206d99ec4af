"""The options of a job that is stored elsewhere first and added to its queue later.

In: the options of `Queue.add`. Out: JSON that holds them, checked now, and from that JSON the same options again. A
delay counts from when the job was asked for: what has passed since is taken off. Elsewhere: the options (`options`).
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from bullpen._kernel.backoff import CustomBackoff, from_option, from_wire
from bullpen._kernel.duration import to_ms
from bullpen._kernel.keep import KeepJobs
from bullpen.errors import require
from bullpen.wire.deduplication import Deduplication
from bullpen.wire.links import JobKey
from bullpen.wire.options import DEFAULT_OPTIONS, JobMeta, make_options, to_epoch_ms

__all__ = ["options_from_json", "options_to_json"]


def options_to_json(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check options of `Queue.add` and make them JSON. Raises InvalidOption as `add` would.

    `replace_finished` is one of them, and so is `durability`, which the caller gives as JSON.
    """
    replaces, levels = options.get("replace_finished", False), ("replace_finished", "durability")
    make_options(DEFAULT_OPTIONS, **{name: value for name, value in options.items() if name not in levels})
    require("replace_finished", isinstance(replaces, bool), "True or False", replaces)
    require(
        "replace_finished",
        not replaces or options.get("job_id") is not None,
        "together with job_id, the id of the job that may be replaced",
        replaces,
    )
    return {name: _to_json(name, value) for name, value in options.items() if value is not None}


def options_from_json(stored: Mapping[str, Any], *, waited_ms: int = 0) -> dict[str, Any]:
    """Options for `Queue.add`, `waited_ms` after they were asked for."""
    options = {name: _from_json(name, value) for name, value in stored.items()}
    if "delay" in options:
        options["delay"] = max(0, options["delay"] - waited_ms)
    return options


def _to_json(name: str, value: Any) -> Any:
    match value:
        case datetime():
            return to_epoch_ms(name, value)
        case timedelta():
            return from_option(value).to_wire() if name == "backoff" else to_ms(name, value)
        case KeepJobs() | JobMeta() | Deduplication() | CustomBackoff():
            return value.to_wire()
        case _ if name == "parent":
            return JobKey.read(name, value).to_wire()
    return from_option(value).to_wire() if name == "backoff" else value


def _from_json(name: str, value: Any) -> Any:
    if name == "at":
        return datetime.fromtimestamp(value / 1000, UTC)
    if name == "backoff":
        return from_wire(value)
    if name == "meta":
        return JobMeta.from_wire(value)
    if name == "parent":
        return JobKey(value["id"], value["queue"])
    if name == "deduplication":
        return value if isinstance(value, str) else Deduplication.from_wire(value)
    if isinstance(value, dict):
        return KeepJobs(count=value.get("count"), age_s=value.get("age"), limit=value.get("limit"))
    return value
