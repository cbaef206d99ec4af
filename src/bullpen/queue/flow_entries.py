"""The jobs of a flow, ready to send.

In: packed jobs, parents before children. Out: the arguments of the `add_flow` script. Elsewhere: checking and packing
them (`flows`), sending them (`flows`, `blocking`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from bullpen.queue.durability import Durability
from bullpen.queue.packing import PackedJob
from bullpen.wire.keys import QueueKeys
from bullpen.wire.links import link_json

__all__ = ["FlowEntry", "SendsFlows", "flow_arguments"]


class FlowEntry(NamedTuple):
    """One job of a flow, ready to send."""

    keys: QueueKeys
    packed: PackedJob
    parent: int | None
    """Place of its parent in the list of entries; None for a root."""
    has_children: bool

    @property
    def role(self) -> str:
        if self.parent is None:
            return "tree" if self.has_children else "root"
        return "parent" if self.has_children else "leaf"


def flow_arguments(entries: Sequence[FlowEntry], clock: str, ttl_ms: int, number: int) -> list[Any]:
    """The arguments of the `add_flow` script."""
    args: list[Any] = [number, ttl_ms, clock]
    for entry in entries:
        keys, packed, _, _ = entry
        options = packed.options
        args += (keys.base, *packed[:5], entry.role)
        if options.parent is None or options.on_failure is None:
            args += ("", "")
        else:
            args += (str(options.parent), link_json(options.parent, options.on_failure))
    return args


class SendsFlows(Protocol):
    """Sends the flows of one queue object."""

    async def send(self, entries: Sequence[FlowEntry], level: Durability, deadline_s: float) -> tuple[Any, bool]:
        """The reply, and whether its durability was not confirmed in time."""
