"""The reference of the command line lists every command, argument, option and exit code there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from bullpen.cli import commands as cli
from tools import cli_reference


@pytest.mark.requirement("X-40")
def test_the_page_is_up_to_date() -> None:
    assert cli_reference.main(["--check"]) == 0, "run `make docs-table` and commit the result"


def test_a_page_that_lacks_an_option_is_out_of_date(tmp_path: Path) -> None:
    path = tmp_path / cli_reference.PAGE
    path.parent.mkdir(parents=True)

    assert cli_reference.main(["--check"], root=tmp_path) == 1
    assert cli_reference.main([], root=tmp_path) == 0
    assert cli_reference.main(["--check"], root=tmp_path) == 0
    path.write_text(path.read_text().replace("`--interval TIME`", ""))
    assert cli_reference.main(["--check"], root=tmp_path) == 1


def test_every_command_and_exit_code_is_on_the_page() -> None:
    page = cli_reference.make_page()

    for path, _ in cli_reference.commands(cli.tree()):
        if len(path) > 1:
            assert f"# `{' '.join(path)}`" in page
    for code in (0, cli.NOT_DONE, cli.WRONG, cli.UNREACHABLE, cli.TIME_UP, cli.INTERRUPTED):
        assert f"| {code} |" in page
    assert "--lifeline" not in page, "hidden"
