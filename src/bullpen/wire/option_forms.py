"""The wire form of options that many jobs share, made once for all of them.

Callers give most jobs of a queue the same few options, and what differs from job to job is an id and perhaps a delay.
To make `JobOptions` of them for each job took more than everything else about adding it.
In: options as callers write them. Out: their JSON and place, byte for byte as `JobOptions` would make them.
Elsewhere: what each option means, and checking it (`options`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, Final

from bullpen._kernel import json
from bullpen._kernel.backoff import Backoff
from bullpen._kernel.keep import KeepJobs
from bullpen.wire.options import JobOptions, is_large, make_options

__all__ = ["OptionsForm", "form_of"]

_MOST_FORMS: Final = 512
_SHARED: Final = frozenset(
    {
        *("attempts", "backoff", "keep_logs", "lane", "large_retention", "lifo", "priority", "remove_on_complete"),
        *("remove_on_fail", "stack_trace_limit", "ttl", "urgency"),
    }
)
"""Options whose values return from job to job. A trace, for one, never does."""
_VALUES: Final = frozenset({int, bool, str, type(None), timedelta, Backoff, KeepJobs})
"""Types whose values never change, so that they may be part of a key."""
_BEFORE_DELAY: Final = frozenset({"attempts", "backoff"})
_BEFORE_ID: Final = frozenset({"bpat", "priority", "bpttl", "lifo"})


class OptionsForm:
    """Checked options with room for a job's own delay and id, in the places where BullMQ writes them."""

    __slots__ = ("_delay_ms", "_head", "_middle", "_place", "_place_head", "_place_tail", "_tail", "options")

    def __init__(self, options: JobOptions) -> None:
        self.options = options
        wire = options.to_wire()
        wire.pop("delay", None)
        self._head = b"{" + _members(wire, _BEFORE_DELAY)  # never empty: attempts are always written
        self._middle = b"".join(b"," + part for part in [_members(wire, _BEFORE_ID)] if part)
        rest = _members(wire, wire.keys() - _BEFORE_DELAY - _BEFORE_ID)
        self._tail = (b"," + rest if rest else b"") + b"}"
        self._delay_ms, self._place = options.delay_ms, options.place
        first, _, rest_of_place = options.full_place.split(" ", 2)
        self._place_head, self._place_tail = f"{first} ", f" {rest_of_place}"

    def write(self, delay_ms: int, job_id: str | None) -> tuple[bytes, str]:
        """The JSON and the place of a job with this delay and id."""
        delay = b',"delay":%d' % delay_ms if delay_ms else b""
        own_id = b"" if job_id is None else b',"jobId":' + json.encode_checked(job_id)
        place = self._place
        if delay_ms != self._delay_ms:
            place = f"{self._place_head}{delay_ms}{self._place_tail}"
        return b"%b%b%b%b%b" % (self._head, delay, self._middle, own_id, self._tail), place


def form_of(defaults: JobOptions, given: Mapping[str, Any]) -> OptionsForm | None:
    """The form of these options, without id and delay, over the defaults. None: they are no options that jobs share.
    Raises InvalidOption as `make_options`."""
    key = (*given.items(), *map(type, given.values()))  # with the types: True and 1 are equal
    try:
        form: OptionsForm | None = defaults.forms.get(key)
    except TypeError:  # a dict or list among them
        return None
    if form is None and given.keys() <= _SHARED and _VALUES.issuperset(map(type, given.values())):
        options = make_options(defaults, **given)
        if is_large(options.remove_on_complete) or is_large(options.remove_on_fail):
            return None  # each such job is warned of
        form = OptionsForm(options)
        if len(defaults.forms) >= _MOST_FORMS:
            defaults.forms.clear()
        defaults.forms[key] = form
    return form


def _members(wire: Mapping[str, Any], names: Iterable[str]) -> bytes:
    wanted = frozenset(names)
    return json.encode_checked({name: value for name, value in wire.items() if name in wanted})[1:-1]
