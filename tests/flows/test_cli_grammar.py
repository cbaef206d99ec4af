"""One grammar for all commands: noun, verb, object; one verb for one act; help in words that a newcomer knows."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from bullpen.cli.commands import tree
from bullpen.cli.tree import ClickCommand, GroupCommand

pytestmark = pytest.mark.requirement("X-40")

AnyCommand = GroupCommand | ClickCommand
WITHOUT_NOUN = {
    "bench",
    "completion",
    "dashboard",
    "demo",
    "doctor",
    "exporter",
    "init",
    "mark",
    "migrate",
    "run",
    "serve",
    "shell",
    "top",
}
"""Programs, and commands about the installation as a whole."""
VERBS = {
    *("add", "backfill", "cancel", "change", "check", "clean", "confirm", "disable", "discard", "drain", "edit"),
    *("enable", "explain", "follow", "grant", "import", "lint", "list", "obliterate", "pause", "plan", "preview"),
    *(
        "promote",
        "redrive",
        "remove",
        "replay",
        "restore",
        "reseal",
        "resume",
        "retry",
        "rotate",
        "run",
        "send",
        "set",
        "show",
    ),
    *("silence", "simulate", "skip", "start", "stop", "sweep", "test", "unsilence"),
}
VIEWS = {"attempts", "diagram", "groups", "history", "logs", "stats"}
"""What a command shows, where `show` alone would not say which."""
SINGULAR = {"config", "outbox", "parked"}
PRIVATE = re.compile(
    r"\b(told|tells?|look(s|ed)? at|goes on|mends?|whoever|so long|so many|in line|is away|picture|belongs? into)\b"
    r"|(?<!dead[ -])\bletters?\b"
)
"""Words that a reader must decode; the glossary has those that the field uses."""


def every(
    group: GroupCommand | ClickCommand, *before: str
) -> Iterator[tuple[tuple[str, ...], GroupCommand | ClickCommand]]:
    if before:
        yield before, group
    if isinstance(group, GroupCommand):
        for name in group.list_commands(None):  # type: ignore[arg-type]  # it asks for none
            found = group.get_command(None, name)  # type: ignore[arg-type]
            assert isinstance(found, (GroupCommand, ClickCommand))
            yield from every(found, *before, name)


ALL = dict(every(tree()))
LEAVES = [words for words, command in ALL.items() if isinstance(command, ClickCommand)]


@pytest.mark.parametrize("words", LEAVES, ids=" ".join)
def test_a_command_is_nouns_and_one_verb(words: tuple[str, ...]) -> None:
    *nouns, verb = words

    if not nouns:
        assert verb in WITHOUT_NOUN
        return
    assert verb in VERBS | VIEWS
    assert [noun for noun in nouns if not noun.endswith("s") and noun not in SINGULAR] == []


def test_each_verb_is_used() -> None:
    """A verb that no command has any more would let a second word for its act in."""
    assert {words[-1] for words in LEAVES if len(words) > 1} == VERBS | VIEWS


@pytest.mark.parametrize("words", ALL, ids=" ".join)
def test_help_is_sentences_of_common_words(words: tuple[str, ...]) -> None:
    command = ALL[words]
    texts = [command.help or "", *(each.given.help for each in getattr(command, "parameters", ()))]

    for text in filter(None, texts):
        assert PRIVATE.search(text) is None, text
