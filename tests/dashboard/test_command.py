"""`bullpen dashboard` as people start it."""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.flows._cli import child, cli


def get(url: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.requirement("D-1")
def test_without_arguments_it_serves_the_embedded_server_on_this_machine(tmp_path: Path) -> None:
    env = {"BULLPEN_DATA_DIR": str(tmp_path / "data")}
    with child("dashboard", "--http", "127.0.0.1:0", cwd=tmp_path, env=env) as process:
        line = process.wait_for("dashboard: http://127.0.0.1:")
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found is not None

        status, page = get(found[0])

        assert status == 200
        assert "There are no queues yet" in page
        assert json.loads(get(f"{found[0]}/api/v1/")[1])["verdict"]["level"] == "well"
        process.terminate()
        assert process.wait() == 0


@pytest.mark.requirement("D-6")
def test_an_address_for_others_needs_a_mode(redis_url: str, tmp_path: Path) -> None:
    env = {"BULLPEN_REDIS_URL": redis_url}

    refused = cli("dashboard", "--http", "0.0.0.0:0", "--http-public", cwd=tmp_path, env=env)
    not_said = cli("dashboard", "--http", "0.0.0.0:0", cwd=tmp_path, env=env)

    assert (refused.code, not_said.code) == (2, 2)
    for mode in ("token", "passwords", "proxy", "none"):
        assert mode in refused.err


@pytest.mark.requirement("D-105")
def test_a_token_is_made_and_printed(redis_url: str, tmp_path: Path) -> None:
    env = {"BULLPEN_REDIS_URL": redis_url, "BULLPEN_DASHBOARD_ACCESS": "token"}
    with child("dashboard", "--http", "127.0.0.1:0", cwd=tmp_path, env=env) as process:
        process.wait_for("token: ")
        text = process.output
        url, token = re.search(r"http://\S+", text), re.search(r"token: (\S+)", text)
        assert url is not None and token is not None

        assert get(f"{url[0]}/api/v1/queues")[0] == 401
        assert get(f"{url[0]}/api/v1/queues", Authorization=f"Bearer {token[1]}")[0] == 200
        process.terminate()
        assert process.wait() == 0


@pytest.mark.requirement("D-105")
def test_users_are_added_to_the_file(redis_url: str, tmp_path: Path) -> None:
    path = tmp_path / "users.json"
    env = {"BULLPEN_REDIS_URL": redis_url, "BULLPEN_DASHBOARD_PASSWORDS": str(path)}

    added = cli("dashboard", "--add-user", "ada", "--role", "operator", cwd=tmp_path, env=env, stdin="long enough\n")
    again = cli("dashboard", "--add-user", "bo", cwd=tmp_path, env=env, stdin="also long enough\n")

    assert (added.code, again.code) == (0, 0), added.err
    users = json.loads(path.read_text())["users"]
    assert {name: user["role"] for name, user in users.items()} == {"ada": "operator", "bo": "viewer"}
    assert users["ada"]["password"].startswith("scrypt$")
    assert path.stat().st_mode & 0o777 == 0o600


def test_users_are_not_added_to_what_somebody_else_left(redis_url: str, tmp_path: Path) -> None:
    path = tmp_path / "users.json"
    env = {"BULLPEN_REDIS_URL": redis_url, "BULLPEN_DASHBOARD_PASSWORDS": str(path)}
    others = tmp_path / "users.json.new"  # where the new file was once written first
    others.write_text("")

    added = cli("dashboard", "--add-user", "ada", cwd=tmp_path, env=env, stdin="long enough\n")
    path.chmod(0o666)
    refused = cli("dashboard", "--add-user", "bo", cwd=tmp_path, env=env, stdin="long enough\n")

    assert added.code == 0
    assert others.read_text() == ""
    assert refused.code == 2
    assert "can be written by others" in refused.err
    assert list(json.loads(path.read_text())["users"]) == ["ada"]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["users.json", "users.json.new"]


@pytest.mark.requirement("D-3")
def test_it_is_served_beside_workers(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(
        "from bullpen import Bullpen, Job\napp = Bullpen()\n"
        "@app.handler('mails')\nasync def send(job: Job) -> str:\n    return 'sent'\n"
    )
    env = {"BULLPEN_REDIS_URL": redis_url}
    with child("run", "shop:app", "--dashboard", "127.0.0.1:0", cwd=tmp_path, env=env) as process:
        line = process.wait_for("dashboard: http://127.0.0.1:")
        url = line.partition("dashboard: ")[2].strip()
        cli("jobs", "add", "mails", "send", "--id", "a", cwd=tmp_path, env=env)
        stream = urllib.request.urlopen(f"{url}/stream/mails", timeout=10)
        assert stream.status == 200

        until = time.monotonic() + 30
        workers: list[dict[str, list[str]]] = []
        while not workers and time.monotonic() < until:  # it tells of itself when it has begun
            workers = json.loads(get(f"{url}/api/v1/workers")[1])["processes"]
            time.sleep(0.1)

        assert [each["queues"] for each in workers] == [["mails"]]
        process.terminate()  # with the stream open
        assert process.wait(20) == 0
        stream.close()


@pytest.mark.parametrize(
    ("arguments", "stdin"), [(("--add-user", "x"), "short\n"), (("--add-user", "x", "--role", "king"), "long enough\n")]
)
def test_a_wrong_user_is_refused(redis_url: str, tmp_path: Path, arguments: tuple[str, ...], stdin: str) -> None:
    env = {"BULLPEN_REDIS_URL": redis_url, "BULLPEN_DASHBOARD_PASSWORDS": str(tmp_path / "users.json")}

    assert cli("dashboard", *arguments, cwd=tmp_path, env=env, stdin=stdin).code == 2
    assert cli("dashboard", "--add-user", "x", cwd=tmp_path, env={"BULLPEN_REDIS_URL": redis_url}).code == 2


@pytest.mark.requirement("D-2")
def test_a_named_app_is_shown_on_the_server_that_was_said(redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text("from bullpen import Bullpen\napp = Bullpen('redis://127.0.0.1:1')\n")
    arguments = ("dashboard", "shop:app", "--http", "127.0.0.1:0", "--redis", redis_url, "--prefix", "other")
    with child(*arguments, cwd=tmp_path) as process:
        url = process.wait_for("dashboard: http://").partition("dashboard: ")[2].strip()

        status, page = get(url)

        assert status == 200
        assert "prefix other" in page
        assert "All well" in page
        process.terminate()
        assert process.wait() == 0
