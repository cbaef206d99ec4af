"""`bullpen dead-letters edit`: change the payload of one dead letter and send it back.

In: a letter, and a new payload, a patch, or a person with an editor. Out: the difference on the terminal, a question,
and the work back in line. Elsewhere: what an edit may change (`bullpen.ports.edits`), sending
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
from typing import Annotated, Any, Final

import typer
from rich.text import Text

from bullpen.cli import common
from bullpen.cli.common import Done, JsonOption, PrefixOption, RedisOption, WrongCommand
from bullpen.cli.letters import ProgramOption, name_of_store, opened
from bullpen.cli.outbox import whoami
from bullpen.ops.dead_letters import Found
from bullpen.ports.edits import KEEP, Edit, make_edit, payload_fingerprint

_COLOURS: Final = {"+": "green", "-": "red", "@": "cyan"}


def edit(
    store: Annotated[
        str, typer.Argument(metavar="STORE", help="The queue, or the store as `overview` names it.", show_default=False)
    ],
    entry: Annotated[str, typer.Argument(metavar="ENTRY", help="Id of the entry, as listed.", show_default=False)],
    data: Annotated[
        str | None, typer.Option(metavar="JSON", help="The whole new payload; @FILE reads a file, - stdin.")
    ] = None,
    merge: Annotated[
        str | None,
        typer.Option(metavar="JSON", help="Members to set; null removes one (JSON merge patch). @FILE, - as above."),
    ] = None,
    editor: Annotated[
        bool, typer.Option("--editor", help="Open $VISUAL or $EDITOR on the payload; so does neither of the above.")
    ] = False,
    why: Annotated[str, typer.Option(metavar="TEXT", help="Noted with the edit.")] = "",
    by: Annotated[str | None, typer.Option(metavar="WHO", help="Noted with the edit.", show_default="you")] = None,
    tenant: Annotated[str | None, typer.Option(metavar="TENANT", help="Only if it is this tenant's.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the difference, send nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    program: ProgramOption = None,
    redis: RedisOption = None,
    prefix: PrefixOption = None,
    as_json: JsonOption = False,
) -> None:
    """Send one back with another payload, its identity kept. Shows the difference and asks before."""
    given = [name for name, value in (("data", data), ("merge", merge), ("editor", editor or None)) if value]
    if len(given) > 1:
        raise WrongCommand(
            f"say one of --data, --merge and --editor, not {' and '.join(f'--{each}' for each in given)}"
        )
    may_ask = sys.stdin.isatty() and not as_json and "-" not in (data, merge)
    if not given and not may_ask:
        raise WrongCommand("say --data or --merge where nobody can edit")
    if not (may_ask or yes or dry_run):
        raise WrongCommand("sending an edited payload needs --yes where nobody can be asked; --dry-run shows it")
    found = common.wait_for(_get(store, entry, tenant, program, redis, prefix))
    change: dict[str, Any] = {name: common.read_json(f"--{name}", text) for name, text in
                              (("data", data), ("merge", merge)) if text is not None}  # fmt: skip
    if not change:
        change = {"data": _from_editor(found)}
        if payload_fingerprint(change["data"]) == payload_fingerprint(found.letter.data):
            raise Done("nothing was changed, so nothing was sent")
    made = make_edit(found.letter.data, why=why, tenant_id=found.letter.tenant_id, **{"data": KEEP, **change})
    if not as_json:
        _show(found.letter.data, made.data)
    if may_ask and not yes and not dry_run:
        common.ask(f"Send {entry} back to {found.letter.source!r} with this payload?")
    identity = None if dry_run else common.wait_for(_send(found, made, by or whoami(), tenant, program, redis, prefix))
    _tell(found, made, identity, as_json)


async def _get(
    store: str, entry: str, tenant: str | None, program: str | None, redis: str | None, prefix: str | None
) -> Found:
    async with opened(program, redis, prefix) as app:
        console = await app.dead_letters(tenant_id=tenant)
        return await console.get_editable(name_of_store(console, store), entry)


async def _send(
    found: Found,
    made: Edit,
    by: str,
    tenant: str | None,
    program: str | None,
    redis: str | None,
    prefix: str | None,
) -> str:
    async with opened(program, redis, prefix) as app:
        console = await app.dead_letters(tenant_id=tenant)
        return await console.redrive_edited(found.store, found.letter.id, made, by=by)


def _from_editor(found: Found) -> Any:
    """The payload after somebody has edited it; what is no JSON may be mended."""
    command = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    # Payloads hold what errors do not: the file is ours alone, and gone afterwards.
    with tempfile.TemporaryDirectory(prefix="bullpen-") as directory:
        path = Path(directory) / "payload.json"
        path.write_text(_pretty(found.letter.data) + "\n", encoding="utf-8")
        path.chmod(0o600)
        while True:
            try:
                subprocess.run([*shlex.split(command), str(path)], check=True)
            except (OSError, ValueError, subprocess.CalledProcessError) as error:
                raise Done(
                    f"the editor {command!r} failed ({error}); nothing was sent. Set EDITOR, or say --data"
                ) from None
            try:
                return json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                common.ask(f"This is no JSON: {error}. Edit it again?", default=True)


def _show(before: Any, after: Any) -> None:
    lines = difflib.unified_diff(_pretty(before).splitlines(), _pretty(after).splitlines(), "stored", "edited", n=2)
    for line in lines:
        common.err.print(Text(line.rstrip("\n"), style=_COLOURS.get(line[:1], "")))


def _pretty(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2)


def _tell(found: Found, made: Edit, identity: str | None, as_json: bool) -> None:
    if as_json:
        told = {"store": found.store, "entry": found.letter.id, "id": identity, "dryRun": identity is None}
        common.print_json({**told, **made.note()})
    elif identity is None:
        common.out.print(f"would be sent back to {found.letter.source}: {found.letter.id}", markup=False)
    else:
        common.out.print(f"sent back to {found.letter.source}: {identity}", markup=False)
