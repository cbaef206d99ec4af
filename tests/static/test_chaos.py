"""`make chaos` runs the long form of every test that has one."""

from __future__ import annotations

import re
from pathlib import Path

from tools import chaos

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_that_reads_a_variable_of_the_long_form_is_run() -> None:
    """Found by plain text, where the program reads the code: both must agree, or a form is run by nobody."""
    has_one = re.compile(
        r"environ.*BULLPEN_(CHAOS|TEST_LONG)\b|\bimport .*\bLONG\b|^(import|from) hypothesis\b", re.MULTILINE
    )
    tests = [path for depth in ("*", "unit/*") for path in (ROOT / "tests").glob(f"{depth}/test_*.py")]
    reading = {str(path.relative_to(ROOT)) for path in tests if has_one.search(path.read_text())}

    found = chaos.files()

    assert reading <= {*found}
    assert {"tests/runs/test_chaos.py", "tests/workflow/test_model.py", "tests/chaos/test_outages.py"} <= {*found}
    assert "tests/queue/test_add.py" not in found
    assert "tools.chaos" in (ROOT / "Makefile").read_text().partition("\nchaos:")[2].partition("\n\n")[0]


def test_arguments_are_passed_on() -> None:
    """One form alone: `make chaos CHAOS="-k kafka"`."""
    assert chaos.command(["-k", "kafka"])[-2:] == ["-k", "kafka"]
    assert chaos.LONG == {"BULLPEN_CHAOS": "long", "BULLPEN_TEST_LONG": "1"}
