"""Find each value: argument, environment, file, default; the first that has it wins.

In: arguments of the caller, environment variables, `bullpen.toml` or the `[tool.bullpen]` table of `pyproject.toml`.
Out: a checked value and its `Origin`. A value that cannot be used stops the start with a message that names the
variable, the argument or the line of the file it came from. Elsewhere: what there is to find (`sections`).
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from bullpen._kernel.addresses import show_address
from bullpen._kernel.logs import get_logger
from bullpen._kernel.options import OptionKind, OptionMetadata, metadata_of
from bullpen._kernel.ownership import Distrusted, distrust_directory, read_trusted
from bullpen.errors import InvalidOption
from bullpen.settings.origin import Origin

__all__ = ["SettingOption", "Sources", "find_file", "misspelt", "options_of", "refuse_unknown_arguments"]

_OTHER_VARIABLES: Final = ("BULLPEN_TEST", "BULLPEN_BENCH", "BULLPEN_SERVER_BINARY")
"""Read elsewhere."""
_logger: Final = get_logger("bullpen.settings")


@dataclass(frozen=True, slots=True)
class SettingOption:
    """One option of one section."""

    section: str
    name: str
    default: object
    metadata: OptionMetadata
    variable: str

    @property
    def key(self) -> str:
        return f"{self.section}.{self.name}"

    @property
    def argument(self) -> str:
        return f"{self.section}_{self.name}"

    @property
    def kind(self) -> OptionKind:
        return self.metadata.kind


def options_of(section: str, kind: type[Any]) -> tuple[SettingOption, ...]:
    """The options of one section: its own first, then those of the option classes that it inherits."""
    own = vars(kind)["__annotations__"]
    return tuple(
        _option(section, entry, known)
        for entry in sorted(fields(kind), key=lambda entry: entry.name not in own)
        if (known := metadata_of(entry)) is not None
    )


def _option(section: str, entry: Field[Any], known: OptionMetadata) -> SettingOption:
    assert entry.default is not MISSING
    variable = known.variable or f"BULLPEN_{section}_{entry.name}".upper()
    return SettingOption(section, entry.name, entry.default, known, variable)


@dataclass(frozen=True, slots=True)
class _File:
    """The configuration file that was found, its names already known to be right."""

    path: Path
    tables: Mapping[str, Mapping[str, object]]
    within: str = ""
    """The table inside a file that is not ours alone: `tool.bullpen.`"""


@dataclass(frozen=True, slots=True)
class Sources:
    """Everywhere a value may be said."""

    arguments: Mapping[str, object]
    environ: Mapping[str, str]
    file: _File | None
    start: Path

    def find(self, option: SettingOption) -> tuple[object, Origin]:
        """The value of one option, checked, and where it was found."""
        kind, known = option.kind, option.metadata
        if (given := self.arguments.get(option.argument)) is not None:
            return _checked(kind, given, Origin("argument", option.argument), self.start)
        for variable in (option.variable, known.general):
            if variable is not None and (text := self.environ.get(variable)):
                return _checked(kind, kind.from_text(text), Origin("environment", variable), self.start)
        if known.otherwise is not None and (found := known.otherwise(self.environ)) is not None:
            return found
        if self.file is not None and (given := self.file.tables.get(option.section, {}).get(option.name)) is not None:
            origin = Origin("file", f"{self.file.within}{option.key} in {self.file.path}")
            return _checked(kind, given, origin, self.file.path.parent)
        if known.derived is not None:
            return known.derived(self.start)
        return option.default, Origin("default", "")


def _checked(kind: OptionKind, value: object, origin: Origin, base: Path) -> tuple[object, Origin]:
    if not kind.accepts(value):
        shown = show_address(value) if isinstance(value, str) and "://" in value else kind.shown(value)
        raise InvalidOption(str(origin), kind.expected, shown if isinstance(value, str) else value)
    if kind.is_path:
        # Relative to the file that says it, or to where we were started; never to where a process happens to be later.
        return base / Path(str(value)).expanduser(), origin
    return value, origin


def misspelt(environ: Mapping[str, str], options: Iterable[SettingOption]) -> dict[str, str]:
    """Variables that look like settings of bullpen but are unknown, and what each was probably meant to be.

    Others are not ours to judge: an orchestrator makes variables of its own from the names of services.
    """
    known = {option.variable for option in options}
    found: dict[str, str] = {}
    for name in sorted(environ):
        if name.startswith("BULLPEN_") and name not in known and not name.startswith(_OTHER_VARIABLES):
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.88)
            if nearest:
                found[name] = nearest[0]
    return found


def refuse_unknown_arguments(arguments: Mapping[str, object], options: Iterable[SettingOption]) -> None:
    known = [option.argument for option in options]
    for argument in arguments:
        _refuse_unknown(argument, known, "an argument of Settings.load")


def _refuse_unknown(name: str, known: list[str], what: str) -> None:
    if name not in known:
        nearest = difflib.get_close_matches(name, known, n=1)
        expected = f"one of {', '.join(known)}"
        raise InvalidOption(what, expected, name, suggestion=nearest[0] if nearest else None)


def find_file(start: Path, names: Mapping[str, list[str]]) -> _File | None:
    """The nearest file upwards that configures us. The search ends with the repository it begins in, and where another
    user of the machine could have written what is found. `names` are the keys of each section."""
    for directory in (start, *start.parents):
        if (reason := distrust_directory(directory)) is not None:
            _logger.warning("settings in and above %s are ignored: it %s", directory, reason)
            return None
        own, project = directory / "bullpen.toml", directory / "pyproject.toml"
        try:
            if (found := _read_toml(own)) is not None:
                return _check_names(own, found, names, within="")
            tool = (_read_toml(project) or {}).get("tool")
        except Distrusted:
            return None
        if isinstance(tool, dict) and "bullpen" in tool:
            return _check_names(project, tool["bullpen"], names, within="tool.bullpen.")
        if (directory / ".git").exists():
            return None
    return None


def _read_toml(path: Path) -> dict[str, Any] | None:
    try:
        raw = read_trusted(path)
        return None if raw is None else _parsed(raw)
    except Distrusted as reason:
        _logger.warning("settings in %s are ignored: it %s", path, reason)
        raise
    except (OSError, ValueError) as error:  # no permission; no UTF-8, no TOML
        raise InvalidOption(str(path), "a readable TOML file", str(error)) from error


@lru_cache(maxsize=8)
def _parsed(raw: bytes) -> dict[str, Any]:
    """Each queue without a prefix asks for the settings, and parsing a long file takes longer than reading it."""
    return tomllib.loads(raw.decode())


def _check_names(path: Path, content: Any, names: Mapping[str, list[str]], *, within: str) -> _File:
    if not isinstance(content, dict):
        raise InvalidOption(f"{within.rstrip('.')} in {path}", "a table", content)
    for name, table in content.items():
        _refuse_unknown(name, list(names), f"a section of {within.rstrip('.') or 'the file'} in {path}")
        if not isinstance(table, dict):
            raise InvalidOption(f"{within}{name} in {path}", "a table", table)
        for key in table:
            _refuse_unknown(key, names[name], f"a key of {within}{name} in {path}")
    return _File(path, content, within)
