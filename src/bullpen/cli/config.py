"""`bullpen config`: which settings hold, and where each came from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bullpen.cli import show
from bullpen.cli.context import OnServer
from bullpen.cli.show import Column, Record
from bullpen.cli.tree import Group

if TYPE_CHECKING:
    from bullpen.settings import Setting

app = Group()


@app.command("show")
def show_(at: OnServer) -> None:
    """Print every setting, its value (passwords hidden), where it came from, and its environment variable."""
    from bullpen.settings import Settings, misspelt_variables

    settings = list(Settings.load(redis_url=at.redis, redis_prefix=at.prefix).describe())
    for name, meant in misspelt_variables().items():
        show.warn(f"{name} is not a setting and has no effect; did you mean {meant}?")
    at.list(SETTINGS, settings, empty="")
    for each in settings:
        if each.is_general:
            at.warn(f"{each.key}: {taken_from(each)}; {each.variable} takes precedence")


def taken_from(setting: Setting) -> str:
    """Of a value that may have been meant for somebody else."""
    return f"taken from {setting.origin.name}, which has no prefix and may have been set for another program"


def to_json(setting: Setting) -> dict[str, Any]:
    return {
        "key": setting.key,
        "value": setting.value,
        "origin": str(setting.origin),
        "variable": setting.variable,
        "general": setting.general,
        "isGeneral": setting.is_general,
    }


SETTINGS = Record(
    to_json,
    (
        Column("setting", "key"),
        Column("value", least=16),
        Column("from", "origin", worth=1, least=20),
        Column("variable", worth=2),
    ),
)
