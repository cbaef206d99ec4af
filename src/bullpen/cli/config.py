"""`bullpen config`: which settings hold, and where each came from."""

from __future__ import annotations

import typer

from bullpen.cli import common
from bullpen.cli.common import JsonOption, PrefixOption, RedisOption
from bullpen.settings import Setting, Settings, misspelt_variables

app = typer.Typer(help="Show the configuration.", no_args_is_help=True)


@app.callback()
def config() -> None:
    """Show the configuration."""


@app.command()
def show(redis: RedisOption = None, prefix: PrefixOption = None, as_json: JsonOption = False) -> None:
    """Print every setting, its value (passwords hidden), where it came from, and the variable that sets it."""
    settings = list(Settings.load(redis_url=redis, redis_prefix=prefix).describe())
    for name, meant in misspelt_variables().items():
        common.err.print(f"{name} is no setting and does nothing; did you mean {meant}?", markup=False)
    if as_json:
        common.print_json(
            [
                {
                    "key": each.key,
                    "value": each.value,
                    "origin": str(each.origin),
                    "variable": each.variable,
                    "general": each.general,
                    "isGeneral": each.is_general,
                }
                for each in settings
            ]
        )
    else:
        rows = [(each.key, each.value, each.origin, each.variable or "") for each in settings]
        common.print_table(("setting", "value", "from", "variable"), rows)
        for each in settings:
            if each.is_general:
                common.err.print(f"{each.key}: {taken_from(each)}; {each.variable} wins over it", markup=False)


def taken_from(setting: Setting) -> str:
    """Of a value that may have been meant for somebody else."""
    return f"taken from {setting.origin.name}, which has no prefix and may have been set for another program"
