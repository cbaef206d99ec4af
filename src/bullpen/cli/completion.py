"""`bullpen completion SHELL`: what a shell needs to complete nouns, verbs, options, choices and names of queues.

The script that it prints asks this program for candidates each time, so it need not be renewed with the program. In:
the words of the line and the one being written. Out: candidates, one a line, with a tab before what explains them.
Names of queues come from the server if it answers at once, and from no server that would have to be started: whoever
presses Tab wants neither to wait nor to read errors. Elsewhere: the tree of commands (`commands`).
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum, StrEnum
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Final, NamedTuple, get_args, get_type_hints

import typer

from bullpen import embedded
from bullpen.app import connect
from bullpen.errors import BullpenError
from bullpen.queue.browse import find_queues
from bullpen.settings import Settings
from bullpen.wire.events import EventName

_SERVER_MAY_TAKE_S: Final = 0.7
_LONGEST_HELP: Final = 80

_QUEUES: Final = frozenset({"QUEUE", "[QUEUE]..."})
_WORDS: Final[dict[str, tuple[str, ...]]] = {
    "--event": tuple(EventName),
    "--log-level": ("debug", "info", "warning", "error"),
    "--log-format": ("console", "json"),
    "--only": ("worker", "outbox", "projector", "messages"),
}
"""Values of options that are text for the parser, because others are possible or come from elsewhere."""


class Shell(StrEnum):
    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


class Candidate(NamedTuple):
    value: str
    help: str = ""


_FILES: Final = Candidate("\x00files")
"""Stands for what the shell knows better."""

# Each function gives the words of the line up to the cursor to the program. In bash a colon and an equals sign are
# words of their own, so the line itself is split again, and what stands before the last of them is cut off.
_SCRIPTS: Final = {
    Shell.BASH: """\
_bullpen_complete() {
    local line="${COMP_LINE:0:COMP_POINT}" word="${COMP_WORDS[COMP_CWORD]}" whole reply
    local -a words
    read -r -a words <<< "$line"
    case "$line" in *[[:space:]]) words+=("") ;; esac
    whole="${words[${#words[@]}-1]}"
    COMPREPLY=()
    while IFS= read -r reply; do
        if [ "$reply" = "@files" ]; then
            compopt -o filenames 2>/dev/null
            while IFS= read -r reply; do COMPREPLY+=("$reply"); done < <(compgen -f -- "$word")
            return
        fi
        COMPREPLY+=("${reply#"${whole%"$word"}"}")
    done < <(_BULLPEN_TAB=bash "${COMP_WORDS[0]}" completion bash -- "${words[@]:1}" 2>/dev/null)
}
complete -F _bullpen_complete bullpen
""",
    Shell.ZSH: """\
#compdef bullpen
_bullpen_complete() {
    local -a described
    local reply
    while IFS= read -r reply; do
        if [[ "$reply" == "@files" ]]; then _files; return; fi
        described+=("${${reply%%$'\\t'*}//:/\\\\:}:${reply#*$'\\t'}")
    done < <(_BULLPEN_TAB=zsh "${words[1]}" completion zsh -- "${(@)words[2,CURRENT]}" 2>/dev/null)
    (( ${#described} )) && _describe -V bullpen described
}
(( $+functions[compdef] )) || { autoload -Uz compinit && compinit; }
compdef _bullpen_complete bullpen
""",
    Shell.FISH: """\
function __bullpen_complete
    set -l words (commandline -opc) (commandline -ct)
    for reply in (_BULLPEN_TAB=fish $words[1] completion fish -- $words[2..-1] 2>/dev/null)
        if test "$reply" = "@files"
            __fish_complete_path (commandline -ct)
        else
            echo $reply
        end
    end
end
complete -c bullpen -f -a "(__bullpen_complete)"
""",
}


def completion(
    shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.", show_default=False)],
    words: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
) -> None:
    """Print what makes a shell complete this command: eval "$(bullpen completion bash)" in ~/.bashrc.

    For zsh the same in ~/.zshrc; for fish: bullpen completion fish > ~/.config/fish/completions/bullpen.fish
    """
    if "_BULLPEN_TAB" not in os.environ:
        print(_SCRIPTS[shell], end="")
        return
    from bullpen.cli.commands import tree

    logging.disable(logging.CRITICAL)
    written = words or [""]
    for candidate in candidates(tree(), written[:-1], written[-1]):
        if candidate is _FILES:
            print("@files")
        elif candidate.value.isprintable():  # else no shell could take it as it is, and a terminal would obey it
            print(candidate.value if shell is Shell.BASH else f"{candidate.value}\t{candidate.help}")


def candidates(root: Any, before: Sequence[str], word: str) -> list[Candidate]:
    """What may stand where `word` is being written, after the words `before`."""
    place = _place(root, before)
    if place.option is not None:
        return _matching(_values(place.command, place.option, place.given), word)
    if word.startswith("--") and "=" in word:
        name, _, value = word.partition("=")
        option = _option(place.command, name)
        found = _matching(_values(place.command, option, place.given), value) if option is not None else []
        return [each if each is _FILES else Candidate(f"{name}={each.value}", each.help) for each in found]
    if word.startswith("-"):
        return _matching(_option_names(place.command, place.used), word)
    if place.subcommands:
        found = [Candidate(name, _short(each)) for name, each in place.subcommands.items() if not each.hidden]
        if "list" in place.subcommands and _takes_queue_first(place.command):
            found += _queues(place.given)
        return _matching(found, word)
    return _matching(_values(place.command, place.argument, place.given), word) if place.argument is not None else []


class _Place(NamedTuple):
    """Where the cursor stands."""

    command: Any
    subcommands: dict[str, Any]
    option: Any
    """Whose value is being written."""
    argument: Any
    """Which is being written, where no option is."""
    used: frozenset[str]
    given: dict[str, str]
    """Values of options that stand before."""


def _place(command: Any, before: Sequence[str]) -> _Place:
    arguments: list[str] = []
    used: set[str] = set()
    given: dict[str, str] = {}
    words = iter(before)
    for word in words:
        if word.startswith("-") and word != "-":
            name, equals, value = word.partition("=")
            option = _option(command, name)
            used.add(name)
            if option is None or option.is_flag:
                continue
            if not equals:
                following = next(words, None)
                if following is None:
                    return _Place(command, {}, option, None, frozenset(used), given)
                value = following
            given[name] = value
        elif word in _subcommands(command) and not arguments:
            command = command.commands[word]
        elif _takes_queue_first(command) and not arguments:
            arguments.append(word)  # the queue stands before its verb
        elif _takes_queue_first(command) and word in _subcommands(command):
            command = command.commands[word]
        else:
            arguments.append(word)
    subcommands = _subcommands(command)
    return _Place(command, subcommands, None, _argument(command, len(arguments)), frozenset(used), given)


def _subcommands(command: Any) -> dict[str, Any]:
    return dict(getattr(command, "commands", {}))


def _takes_queue_first(command: Any) -> bool:
    from bullpen.cli.common import QueueFirst

    return isinstance(command, QueueFirst)


def _option(command: Any, name: str) -> Any:
    for each in command.params:
        if each.param_type_name == "option" and name in (*each.opts, *each.secondary_opts):
            return each
    return None


def _argument(command: Any, position: int) -> Any:
    wanted = [each for each in command.params if each.param_type_name == "argument" and not each.hidden]
    if position < len(wanted):
        return wanted[position]
    return wanted[-1] if wanted and wanted[-1].nargs == -1 else None


def _option_names(command: Any, used: frozenset[str]) -> Iterator[Candidate]:
    for each in command.params:
        if each.param_type_name != "option" or each.hidden:
            continue
        if each.multiple or not used.intersection(each.opts):
            yield from (Candidate(name, _short(each)) for name in each.opts if name.startswith("--"))
    yield Candidate("--help", "Show what there is.")


def _values(command: Any, parameter: Any, given: dict[str, str]) -> list[Candidate]:
    kind = kind_of(command, parameter)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [Candidate(str(choice.value)) for choice in kind]
    if parameter.metavar in _QUEUES:
        return _queues(given)
    for name in parameter.opts:
        if name in _WORDS:
            return [Candidate(value) for value in _WORDS[name]]
    return [_FILES] if kind is Path else []


def kind_of(command: Any, parameter: Any) -> Any:
    """The type that our own function gives the parameter: what the parser makes of it differs between its versions."""
    kind = get_type_hints(inspect.unwrap(command.callback)).get(parameter.name)
    while get_args(kind):  # of `list[X] | None` the X
        kind = next(part for part in get_args(kind) if part is not NoneType)
    return kind


def _matching(found: Iterable[Candidate], word: str) -> list[Candidate]:
    return [each for each in found if each is _FILES or each.value.startswith(word)]


def _short(described: Any) -> str:
    text = getattr(described, "help", None) or ""
    return " ".join(text.split("\n\n")[0].split())[:_LONGEST_HELP]


def _queues(given: dict[str, str]) -> list[Candidate]:
    """Names from a server that is there. Whatever goes wrong, there are none."""
    with contextlib.suppress(BullpenError, OSError, TimeoutError, ValueError):
        settings = Settings.load(redis_url=given.get("--redis"), redis_prefix=given.get("--prefix"))
        url = settings.connection_url()
        if not url.startswith("embedded:") or embedded.is_running(settings.embedded.data_dir):
            return [Candidate(name) for name in asyncio.run(_find(url, settings.redis.prefix))]
    return []


async def _find(url: str, prefix: str) -> list[str]:
    connection = connect(url)
    try:
        async with asyncio.timeout(_SERVER_MAY_TAKE_S):
            return await find_queues(connection, prefix)
    finally:
        await connection.aclose()
