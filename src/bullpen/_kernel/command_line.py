"""Commands that people copy: every word of them is safe to paste into a shell.

In: a command of ours and its words, which strangers may have chosen: names of queues, ids of jobs. Out: one line. What
a shell would read otherwise is quoted; control characters, which a terminal obeys before any shell sees them, are
written as escapes; a word that begins with a dash is no option.
"""

from __future__ import annotations

import shlex

__all__ = ["command_line", "quote_word"]


def command_line(command: str, *words: str, **options: str | int | bool | None) -> str:
    """`command_line("jobs list", "emails", state="failed")` is `bullpen jobs list emails --state failed`.

    Options that are None, False or empty are left out; True is a flag.
    """
    given = [part for name, value in options.items() for part in _option(name, value)]
    plain = [quote_word(word) for word in words]
    if any(word.startswith("-") for word in words):  # what follows `--` is no option, so options come first
        return " ".join(["bullpen", command, *given, "--", *plain])
    return " ".join(["bullpen", command, *plain, *given])


def quote_word(text: str) -> str:
    """One word for a shell."""
    if text.isprintable() or not text:
        return shlex.quote(text)
    escaped = "".join(_escape(char) for char in text)
    return f"$'{escaped}'"


def _option(name: str, value: str | int | bool | None) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return [flag]
    if value is None or value is False or value == "":
        return []
    text = str(value)
    return [f"{flag}={quote_word(text)}"] if text.startswith("-") else [flag, quote_word(text)]


def _escape(char: str) -> str:
    if char in "'\\":
        return f"\\{char}"
    if char.isprintable():
        return char
    return "".join(f"\\x{byte:02x}" for byte in char.encode("utf-8", "surrogateescape"))
