"""The form that changes a payload before work goes back: first the difference, then the deed.

The change is a JSON merge patch: so a payload can be changed by somebody who does not see the secrets in it.
In: the form, and the payload as it is stored. Out: the form again, with what would differ.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from bullpen._kernel.scrub import hide_secrets
from bullpen.dashboard._web import PageProblem
from bullpen.dashboard.fields import REASON, FormField
from bullpen.dashboard.render import json_text
from bullpen.dashboard.routes import Page
from bullpen.ports.edits import Edit

__all__ = ["EDIT_FIELDS", "edit_page", "must_be_as_shown", "patch_of"]

_LONGEST_DIFF = 2_000
EDIT_FIELDS: Final = (
    FormField("patch", "The change, as a JSON merge patch.", "json", required=True),
    REASON,
    FormField("before", "The fingerprint of the payload that was looked at; another one by now is refused."),
    FormField("confirmed", "Do it; without it the difference is shown.", "flag"),
)


def patch_of(fields: Mapping[str, str]) -> Any:
    """The change of a form. Raises PageProblem with the line and column of the first mistake."""
    text = fields.get("patch", "")
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise PageProblem(422, f"The change is no JSON: {_placed(str(error), text)}.") from None


def must_be_as_shown(fields: Mapping[str, str], change: Edit) -> None:
    """What was previewed is what is changed. Raises PageProblem when the stored payload is another one by now."""
    if fields.get("before") and fields["before"] != change.before:
        raise PageProblem(409, "The stored payload has changed meanwhile. Open the page again.")


def edit_page(
    view: Any,
    subject: str,
    nav: str,
    verb: str,
    back: str,
    fields: Mapping[str, str] | None = None,
    change: tuple[Any, Edit] | None = None,
    problem: str = "",
) -> Page:
    """`view` has the stored payload as `data`, `change` the payload and what is to become of it."""
    given, difference, before = fields or {}, None, ""
    if change is not None:
        stored, edit = change
        difference, before = _diff(*(json_text(hide_secrets(each)) for each in (stored, edit.data))), edit.before
    values = {
        "text": given.get("patch", "{\n  \n}"),
        "diff": difference,
        "before": before,
        "reason": given.get("reason", ""),
        "verb": verb,
        "back": back,
        "problem": problem,
    }
    return Page("edit.html", view, f"Edit {subject}", nav, values=values)


def _diff(before: str, after: str) -> list[tuple[str, str]]:
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2)
    kinds = {"+": "added", "-": "removed"}
    return [(kinds.get(line[:1], "same"), line) for line in list(lines)[2:_LONGEST_DIFF]]


def _placed(message: str, text: str) -> str:
    """With the line and column of the first mistake."""
    found = re.search(r"byte (\d+)", message)
    if found is None:
        return message
    before = text.encode()[: int(found[1])].decode("utf-8", "ignore")
    return f"{message} (line {before.count(chr(10)) + 1}, column {len(before.rpartition(chr(10))[2]) + 1})"
