"""Groups of commands, declared as typed functions and made for the parser when one is used.

In: functions whose options are annotated, and whose first parameter may be a context (`bullpen.cli.context`), which
stands for options that many commands share. Out: the tree that Typer's parser walks. A module is imported when one of
its commands is run, completed or explained: all of them together take ten times as long.
Elsewhere: which commands there are (`commands`), what the shared options do (`context`).
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import NoneType
from typing import Any, Final, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

__all__ = ["Group", "Options", "Place", "choices_of", "default_of", "kind_of", "make", "metavar_of"]

_FIRST: Final = {"list": 0, "show": 1}
F = TypeVar("F", bound=Callable[..., Any])

_SETTINGS: Final[dict[str, Any]] = {
    "add_completion": False,
    "rich_markup_mode": None,  # its help takes as long to import as the rest of the program
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}


class Options:
    """Base of all contexts: dataclasses whose fields are options."""


class Place(NamedTuple):
    """Where a command is that has not been imported yet."""

    name: str
    """`module:name`, in this package."""
    help: str
    is_group: bool = True

    def load(self) -> Any:
        module, _, name = self.name.partition(":")
        return getattr(importlib.import_module(f"bullpen.cli.{module}"), name)


@dataclass(eq=False)
class Group:
    """Commands about one thing."""

    help: str = ""
    entries: dict[str, Any] = field(default_factory=dict)
    """A function, a group, or the place of one."""
    never_suggested: set[str] = field(default_factory=set)

    def command(self, name: str | None = None, *, destroys: bool = False) -> Callable[[F], F]:
        """Declare a command. One that `destroys` is never suggested to whoever mistyped another."""

        def declare(function: F) -> F:
            called = name or function.__name__
            self.entries[called] = function
            if destroys:
                self.never_suggested.add(called)
            return function

        return declare

    def group(self, name: str, help: str) -> Group:
        """Declare a group below this one."""
        self.entries[name] = Group(help)
        return self.entries[name]  # type: ignore[no-any-return]  # entries hold other things too


def make(entry: Any, callback: Callable[..., None] = lambda: None) -> Any:
    """The command of a function or group, as the parser wants it. `callback` has options of the group itself."""
    if isinstance(entry, Place) and not entry.is_group:
        entry = entry.load()
    if not isinstance(entry, Group | Place):
        app = typer.Typer(**_SETTINGS)
        app.command(cls=_Command)(_with_options(entry))
        return typer.main.get_command(app)
    app = typer.Typer(
        cls=_Group, no_args_is_help=True, subcommand_metavar="COMMAND ...", options_metavar="", **_SETTINGS
    )
    app.callback(help=entry.help)(callback)
    made: Any = typer.main.get_command(app)
    made.commands = _Entries(entry)
    return made


def _with_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with the fields of its context as parameters of its own, and run to its end if it is a coroutine."""
    own = list(inspect.signature(function, eval_str=True).parameters.values())
    kind = own[0].annotation if own and _is_context(own[0].annotation) else None
    shared = [] if kind is None else [*inspect.signature(kind).parameters.values()]
    hints = {} if kind is None else get_type_hints(kind, include_extras=True)

    def call(**given: Any) -> Any:
        context = [] if kind is None else [kind(**{each.name: given.pop(each.name) for each in shared})]
        result = function(*context, **given)
        if inspect.iscoroutine(result):
            import asyncio

            return asyncio.run(result)
        return result

    parameters = [
        *(each.replace(kind=each.KEYWORD_ONLY) for each in own[1 if kind else 0 :]),
        *(each.replace(kind=each.KEYWORD_ONLY, annotation=hints[each.name]) for each in shared),
    ]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # functions may have one
    call.__annotations__ = {each.name: each.annotation for each in parameters}
    call.__name__, call.__doc__ = function.__name__, function.__doc__
    return call


def _is_context(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Options)


class _Entries(Mapping[str, Any]):
    """Commands of a group, each made when it is asked for."""

    def __init__(self, source: Group | Place) -> None:
        self._source = source
        self._made: dict[str, Any] = {}

    @property
    def group(self) -> Group:
        if isinstance(self._source, Place):
            self._source = self._source.load()
        assert isinstance(self._source, Group)
        return self._source

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = make(self.group.entries[name])
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.group.entries, key=lambda name: _FIRST.get(name, len(_FIRST))))

    def __len__(self) -> int:
        return len(self.group.entries)

    def __contains__(self, name: object) -> bool:
        return name in self.group.entries

    def summaries(self) -> list[tuple[str, str]]:
        return [(name, _summary(self.group.entries[name])) for name in self]


def _summary(entry: Any) -> str:
    """The first sentence of the help."""
    text = " ".join((getattr(entry, "help", None) or inspect.getdoc(entry) or "").split())
    return f"{text.partition('. ')[0].rstrip('.')}."


# What the parser sees -----------------------------------------------------------------------------------------------


class _Group(TyperGroup):
    """A noun. Alone it lists, where a list needs no argument."""

    commands: Any

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        is_alone = not args or (args[0].startswith("-") and args[0] not in ("-h", "--help", "--version"))
        if is_alone and not ctx.resilient_parsing and _lists(self.commands.group.entries.get("list")):
            args = ["list", *args]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands and not ctx.resilient_parsing:
            group: Group = self.commands.group
            safe = [name for name in group.entries if name not in group.never_suggested]
            near = difflib.get_close_matches(args[0], safe, 3)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there is {', '.join(self.commands)}"
            ctx.fail(f"no such command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_parameters(self, formatter)
        with formatter.section("Commands"):
            formatter.write_dl(self.commands.summaries())


def _lists(entry: Any) -> bool:
    """Whether this lists without being given anything."""
    if entry is None or isinstance(entry, Group):
        return False
    own = [*inspect.signature(entry).parameters.values()][1:]
    return all(each.default is not each.empty for each in own)


class _Command(TyperCommand):
    """A verb, whose help is in our words and not in those of the parser."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        parameters: list[Any] = self.params
        arguments = [each for each in parameters if each.param_type_name == "argument" and not each.hidden]
        return ["[OPTIONS]", *(metavar_of(self, each) for each in arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        _write_parameters(self, formatter)


def _write_parameters(command: Any, formatter: Any) -> None:
    rows: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for each in command.params:
        if each.param_type_name == "argument" and not each.hidden:
            rows["Arguments"].append((metavar_of(command, each), each.help or ""))
        elif each.param_type_name == "option" and not each.hidden:
            names = ", ".join([*each.opts, *each.secondary_opts])
            default = default_of(each)
            rows["Options"].append(
                (
                    names if each.is_flag else f"{names} {metavar_of(command, each)}",
                    f"{each.help or ''}{f' [{default}]' if default else ''}",
                )
            )
    rows["Options"].append(("-h, --help", "Show this help."))
    for title, lines in rows.items():
        if lines:
            with formatter.section(title):
                formatter.write_dl(lines)


def kind_of(command: Any, parameter: Any) -> Any:
    """The type that our own function gives the parameter: what the parser makes of it differs between its versions."""
    kind = get_type_hints(inspect.unwrap(command.callback)).get(parameter.name)
    while get_args(kind) and get_origin(kind) is not Literal:  # of `list[X] | None` the X
        kind = next(part for part in get_args(kind) if part is not NoneType)
    return kind


def choices_of(kind: Any) -> tuple[str, ...]:
    """The words that a parameter of this type takes; empty where it takes others."""
    if get_origin(kind) is Literal:
        return get_args(kind)
    return tuple(str(each.value) for each in kind) if isinstance(kind, type) and issubclass(kind, Enum) else ()


def metavar_of(command: Any, parameter: Any) -> str:
    """What stands for the value of a parameter."""
    if parameter.metavar:
        return str(parameter.metavar)
    kind = kind_of(command, parameter)
    return "|".join(choices_of(kind)) or {int: "NUMBER", float: "NUMBER"}.get(kind, "TEXT")


def default_of(option: Any) -> str:
    """What holds where the option is not given; empty where that says nothing."""
    if isinstance(option.show_default, str):
        return option.show_default
    if option.required:
        return "must be given"
    default = getattr(option.default, "value", option.default)
    return "" if default in (None, False, "", []) or not option.show_default else str(default)
