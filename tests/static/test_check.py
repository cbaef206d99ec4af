"""The program behind `make test`: what it runs side by side, what it prints, and what makes it fail."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tools import check
from tools.check import Stage

REPORT = """\
<testsuites><testsuite>
<testcase classname="tests.flows.test_a" name="test_one[x]" time="0.25" />
<testcase classname="tests.flows.test_a.TestIt" name="test_two" time="2.5" />
<testcase classname="tests.queue.test_b" name="test_three" time="1.5" />
</testsuite></testsuites>
"""


def python(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", code)


def test_the_slowest_tests_are_named_with_their_seconds(tmp_path: Path) -> None:
    (tmp_path / "tests.xml").write_text(REPORT)

    found = list(check.slowest(tmp_path / "tests.xml", 2))

    assert found == [("tests.flows.test_a.TestIt::test_two", 2.5), ("tests.queue.test_b::test_three", 1.5)]
    assert dict(check.seconds_per_folder(tmp_path / "tests.xml")) == {"tests/flows": 2.75, "tests/queue": 1.5}


def test_a_run_that_did_not_begin_has_no_slowest_test(tmp_path: Path) -> None:
    assert list(check.slowest(tmp_path / "none.xml")) == []


def test_stages_beside_run_at_the_same_time_and_each_has_its_verdict(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The two meet through a pipe: one after the other they would wait for each other for ever."""
    pipe = tmp_path / "pipe"
    writes = f"import os; os.mkfifo({str(pipe)!r}); open({str(pipe)!r}, 'w').write('met')"
    reads = (
        f"import os, time\nwhile not os.path.exists({str(pipe)!r}): time.sleep(0.01)\nprint(open({str(pipe)!r}).read())"
    )

    results = check.run_both(
        (Stage("left", (python(reads),)), Stage("broken", (python("raise SystemExit(3)"), python("print('never')")))),
        (Stage("right", (python(writes),)),),
    )

    assert [(result.name, result.verdict) for result in results] == [
        ("left", "ok"),
        ("broken", "FAILED"),
        ("right", "ok"),
    ]
    printed = capfd.readouterr().out
    assert "=== left: ok\nmet\n" in printed
    assert "never" not in printed


def test_compiled_code_is_kept_for_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")

    result = check.run(Stage("it", (python("import sys; raise SystemExit(sys.dont_write_bytecode)"),)))

    assert result.verdict == "ok"


def test_a_program_that_is_missing_fails_only_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage("it", (python(""),), program="no-such-program")

    monkeypatch.delenv("CI", raising=False)
    assert check.run(stage).verdict == "skipped"
    monkeypatch.setenv("CI", "true")
    assert check.run(stage).verdict == "FAILED"


def test_make_test_runs_everything_that_is_not_long_and_nothing_twice() -> None:
    words = check.TESTS.commands[-1]

    assert words[words.index("-m", words.index("pytest")) + 1] == "not long"
    assert not [word for word in words if "rerun" in word or "last-failed" in word]
    assert check.LONG_TESTS.commands[0][3:5] == ("-m", "long")


@pytest.mark.parametrize("beside", [False, True])
def test_a_quiet_stage_speaks_only_when_it_fails(beside: bool, capfd: pytest.CaptureFixture[str]) -> None:
    check.run(Stage("quiet", (python("print('all is well')"),), quiet=True), beside=beside)
    check.run(Stage("quiet", (python("print('look here'); raise SystemExit(1)"),), quiet=True), beside=beside)

    printed = capfd.readouterr().out
    assert "all is well" not in printed
    assert "look here" in printed
