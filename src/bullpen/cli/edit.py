"""`bullpen dead-letters edit`: change the payload of one dead letter and send it back.

In: a dead letter, and a new payload, a patch, or a person with an editor. Out: the difference on the terminal, a
question, and the work in its queue again. Elsewhere: what an edit may change (`bullpen.ports.edits`), sending
(`bullpen.ops.dead_letters`).
"""

from __future__ import annotations

import difflib
import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from bullpen._kernel.printable import printable
from bullpen.cli import show
from bullpen.cli.arguments import ByOption, DryRunOption, TenantOption, YesOption, parse_json
from bullpen.cli.context import Done, WrongCommand, ask, interruptible, whoami
from bullpen.cli.programs import OnProgram
from bullpen.cli.tree import Argument, Option

if TYPE_CHECKING:
    from bullpen.ops.dead_letters import Found

_COLOURS: Final = {"+": "green", "-": "red", "@": "cyan"}


async def edit(
    at: OnProgram,
    store: Annotated[str, Argument("STORE", "The queue, or the store as `stats` names it.")],
    entry: Annotated[str, Argument("ENTRY", "Id of the entry, as listed.")],
    data: Annotated[
        str | None, Option(metavar="JSON", help="The complete new payload; @FILE reads a file, - reads stdin.")
    ] = None,
    merge: Annotated[
        str | None,
        Option(metavar="JSON", help="Fields to set; null removes one (JSON merge patch). @FILE and - as above."),
    ] = None,
    editor: Annotated[
        bool, Option("--editor", help="Open $VISUAL or $EDITOR on the payload; default without --data and --merge.")
    ] = False,
    why: Annotated[str, Option(metavar="TEXT", help="Stored with the edit.")] = "",
    by: ByOption = None,
    tenant: TenantOption = None,
    dry_run: DryRunOption = False,
    yes: YesOption = False,
) -> None:
    """Send one dead letter back with a changed payload and the same id. Shows the difference and asks first."""
    from bullpen.cli.dead_letter_stores import console_of, opened
    from bullpen.ports.edits import KEEP, make_edit, payload_fingerprint

    given = [name for name, value in (("data", data), ("merge", merge), ("editor", editor or None)) if value]
    if len(given) > 1:
        raise WrongCommand(
            f"pass only one of --data, --merge and --editor, not {' and '.join(f'--{each}' for each in given)}"
        )
    may_ask = sys.stdin.isatty() and not at.as_json and "-" not in (data, merge)
    if not given and not may_ask:
        raise WrongCommand("pass --data or --merge without a terminal to edit on")
    if not (may_ask or yes or dry_run):
        raise WrongCommand("sending an edited payload needs --yes without a terminal to confirm on; --dry-run shows it")
    async with opened(at) as app:
        console, name = await console_of(app, store, tenant)
        found = await console.get_editable(name, entry)
        letter = found.letter
        change: dict[str, Any] = {name: parse_json(f"--{name}", text) for name, text in
                                  (("data", data), ("merge", merge)) if text is not None}  # fmt: skip
        if not change:
            change = {"data": _from_editor(found)}
            if payload_fingerprint(change["data"]) == payload_fingerprint(letter.data):
                raise Done("nothing was changed, so nothing was sent")
        made = make_edit(letter.data, why=why, tenant_id=letter.tenant_id, **{"data": KEEP, **change})
        if not at.as_json:
            _show(letter.data, made.data)
        if may_ask and not yes and not dry_run:
            ask(f"Send {entry} back to {letter.source!r} with this payload?")
        identity = None
        if not dry_run:
            identity = await console.redrive_edited(found.store, letter.id, made, by=by or whoami())
    document = {"store": found.store, "entry": letter.id, "id": identity, "dryRun": identity is None, **made.note()}
    sent = (
        f"would be sent back to {letter.source}: {letter.id}"
        if dry_run
        else f"sent back to {letter.source}: {identity}"
    )
    at.say(document, sent)


def _from_editor(found: Found) -> Any:
    """The payload after somebody has edited it; what is not JSON may be corrected."""
    command = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    # Payloads hold what errors do not: the file is ours alone, and gone afterwards.
    with tempfile.TemporaryDirectory(prefix="bullpen-") as directory:
        path = Path(directory) / "payload.json"
        path.write_text(_pretty(found.letter.data) + "\n", encoding="utf-8")
        path.chmod(0o600)
        while True:
            try:
                with interruptible():
                    subprocess.run([*shlex.split(command), str(path)], check=True)
            except (OSError, ValueError, subprocess.CalledProcessError) as error:
                raise Done(
                    f"the editor {command!r} failed ({error}); nothing was sent. Set EDITOR, or pass --data"
                ) from None
            try:
                return json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                ask(f"This is not JSON: {error}. Edit it again?", default=True)


def _show(before: Any, after: Any) -> None:
    lines = difflib.unified_diff(_pretty(before).splitlines(), _pretty(after).splitlines(), "stored", "edited", n=2)
    for line in lines:
        print(show.style(printable(line.rstrip("\n")), _COLOURS.get(line[:1], ""), sys.stderr), file=sys.stderr)


def _pretty(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2)
