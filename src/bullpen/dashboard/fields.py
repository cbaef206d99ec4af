"""The fields that a change takes under the API: read, checked and described from one table.

In: the fields of a route, and what was sent in the address and the body. Out: a problem that names each field that is
not known, and each that is missing. What is not understood is not done: a wrong name must not make an action wider.
Elsewhere: how a request is read (`_web`), the tables themselves (beside each route in `pages`).
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from bullpen.dashboard._web import PageProblem

__all__ = ["REASON", "TENANT", "FormField", "body_schema", "check_fields"]

_ALWAYS: Final = ("csrf", "nonce", "zone")
"""The token of a session, the key of a form, and the zone in which times are read."""
_SCHEMAS: Final[dict[str, dict[str, Any]]] = {
    "text": {"type": "string"},
    "number": {"type": ["integer", "string"]},
    "flag": {"type": ["boolean", "string"]},
    "list": {"type": "array", "items": {"type": "string"}},
    "json": {},
}


@dataclass(frozen=True, slots=True)
class FormField:
    """One value that a change takes."""

    name: str
    says: str
    kind: str = "text"
    """`text`, `number`, `flag`, `list` or `json`."""
    required: bool = False


REASON: Final = FormField("reason", "Why; kept in the audit.")
TENANT: Final = FormField("tenant", "Only what belongs to this tenant.")


def check_fields(fields: Collection[FormField], given: Mapping[str, str]) -> None:
    """Raises PageProblem 400 for a field that is not known and for one that is missing."""
    known = [each.name for each in fields]
    told = []
    for name in given:
        if name not in known and name not in _ALWAYS:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            told.append(f"There is no field {name[:40]!r}{f'; did you mean {near[0]!r}?' if near else '.'}")
    if told:
        raise PageProblem(400, " ".join(told), hint=f"Fields: {', '.join(known) or 'none'}.")
    if missing := [each.name for each in fields if each.required and not given.get(each.name, "").strip()]:
        raise PageProblem(400, f"Missing: {', '.join(missing)}.", hint=f"Fields: {', '.join(known)}.")


def body_schema(fields: Collection[FormField]) -> dict[str, Any]:
    """The same for a description."""
    found: dict[str, Any] = {
        "type": "object",
        "description": "Fields may also stand in the query; one that is in both must be equal.",
        "properties": {each.name: {**_SCHEMAS[each.kind], "description": each.says} for each in fields},
        "additionalProperties": False,
    }
    if required := [each.name for each in fields if each.required]:
        found["required"] = required
    return found
