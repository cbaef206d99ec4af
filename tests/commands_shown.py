"""Whether a command that is shown to people can be typed: parsed by the tree of commands, and not run."""

from __future__ import annotations

import shlex

from bullpen.cli.commands import tree


def check_command(line: str) -> None:
    """Raises AssertionError with the parser's words when there is no such command, argument or option."""
    first, *words = shlex.split(line.replace("$'", "'"))
    assert first == "bullpen", line
    command, context = tree(), None
    try:
        while hasattr(command, "commands"):
            context = command.make_context(command.name, list(words), parent=context)
            if not (rest := [*context._protected_args, *context.args]):
                return  # a group that does something by itself, or prints its help
            _, command, words = command.resolve_command(context, rest)
        if "--help" not in words:
            command.make_context(command.name, list(words), parent=context)
    except Exception as error:
        raise AssertionError(f"{line}: {error}") from None
