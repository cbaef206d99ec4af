"""Every command that the program shows can be pasted into a shell without harm, and exists."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import bullpen
from bullpen._kernel.command_line import command_line, quote_word
from tests.commands_shown import check_command

HERE = Path(bullpen.__file__).parent
NAMES = (
    "demo|run|exporter|serve|dashboard|top|queues|jobs|schedules|dead-letters|payloads|outbox|projector|workflows|messages|"
    "runs|alerts|migrate|doctor|bench|config|completion"
)
SHOWN = re.compile(rf"\bbullpen (?:{NAMES})\b")
NO_COMMANDS = {
    "cli/demo/display.py": "a title",
    "cli/top/command.py": "a title",
    "outbox/projector.py": "a task's name",
}
HOSTILE = (
    "x; touch /tmp/pwned",
    "$(id)",
    "`id`",
    "a'b\"c",
    "--help",
    "-",
    "",
    "two words",
    "a\nb",
    "\x15rm -rf /\r",
    "\x1b[201~id",
    "\u202egnp",
    "ü€",
    "back\\slash'",
)


@pytest.mark.parametrize("word", HOSTILE)
def test_a_shell_reads_every_word_as_it_is(word: str) -> None:
    done = subprocess.run(["bash", "-c", f"printf %s {quote_word(word)}"], capture_output=True, check=True)

    assert done.stdout.decode() == word


@pytest.mark.parametrize("word", HOSTILE)
def test_a_terminal_gets_no_control_character(word: str) -> None:
    """It obeys them before a shell sees a quote: Ctrl-U deletes the quote itself."""
    assert command_line("jobs list", word).isprintable()


def test_options_stand_behind_the_words_unless_a_word_looks_like_one() -> None:
    assert command_line("jobs list", "emails", state="failed", json=True, limit=None) == (
        "bullpen jobs list emails --state failed --json"
    )
    assert command_line("jobs list", "-x", state="failed") == "bullpen jobs list --state failed -- -x"
    assert command_line("jobs list", "q", name="-x") == "bullpen jobs list q --name=-x"
    for word in HOSTILE:
        check_command(command_line("jobs list", word, state="failed"))


def python_files() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(HERE.rglob("*.py")):
        name = str(path.relative_to(HERE))
        if name not in NO_COMMANDS:
            yield name, ast.parse(path.read_text())


def test_no_command_is_glued_together() -> None:
    """One function quotes: whoever forgets it lets the name of a queue run a program."""
    glued = []
    for name, tree in python_files():
        for node in ast.walk(tree):
            if not isinstance(node, ast.JoinedStr):
                continue
            parts = [ast.unparse(part) if isinstance(part, ast.FormattedValue) else None for part in node.values]
            shown = [isinstance(part, ast.Constant) and bool(SHOWN.search(str(part.value))) for part in node.values]
            if True in shown:
                inserted = [part for part in parts[shown.index(True) :] if part is not None]
                glued += [f"{name}:{node.lineno}" for part in inserted if not _is_safe(part)]
    for path in (HERE / "dashboard" / "templates").glob("*.html"):
        glued += [path.name for _ in re.findall(rf"['\"]bullpen (?:{NAMES})[^'\"]*['\"]\s*~", path.read_text())]
    assert glued == []


def _is_safe(inserted: str) -> bool:
    return "shlex.quote(" in inserted or inserted.isupper()  # a constant of ours


def shown_commands() -> Iterator[str]:
    """Commands as the code and the templates write them; words that are filled in later are `x`."""
    for name, tree in python_files():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "command_line" and node.args:
                yield from _called(node)
            elif (
                name.startswith(("ops/", "dashboard/"))
                and isinstance(node, ast.Constant)
                and re.match(rf"bullpen (?:{NAMES})\b.*$", str(node.value))
            ):
                yield re.split(r"[,;:.]? (?:says|shows|removes|where|with|runs need)\b|[;,]", str(node.value))[0]
    for path in (HERE / "dashboard" / "templates").glob("*.html"):
        text = path.read_text()
        yield from re.findall(rf"\"(bullpen (?:{NAMES})\b[^\"]*)\"", text)
        for call in re.findall(r"command_line\([^()]*\)", text):
            (node,) = [each for each in ast.walk(ast.parse(call)) if isinstance(each, ast.Call)]
            yield from _called(node)


def _called(node: ast.Call) -> Iterator[str]:
    command, *words = node.args
    if isinstance(command, ast.Constant):
        flags = [
            f"--{each.arg.replace('_', '-')}" + (" 1" if not _is_flag(each.value) else "")
            for each in node.keywords
            if each.arg is not None and each.arg != "state"
        ]
        yield " ".join(["bullpen", str(command.value), *("1" for _ in words), *flags])


def _is_flag(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


def test_every_command_that_is_shown_exists() -> None:
    found = sorted(set(shown_commands()))

    assert len(found) > 30
    for line in found:
        check_command(line)


def test_the_check_of_commands_can_fail() -> None:
    for line in (
        "bullpen queues dance",
        "bullpen dance",
        "bullpen jobs list x --fingerprint x",
        "bullpen jobs retry",
    ):
        with pytest.raises(AssertionError):
            check_command(line)
    assert shlex.split(command_line("queues show", "a b"))[-1] == "a b"
