"""Write docs/reference/cli.md from the tree of commands: `python -m tools.cli_reference [--check]`.

In: the commands as the parser knows them. Out: the page, with every command, argument, option and default. A test
compares the two, so that no option can be added, renamed or removed without its line in the reference.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bullpen.cli.commands import tree
from bullpen.cli.tree import Argument, Parameter

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("docs") / "reference" / "cli.md"

_HEAD = """\
# Command line

Written by `make docs-table` from the commands themselves. How to work with them: [at a
terminal](../operate/terminal.md).

Results go to stdout, everything else to stderr. `--json` prints documents for programs, and nothing else on stdout.
A server or database that is not named comes from the [settings](settings.md); `bullpen config show`
shows the value and its origin.

| exit code | means |
|---|---|
| 0 | done |
| 1 | not done, or the result is bad; one line on stderr gives the reason |
| 2 | wrong command or option; nothing was opened or changed |
| 3 | the server cannot be reached |
| 4 | the time of `--timeout` is over; the awaited work continues |
| 130 | interrupted by Ctrl-C, or a question answered with no |

If a signal ends `bullpen top`, the exit code is 128 plus its number. `-h` and `--help` work everywhere;
`bullpen --version` prints the version.

Commands that delete by filter ask first; without a terminal to confirm on, pass `--yes`. `--dry-run` only counts and
changes nothing. Times are written `1500` (milliseconds), `90s`, `15m`, `2h`, `1d`.
"""


def commands(command: Any, path: tuple[str, ...] = ("bullpen",)) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every group and command, in the order of the help."""
    if not getattr(command, "hidden", False):
        yield path, command
        for name, below in getattr(command, "commands", {}).items():
            yield from commands(below, (*path, name))


def make_page() -> str:
    blocks = [_HEAD]
    for path, command in commands(tree()):
        if len(path) == 1:
            continue
        blocks.append(_block(path, command))
    return "\n".join(blocks)


def _block(path: tuple[str, ...], command: Any) -> str:
    name, level = " ".join(path), "#" * min(len(path), 4)
    text = " ".join((command.help or "").split())
    if hasattr(command, "commands"):
        return f"{level} `{name}`\n\n{text}\n"
    shown = [each for each in command.parameters if not each.given.hidden]
    arguments = [each for each in shown if isinstance(each.given, Argument)]
    options = [each for each in shown if not isinstance(each.given, Argument)]
    usage = " ".join([name, *(["[OPTIONS]"] if options else []), *(each.metavar for each in arguments)])
    lines = [f"{level} `{name}`\n", f"{text}\n", f"    {usage}\n"]
    if shown:
        rows = [f"| `{_cell(each.shown)}` | {_cell(each.given.help)} | |" for each in arguments]
        rows += [f"| `{_cell(each.shown)}` | {_cell(each.given.help)} | {_default(each)} |" for each in options]
        lines.append("\n".join(["| argument or option | | default |", "|---|---|---|", *rows]) + "\n")
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _default(option: Parameter) -> str:
    default = option.shown_default
    return f"`{default}`" if default and not option.given.default and not option.is_required else default


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="Keep the reference of the command line in step with the commands.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the page is out of date")
    path, wanted = root / PAGE, make_page()
    if not parser.parse_args(arguments).check:
        path.write_text(wanted, encoding="utf-8")
    elif not path.exists() or path.read_text(encoding="utf-8") != wanted:
        print(f"{PAGE} is out of date: run `make docs-table` and commit the result", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
