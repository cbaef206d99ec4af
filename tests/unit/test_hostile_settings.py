"""Whatever stands in a configuration file, a variable or a cron pattern: it is read, or refused with an error of ours
that names it. Anything else would be a stack trace at the start of a service, or a scheduler that hangs."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from bullpen._kernel.cron import next_after
from bullpen.errors import BullpenError
from bullpen.settings import Settings
from bullpen.settings.settings import _all_options

pytestmark = pytest.mark.requirement("X-101")

OPTIONS = list(_all_options())
SECTIONS = sorted({option.section for option in OPTIONS})

SCALARS = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        ["true", "false", "inf", "-nan", "1979-05-27", "1979-05-27T07:32:00Z", "07:32:00", "0x1F", "[]", "{}"]
    ),
    st.text(st.characters(exclude_characters='"\\', exclude_categories=["Cs", "Cc"])).map('"{}"'.format),
)
LINES = st.builds(
    "{} = {}".format,
    st.sampled_from([option.name for option in OPTIONS]) | st.sampled_from(["nonsense", '""', "a.b"]),
    SCALARS,
)
TABLES = st.builds(
    lambda section, lines: "\n".join([f"[{section}]", *lines]),
    st.sampled_from([*SECTIONS, "nothing", "redis.url", '""']),
    st.lists(LINES, max_size=4),
)
FILES = st.lists(TABLES, max_size=4).map("\n".join) | st.text(max_size=200)


def load(directory: Path, environ: dict[str, str]) -> None:
    with contextlib.suppress(BullpenError):
        assert list(Settings.load(environ=environ, start=directory).describe())


@given(FILES | st.binary(max_size=200))
@example("[redis]\nurl = 'redis://[::1'")
@example("[embedded]\ndata_dir = '\x7f'")
@example("\ufeff[redis]")
def test_any_file_is_read_or_refused(content: str | bytes) -> None:
    """The file is the user's; what is wrong with it is said, with the line or the name."""
    with tempfile.TemporaryDirectory() as name:
        raw = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
        Path(name, "bullpen.toml").write_bytes(raw)
        load(Path(name), {})


@given(
    st.dictionaries(
        st.sampled_from([option.variable for option in OPTIONS]),
        st.text(st.characters(exclude_characters="\x00"), max_size=60)
        | st.sampled_from(
            ["redis://[::1", "http://", "1e999", "-1", "٣", "0x10", "1d", "P1D", "∞", "a=b,c", "{}", "~nobody/x"]
        ),
        max_size=3,
    )
)
def test_any_variable_is_read_or_refused(environ: dict[str, str]) -> None:
    """A variable comes from a deployment's template, where a value is easily left empty or doubled."""
    with tempfile.TemporaryDirectory() as name:
        load(Path(name), environ)


FIELDS = st.text("0123456789*/,-?#LWHadefijmnoprstuv()٣ ", max_size=12)
PATTERNS = st.lists(FIELDS, min_size=1, max_size=7).map(" ".join) | st.text(max_size=40)
ZONES = st.sampled_from([None, "UTC", "Europe/Berlin", "Australia/Lord_Howe", "Pacific/Apia", "+14:00"]) | st.text(
    max_size=12
)


@given(
    PATTERNS, ZONES, st.integers(-(2**63), 2**63) | st.integers(0, 4_102_444_800_000), st.none() | st.text(max_size=5)
)
@example("0 0 30 2 *", "UTC", 0, None)
@example("59 59 23 31 12 7#5", "Pacific/Apia", 1_325_203_200_000, None)
@example("* * 29 2 1", "UTC", 0, None)
@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_any_pattern_has_a_later_match_or_is_refused(
    pattern: str, zone: str | None, after_ms: int, seed: str | None
) -> None:
    """Patterns are data of other clients too: one that makes the search endless would stop the schedules of a queue."""
    with contextlib.suppress(BullpenError):
        assert next_after(pattern, zone, after_ms, seed=seed) > after_ms
