"""A dead letter's payload, changed by a person before the work goes back. No input or output here.

In: the payload that was read, and the change: a whole new payload, or a JSON merge patch (RFC 7396). Out: an
`Edit`: the new payload, and what may be kept of the change for ever: fingerprints of both payloads and the paths that
differ, never a value. Whose work it is cannot be edited: `tenantId` and `runId` stay.
Elsewhere: the stores that take it (`bullpen.ports.dead_letters`), who may and who did (`bullpen.ops.dead_letters`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

import msgspec

from bullpen._kernel import json
from bullpen._kernel.scrub import scrub
from bullpen.errors import InvalidOption, require

__all__ = ["KEEP", "Edit", "Keep", "make_edit", "merged", "payload_fingerprint"]

_IDENTITY: Final = ("tenantId", "runId")
_MOST_PATHS: Final = 20
_LONGEST_PATH: Final = 120
_LONGEST_WHY: Final = 500
_canonical = msgspec.json.Encoder(order="sorted").encode


class Keep:
    """Says that nothing was given; None is a payload."""

    def __repr__(self) -> str:
        return "KEEP"


KEEP: Final = Keep()


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A payload that takes the place of the stored one."""

    data: Any
    before: str
    """Fingerprint of the payload that was read; a store with another payload refuses the edit."""
    after: str
    changed: tuple[str, ...]
    """Paths of what differs, without values."""
    why: str = ""

    def note(self) -> dict[str, Any]:
        """What is kept of it with the work and in the audit log."""
        kept: dict[str, Any] = {"before": self.before, "after": self.after, "changed": list(self.changed)}
        return {**kept, "why": self.why} if self.why else kept


def make_edit(
    before: Any,
    *,
    data: Any = KEEP,
    merge: Any = KEEP,
    why: str = "",
    tenant_id: str | None = None,
) -> Edit:
    """The edit that replaces a payload by `data`, or merges `merge` into it. `tenant_id` is the letter's.

    Raises InvalidOption for an edit that changes nothing, or changes whose work it is; NotJson for what cannot travel.
    """
    if (data is KEEP) == (merge is KEEP):
        raise InvalidOption("data", "either data, the whole payload, or merge, a patch of it", data)
    require("why", isinstance(why, str) and len(why) <= _LONGEST_WHY, f"at most {_LONGEST_WHY} characters", why)
    if merge is not KEEP:
        is_object = isinstance(before, dict) and isinstance(merge, dict)
        require("merge", is_object, "an object, for a payload that is one; replace other payloads whole", merge)
        data = merged(before, merge)
    made = json.decode(json.encode(data))  # as its readers will see it: a tuple is a list there
    _check_identity(before, made, tenant_id)
    old, new = payload_fingerprint(before), payload_fingerprint(made)
    if old == new:
        raise InvalidOption("data", "a payload that differs from the stored one; redrive sends the stored one", old)
    paths = [scrub(path)[:_LONGEST_PATH] for path in islice(_differences(before, made, ""), _MOST_PATHS)]
    return Edit(data=made, before=old, after=new, changed=tuple(paths), why=scrub(why))


def merged(target: Any, patch: Any) -> Any:
    """A JSON merge patch applied: members of objects are set, those whose patch is null are removed."""
    if not isinstance(patch, dict):
        return patch
    result = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = merged(result.get(name), value)
    return result


def payload_fingerprint(data: Any) -> str:
    """Sixteen signs that are the same for the same JSON value, whatever the order of its members."""
    try:
        raw = _canonical(data)
    except (TypeError, ValueError, UnicodeEncodeError, RecursionError):  # what only lenient writers produce
        raw = repr(data).encode("utf-8", "backslashreplace")
    return hashlib.sha256(raw).hexdigest()[:16]


def _differences(before: Any, after: Any, path: str) -> Iterator[str]:
    """Paths of the deepest members that were added, removed or changed."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name in dict.fromkeys((*before, *after)):
            inner = f"{path}.{name}" if path else str(name)
            if (name in before) != (name in after):
                yield inner
            elif before[name] != after[name]:
                yield from _differences(before[name], after[name], inner)
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            if one != other:
                yield from _differences(one, other, f"{path}[{index}]")
    else:
        yield path or "(all)"


def _check_identity(before: Any, after: Any, tenant_id: str | None) -> None:
    """Jobs name tenant and run at the top, events of transports in their `payload`."""
    for name in _IDENTITY:
        for place in ("", "payload"):
            old, new = _member(before, place, name), _member(after, place, name)
            if old is not None and new != old:
                raise InvalidOption(name, f"{old!r} as it was: an edit cannot move work to another tenant", new)
            is_foreign = name == "tenantId" and new is not None and tenant_id is not None and new != tenant_id
            if is_foreign:
                raise InvalidOption(name, f"{tenant_id!r}, the tenant of this work", new)


def _member(data: Any, place: str, name: str) -> Any:
    inner = data.get(place) if place and isinstance(data, Mapping) else data
    return inner.get(name) if isinstance(inner, Mapping) else None
