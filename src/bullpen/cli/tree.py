"""Groups of commands, declared as typed functions and made for the parser when one is used.

In: functions whose parameters are annotated with `Option` or `Argument`, and whose first parameter may be a context
(`bullpen.cli.context`), which stands for options that many commands share. Out: the tree that click's parser walks. A
module is imported when one of its commands is run, completed or explained: all together take ten times as long.
Elsewhere: which commands there are (`commands`), what the shared options do (`context`).
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, Final, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import click

__all__ = [
    "Argument",
    "ClickCommand",
    "Complete",
    "Group",
    "GroupCommand",
    "LazyCommand",
    "Option",
    "OptionGroup",
    "Parameter",
    "make",
]

F = TypeVar("F", bound=Callable[..., Any])
Complete = Callable[[click.Context, str], Iterable[str]]

_FIRST: Final = {"list": 0, "show": 1}
_HELP: Final = ("-h, --help", "Show this help.")
_SETTINGS: Final[Any] = {"help_option_names": ["-h", "--help"]}


class Option:
    """How an option is written and explained. `default` says what holds without it, where the value does not."""

    def __init__(
        self,
        *names: str,
        help: str = "",
        metavar: str | None = None,
        min: float | None = None,
        max: float | None = None,
        default: str = "",
        hidden: bool = False,
        complete: Complete | None = None,
    ) -> None:
        self.names, self.help, self.metavar = names, help, metavar
        self.range, self.default, self.hidden, self.complete = (min, max), default, hidden, complete


class Argument(Option):
    """The same for an argument, which has no name."""

    def __init__(self, metavar: str, help: str, *, min: float | None = None, complete: Complete | None = None) -> None:
        super().__init__(help=help, metavar=metavar, min=min, complete=complete)


class OptionGroup:
    """Base of all contexts: dataclasses whose fields are options."""


class LazyCommand(NamedTuple):
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
        made = self.entries[name] = Group(help)
        return made


# Parameters ---------------------------------------------------------------------------------------------------------


class Parameter(NamedTuple):
    """One parameter of a command: what it is in Python, and how it is written."""

    name: str
    kind: Any
    """Its type, without `list` and `None` around it."""
    is_list: bool
    given: Option
    default: Any

    @staticmethod
    def read(parameter: inspect.Parameter, annotation: Any) -> Parameter:
        kind, given = get_args(annotation)
        is_list = False
        while get_args(kind) and get_origin(kind) is not Literal:  # of `list[X] | None` the X
            is_list = is_list or get_origin(kind) is list
            kind = next(part for part in get_args(kind) if part is not NoneType)
        return Parameter(parameter.name, kind, is_list, given, parameter.default)

    @property
    def is_required(self) -> bool:
        return self.default is inspect.Parameter.empty

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it takes; empty where it takes others."""
        if get_origin(self.kind) is Literal:
            return get_args(self.kind)
        return tuple(str(each.value) for each in self.kind) if issubclass(self.kind, Enum) else ()

    @property
    def metavar(self) -> str:
        """What stands for its value."""
        return self.given.metavar or "|".join(self.choices) or {int: "NUMBER", float: "NUMBER"}.get(self.kind, "TEXT")

    @property
    def shown_default(self) -> str:
        """What holds where it is not given; empty where that says nothing."""
        if self.is_required:
            return "must be given"
        default = getattr(self.default, "value", self.default)
        return self.given.default or ("" if default in (None, False, "") else str(default))

    @property
    def shown(self) -> str:
        """As it stands in the help."""
        names = ", ".join(self.option_names)
        return (
            self.metavar
            if isinstance(self.given, Argument)
            else names
            if self.kind is bool
            else f"{names} {self.metavar}"
        )

    @property
    def option_names(self) -> tuple[str, ...]:
        return self.given.names or (f"--{self.name.replace('_', '-')}",)

    def value(self, parsed: Any) -> Any:
        """What the function gets."""
        if self.is_list:
            return [self._one(each) for each in parsed] or (None if not self.is_required else [])
        return None if parsed is None else self._one(parsed)

    def _one(self, parsed: Any) -> Any:
        return self.kind(parsed) if isinstance(self.kind, type) and issubclass(self.kind, Enum) else parsed

    def make(self) -> click.Parameter:
        """As the parser wants it."""
        common: dict[str, Any] = {"type": self._type(), "metavar": self.metavar, "required": self.is_required}
        if not self.is_required and not self.is_list:
            common["default"] = getattr(self.default, "value", self.default)
        if self.given.complete is not None:
            ask = self.given.complete
            common["shell_complete"] = lambda ctx, _parameter, word: list(ask(ctx, word))
        if isinstance(self.given, Argument):
            return click.Argument([self.name], nargs=-1 if self.is_list else 1, **common)
        common["is_flag"] = self.kind is bool
        return click.Option([*self.option_names, self.name], multiple=self.is_list, hidden=self.given.hidden, **common)

    def _type(self) -> Any:
        if self.choices:
            return click.Choice(self.choices)
        if self.kind in (int, float):
            return _Number(self.kind, *self.given.range)
        return click.Path(path_type=Path) if self.kind is Path else click.BOOL if self.kind is bool else click.STRING


class _Number(click.ParamType):  # type: ignore[type-arg]  # generic in newer versions only
    """A number within bounds, refused in plain words."""

    name = "number"

    def __init__(self, kind: type[int | float], least: float | None, most: float | None) -> None:
        self._kind, self._least, self._most = kind, least, most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            number = self._kind(value)
        except ValueError:
            self.fail(f"{value!r} is no {'whole ' if self._kind is int else ''}number", param, ctx)
        if self._least is not None and number < self._least:
            self.fail(f"{value} is too small, at least {self._least:,}", param, ctx)
        if self._most is not None and number > self._most:
            self.fail(f"{value} is too large, at most {self._most:,}", param, ctx)
        return number


# Making them --------------------------------------------------------------------------------------------------------


def make(entry: Any, *parameters: click.Parameter) -> Any:
    """The command of a function or group, as the parser wants it. `parameters` are options of the group itself."""
    if isinstance(entry, LazyCommand) and not entry.is_group:
        entry = entry.load()
    return GroupCommand(entry, parameters) if isinstance(entry, Group | LazyCommand) else ClickCommand(entry)


class ClickCommand(click.Command):
    """A verb: calls a function with what was parsed, and runs it to its end if it is a coroutine."""

    def __init__(self, function: Callable[..., Any]) -> None:
        signature = inspect.signature(function, eval_str=True)
        own = list(signature.parameters.values())
        is_shared = bool(own) and isinstance(own[0].annotation, type) and issubclass(own[0].annotation, OptionGroup)
        self._function, self._context = function, own[0].annotation if is_shared else None
        self._own = [Parameter.read(each, each.annotation) for each in own[is_shared:]]
        self._shared: list[Parameter] = []
        if self._context is not None:
            hints = get_type_hints(self._context, include_extras=True)
            fields = inspect.signature(self._context).parameters.values()
            self._shared = [Parameter.read(each, hints[each.name]) for each in fields]
        super().__init__(
            None,
            context_settings=_SETTINGS,
            help=inspect.getdoc(function),
            params=[each.make() for each in self.parameters],
            callback=self._call,
        )

    @property
    def parameters(self) -> list[Parameter]:
        return [*self._own, *self._shared]

    def _call(self, **parsed: Any) -> Any:
        context = [] if self._context is None else [self._context(**_values(self._shared, parsed))]
        result = self._function(*context, **_values(self._own, parsed))
        if inspect.iscoroutine(result):
            import asyncio

            return asyncio.run(result)
        return result

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return ["[OPTIONS]", *(each.metavar for each in self._own if isinstance(each.given, Argument))]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        _write_parameters(self.parameters, formatter)


def _values(parameters: list[Parameter], parsed: dict[str, Any]) -> dict[str, Any]:
    return {each.name: each.value(parsed[each.name]) for each in parameters}


def _write_parameters(parameters: Iterable[Parameter], formatter: click.HelpFormatter) -> None:
    rows: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for each in parameters:
        if isinstance(each.given, Argument):
            rows["Arguments"].append((each.shown, each.given.help))
        elif not each.given.hidden:
            default = f" [{each.shown_default}]" if each.shown_default else ""
            rows["Options"].append((each.shown, f"{each.given.help}{default}"))
    rows["Options"].append(_HELP)
    for title, lines in rows.items():
        if lines:
            with formatter.section(title):
                formatter.write_dl(lines)


class GroupCommand(click.Group):
    """A noun. Alone it lists, where a list needs no argument."""

    commands: Any

    def __init__(self, source: Group | LazyCommand, parameters: Iterable[click.Parameter] = ()) -> None:
        super().__init__(None, context_settings=_SETTINGS, help=source.help, params=list(parameters))
        self.commands = _Entries(source)
        self.subcommand_metavar, self.options_metavar = "COMMAND ...", ""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        is_alone = not args or (args[0].startswith("-") and args[0] not in ("-h", "--help", "--version"))
        if is_alone and not ctx.resilient_parsing:
            if _lists(self.commands.group.entries.get("list")):
                args = ["list", *args]
            elif not args:
                click.echo(ctx.get_help())
                ctx.exit(2)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args[0] not in self.commands and not ctx.resilient_parsing:
            group: Group = self.commands.group
            safe = [name for name in group.entries if name not in group.never_suggested]
            near = difflib.get_close_matches(args[0], safe, 3)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"there is {', '.join(self.commands)}"
            ctx.fail(f"no such command {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Options"):
            own = [(each.opts[0], each.help or "") for each in self.params if isinstance(each, click.Option)]
            formatter.write_dl([*own, _HELP])
        with formatter.section("Commands"):
            formatter.write_dl([(name, _summary(self.commands.group.entries[name])) for name in self.commands])


class _Entries(Mapping[str, Any]):
    """Commands of a group, each made when it is asked for."""

    def __init__(self, source: Group | LazyCommand) -> None:
        self._source = source
        self._made: dict[str, Any] = {}

    @property
    def group(self) -> Group:
        if isinstance(self._source, LazyCommand):
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


def _summary(entry: Any) -> str:
    """The first sentence of the help."""
    text = " ".join((getattr(entry, "help", None) or inspect.getdoc(entry) or "").split())
    return f"{text.partition('. ')[0].rstrip('.')}."


def _lists(entry: Any) -> bool:
    """Whether this lists without being given anything."""
    if entry is None or isinstance(entry, Group):
        return False
    own = [*inspect.signature(entry).parameters.values()][1:]
    return all(each.default is not each.empty for each in own)
