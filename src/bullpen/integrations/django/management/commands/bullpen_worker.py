"""`manage.py bullpen_worker`: run the jobs of this project."""

from __future__ import annotations

import runpy
import sys
from typing import Any, Final

from django.core.management.base import BaseCommand

_APP: Final = "bullpen.integrations.django.worker:app"
_OF_DJANGO: Final = ("--settings", "--pythonpath")


class Command(BaseCommand):
    """Hands everything on to `bullpen run`, which knows its options best."""

    help = (
        "Run the jobs of this project. Takes the options of `bullpen run`, such as --processes 4 or --concurrency 50."
    )
    requires_system_checks: Any = []
    requires_migrations_checks = False

    def run_from_argv(self, argv: list[str]) -> None:
        """Django's parser would refuse options of another command."""
        self._run(_without_djangos(argv[2:]))

    def handle(self, *words: Any, **_options: Any) -> None:
        self._run([str(word) for word in words])

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("words", nargs="*", help="Options of `bullpen run`.")

    def _run(self, words: list[str]) -> None:
        sys.argv = ["bullpen", "run", _APP, *words]
        runpy.run_module("bullpen", run_name="__main__", alter_sys=False)


def _without_djangos(words: list[str]) -> list[str]:
    """`manage.py` has read these already: what it found is in the environment."""
    kept, skip = [], False
    for word in words:
        if skip or word.partition("=")[0] in _OF_DJANGO:
            skip = not skip and "=" not in word
        else:
            kept.append(word)
    return kept
