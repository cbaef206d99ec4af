"""Who may come in, and what a browser may be made to do."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from bullpen import Bullpen, Queue
from bullpen.dashboard import Permission, Role, Visitor, make_dashboard
from bullpen.dashboard._web import PageProblem
from bullpen.dashboard.access import hash_password
from bullpen.dashboard.app import make_access
from bullpen.dashboard.guard import Rates
from bullpen.errors import InvalidOption
from bullpen.settings import DashboardSettings
from tests.dashboard._kit import HOST, SAME, As, opened, settings, transport

TOKEN = "a-token-of-more-than-22-characters"


@pytest.mark.requirement("D-114")
async def test_every_answer_carries_the_policy(redis_url: str) -> None:
    async with opened(redis_url) as (http, _):
        for path in ("/", "/nowhere", "/static/x/app.js", "/api/v1/queues"):
            headers = (await http.get(path)).headers
            assert "require-trusted-types-for 'script'" in headers["content-security-policy"]
            assert "default-src 'none'" in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
            assert headers["referrer-policy"] == "no-referrer"
            assert headers["cross-origin-opener-policy"] == "same-origin"
        assert (await http.get("/")).headers["cache-control"] == "no-store"
        page = (await http.get("/")).text
        script = re.search(r'src="(/static/[^"]+)"', page)
        assert script is not None
        assert "immutable" in (await http.get(script[1])).headers["cache-control"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:9467", 200),
        ("localhost", 200),
        ("[::1]:80", 200),
        ("evil.example", 421),
        ("", 421),
        ("10.0.0.1", 421),
        ("[", 421),
        ("[::1", 421),
        ("a]b", 421),
    ],
)
@pytest.mark.requirement("D-109")
async def test_a_strange_host_name_is_refused(redis_url: str, host: str, status: int) -> None:
    """A page of a stranger can give its own name our address (DNS rebinding)."""
    async with opened(redis_url) as (http, _):
        assert (await http.get("/", headers={"host": host})).status_code == status


async def test_a_configured_host_name_is_ours(redis_url: str) -> None:
    async with opened(redis_url, dashboard=DashboardSettings(hosts="jobs.example, other")) as (http, _):
        assert (await http.get("/", headers={"host": "jobs.example"})).status_code == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"sec-fetch-site": "same-origin"}, 303),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-site"}, 403),
        ({"sec-fetch-site": "none"}, 403),
        ({"origin": HOST}, 303),
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://[", "cookie": "bullpen=x"}, 403),
        ({"cookie": "bullpen=x"}, 403),
    ],
)
@pytest.mark.requirement("D-109")
@pytest.mark.requirement("D-117")
async def test_a_change_from_another_site_is_refused(
    redis_url: str, queue_name: str, headers: dict[str, str], status: int
) -> None:
    async with Queue(queue_name, connection=redis_url) as queue, opened(redis_url) as (http, _):
        await queue.add("job", {})
        answer = await http.post(f"/queues/{queue_name}/act/pause", headers=headers)

        assert answer.status_code == status
        assert await queue.is_paused() == (status == 303)


@pytest.mark.requirement("D-117")
async def test_reading_changes_nothing(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue, opened(redis_url) as (http, _):
        await queue.add("job", {})
        assert (await http.get(f"/queues/{queue_name}/act/pause")).status_code == 200
        assert not await queue.is_paused()
        assert (await http.put("/", headers=SAME)).status_code == 405


@pytest.mark.requirement("D-105")
async def test_a_token_lets_in(redis_url: str, queue_name: str) -> None:
    wanted = DashboardSettings(access="token", token=TOKEN)
    async with Queue(queue_name, connection=redis_url) as queue, opened(redis_url, dashboard=wanted) as (http, _):
        await queue.add("job", {})
        assert (await http.get("/")).headers["location"] == "/login"
        assert (await http.get("/queues")).headers["location"] == "/login?next=%2Fqueues"
        assert (await http.get("/api/v1/queues")).status_code == 401
        bearer = {"authorization": f"Bearer {TOKEN}"}
        assert (await http.get("/api/v1/queues", headers=bearer)).status_code == 200
        assert (await http.get("/api/v1/queues", headers={"authorization": "Bearer no"})).status_code == 401
        assert (await http.post("/login", data={"token": "wrong"}, headers=SAME)).status_code == 403

        answer = await http.post("/login", data={"token": TOKEN, "next": "//evil.example"}, headers=SAME)

        assert answer.headers["location"] == "/"
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie and "SameSite=Lax" in cookie
        assert (await http.get("/queues")).status_code == 200
        # a change needs the token of the session as well
        assert (await http.post(f"/queues/{queue_name}/act/pause", headers=SAME)).status_code == 403
        page = (await http.get(f"/queues/{queue_name}/act/pause")).text
        csrf = re.search(r'name="csrf" value="([0-9a-f]{128})"', page)
        assert csrf is not None
        sent = await http.post(f"/queues/{queue_name}/act/pause", data={"csrf": csrf[1]}, headers=SAME)
        assert sent.status_code == 303
        assert await queue.is_paused()


@pytest.mark.requirement("D-107")
async def test_a_changed_cookie_is_none(redis_url: str) -> None:
    async with opened(redis_url, dashboard=DashboardSettings(access="token", token=TOKEN)) as (http, _):
        answer = await http.post("/login", data={"token": TOKEN}, headers=SAME)
        value = answer.cookies["bullpen"]
        http.cookies.clear()
        for changed in (f"x{value}", f"{value}0", value.partition(".")[0], value.replace(".", ".0"), ""):
            assert (await http.get("/queues", headers={"cookie": f"bullpen={changed}"})).status_code == 303


@pytest.mark.requirement("D-108")
async def test_after_five_failures_login_slows_down(redis_url: str) -> None:
    async with opened(redis_url, dashboard=DashboardSettings(access="token", token=TOKEN)) as (http, _):
        codes = [(await http.post("/login", data={"token": "no"}, headers=SAME)).status_code for _ in range(6)]
        last = await http.post("/login", data={"token": TOKEN}, headers=SAME)

        assert codes == [403] * 5 + [429]
        assert last.status_code == 429
        assert int(last.headers["retry-after"]) > 0


def write_passwords(path: Path, **users: dict[str, Any]) -> None:
    import json

    path.write_text(json.dumps({"key": "k", "users": users}))
    path.chmod(0o600)


@pytest.mark.requirement("D-105")
@pytest.mark.requirement("D-107")
async def test_passwords_of_a_file(redis_url: str, tmp_path: Path) -> None:
    path = tmp_path / "users.json"
    write_passwords(path, ada={"password": hash_password("correct horse"), "role": "operator"})
    wanted = DashboardSettings(access="passwords", passwords=path)
    async with opened(redis_url, dashboard=wanted) as (http, _):
        for user, password in (("ada", "wrong"), ("nobody", "correct horse")):
            assert (
                await http.post("/login", data={"user": user, "password": password}, headers=SAME)
            ).status_code == 403
        await http.post("/login", data={"user": "ada", "password": "correct horse"}, headers=SAME)
        assert "ada" in (await http.get("/settings")).text

        write_passwords(path, ada={"password": hash_password("another one"), "role": "operator"})
        os.utime(path, (1, 1))

        assert (await http.get("/queues")).status_code == 303, "a changed password ends its sessions"


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to another user needs root")
def test_passwords_of_another_user_of_the_machine_let_nobody_in(tmp_path: Path) -> None:
    """Its accounts would be his, and the key that signs sessions."""
    path = tmp_path / "users.json"
    write_passwords(path, mallory={"password": hash_password("correct horse"), "role": "admin"})
    os.chown(path, 65_534, 65_534)

    with pytest.raises(InvalidOption, match="another user"):
        make_access(DashboardSettings(access="passwords", passwords=path))


def test_wrong_settings_are_told_at_the_start(tmp_path: Path) -> None:
    open_file = tmp_path / "open.json"
    open_file.write_text("{}")
    open_file.chmod(0o644)
    for wrong in (
        DashboardSettings(access="token", token="short"),
        DashboardSettings(access="token"),
        DashboardSettings(access="passwords"),
        DashboardSettings(access="passwords", passwords=tmp_path / "none"),
        DashboardSettings(access="passwords", passwords=open_file),
        DashboardSettings(access="proxy"),
        DashboardSettings(access="proxy", proxies="nonsense"),
    ):
        with pytest.raises(InvalidOption, match="dashboard"):
            make_access(wrong)


@pytest.mark.parametrize("value", [r'"x.\351"', r'"\351.\351"', "x.\xe9", "x.", ".", r'"\000.\000"'])
async def test_a_cookie_that_is_none_of_ours_is_nobodys(
    redis_url: str, value: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Anybody who can connect may send one: no answer about a mistake of ours, and no stack in the log."""
    wanted = DashboardSettings(access="token", token=TOKEN)
    async with opened(redis_url, dashboard=wanted) as (http, _):
        headers = {b"cookie": f"bullpen={value}".encode("latin-1")}
        same = {name.encode(): text.encode() for name, text in SAME.items()}
        assert (await http.get("/queues", headers=headers)).status_code == 303
        assert (await http.get("/login", headers=headers)).status_code == 200
        assert (await http.get("/api/v1/queues", headers=headers)).status_code == 401
        assert (await http.post("/login", data={"token": "no"}, headers={**headers, **same})).status_code == 403

    assert "Traceback" not in caplog.text and "failed" not in caplog.text


async def test_a_body_that_is_too_deep_is_refused(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    wanted = DashboardSettings(access="token", token=TOKEN)
    async with opened(redis_url, dashboard=wanted) as (http, _):
        headers = {**SAME, "content-type": "application/json"}
        assert (await http.post("/login", content=b"[" * 100_000, headers=headers)).status_code == 400

    assert "Traceback" not in caplog.text


async def test_strangers_who_play_the_proxy_write_one_line(redis_url: str, caplog: pytest.LogCaptureFixture) -> None:
    wanted = DashboardSettings(access="proxy", proxies="10.1.0.0/16", hosts="x")
    async with opened(redis_url, dashboard=wanted, client="10.9.9.9") as (http, _):
        for _ in range(5):
            answer = await http.get("/", headers={"host": "x", "x-forwarded-user": "root"})
            assert answer.status_code == 403

    assert caplog.text.count("is not a configured proxy") == 1


@pytest.mark.requirement("D-105")
async def test_headers_count_from_the_proxy_only(redis_url: str) -> None:
    wanted = DashboardSettings(
        access="proxy", proxies="10.1.0.0/16", admin_groups="ops,root", operator_groups="dev", hosts="x"
    )
    user = {"x-forwarded-user": "ada", "host": "x"}
    async with opened(redis_url, dashboard=wanted, client="10.1.2.3") as (http, _):
        assert (await http.get("/queues", headers={"host": "x"})).status_code == 401
        for groups, role in (("ops", "admin"), ("dev", "operator"), ("", "viewer"), ("opsx, devs", "viewer")):
            page = (await http.get("/settings", headers={**user, "x-forwarded-groups": groups})).text
            assert f"role {role}" in page
    async with opened(redis_url, dashboard=wanted, client="10.2.0.1") as (http, _):
        assert (await http.get("/queues", headers=user)).status_code == 403
        assert (await http.get("/queues", headers={"host": "x"})).status_code == 401


ROLES = {
    "nobody": None,
    "viewer": Visitor("v", Role.VIEWER),
    "operator": Visitor("o", Role.OPERATOR),
    "admin": Visitor("a", Role.ADMIN),
    "tenant": Visitor("t", Role.ADMIN, ("t1",)),
}


@pytest.mark.parametrize("role", list(ROLES))
@pytest.mark.requirement("W-78")
@pytest.mark.requirement("D-110")
async def test_every_route_asks_for_its_permission(redis_url: str, queue_name: str, role: str) -> None:
    """Whatever a page hides, the server decides: each route is called as each role."""
    principal = ROLES[role]
    async with Queue(queue_name, connection=redis_url) as queue:
        await queue.add("job", {})
        async with opened(redis_url, access=As(principal)) as (http, dashboard):
            for route in dashboard.routes:
                if route.pattern.startswith(("/stream", "/pulse")):
                    continue
                path = re.sub(r"\{(\w+)\}", lambda found: queue_name if found[1] == "queue" else "x", route.pattern)
                answer = await http.request(route.method, path, headers=SAME)
                if principal is None:
                    assert answer.status_code in ((401,) if not route.open else (200, 404)), path
                elif principal.tenants and route.pattern == "/":
                    assert answer.headers["location"] == "/dead-letters"
                elif (principal.tenants and not route.for_tenants and not route.open) or not principal.may(
                    route.permission
                ):
                    assert answer.status_code == 403, path
                else:
                    assert answer.status_code not in (401, 500), (path, answer.text)
                    if route.permission is Permission.SEE:
                        assert answer.status_code != 403, path


@pytest.mark.requirement("W-78")
async def test_somebody_of_a_tenant_begins_at_a_page_that_he_may_see(redis_url: str) -> None:
    """And his menu offers no page that would refuse him."""
    async with opened(redis_url, access=As(ROLES["tenant"])) as (http, _):
        first = await http.get("/")
        page = (await http.get(first.headers["location"])).text
        offered = set(re.findall(r'<li><a href="([^"]+)"', page))
        answers = [(await http.get(path)).status_code for path in sorted(offered)]
        refused = (await http.get("/queues")).text

    assert first.headers["location"] == "/dead-letters"
    assert offered == {"/dead-letters", "/settings"}
    assert set(answers) == {200}
    assert 'href="/dead-letters"' in refused, "a page that refuses has the menu too"
    assert 'id="find"' not in page


async def test_somebody_of_several_tenants_chooses_one(redis_url: str) -> None:
    async with opened(redis_url, access=As(Visitor("t", Role.OPERATOR, ("t1", "t2")))) as (http, _):
        page = (await http.get("/dead-letters")).text
        other = (await http.get("/dead-letters?tenant=t2")).text

        assert '<a href="/dead-letters?tenant=t1" aria-current="page">' in page
        assert '<a href="/dead-letters?tenant=t2" aria-current="page">' in other
        assert (await http.get("/dead-letters?tenant=t3")).status_code == 403


@pytest.mark.requirement("D-87")
async def test_what_only_admins_may_do(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        await queue.add("job", {})
        async with opened(redis_url, access=As(ROLES["operator"])) as (http, _):
            answer = await http.post(f"/queues/{queue_name}/act/drain", data={"typed": queue_name}, headers=SAME)
            assert answer.status_code == 403
            assert (await queue.counts()).waiting == 1


@pytest.mark.requirement("D-113")
async def test_a_viewer_sees_sizes_and_no_payloads(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        job = await queue.add("job", {"thing-inside": "find-me"})
        async with opened(redis_url, access=As(ROLES["viewer"])) as (http, _):
            for path in ("", f"/jobs/{job.id}"):
                for base in ("", "/api/v1"):
                    assert "thing-inside" not in (await http.get(f"{base}/queues/{queue_name}{path}")).text
            assert (await http.get(f"/queues/{queue_name}/jobs/{job.id}/raw/data")).status_code == 403
        async with opened(redis_url, access=As(Visitor("v", Role.VIEWER, payloads=True))) as (http, _):
            assert "find-me" in (await http.get(f"/queues/{queue_name}/jobs/{job.id}")).text


@pytest.mark.requirement("D-113")
async def test_a_filter_tells_a_viewer_nothing(redis_url: str, queue_name: str) -> None:
    """Whether a text is in a payload or an error can be asked letter by letter."""
    async with Queue(queue_name, connection=redis_url) as queue:
        await queue.add("job", {"thing": "find-me"})
        async with opened(redis_url, access=As(ROLES["viewer"])) as (http, _):
            for path in (f"/queues/{queue_name}?text=find-me", "/dead-letters?error=x", "/dead-letters/export?error=x"):
                for base in ("", "/api/v1"):
                    assert (await http.get(f"{base}{path}")).status_code == 403, path
            assert 'name="text"' not in (await http.get(f"/queues/{queue_name}")).text


async def test_a_filter_does_not_find_what_is_hidden(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        await queue.add("job", {"password": "hunter2", "customer": "c7"})
        async with opened(redis_url) as (http, _):
            address = f"/api/v1/queues/{queue_name}?state=waiting&text="
            assert (await http.get(f"{address}hunter")).json()["list"]["jobs"] == []
            assert len((await http.get(f"{address}c7")).json()["list"]["jobs"]) == 1


async def test_progress_is_a_payload_unless_it_is_a_number(redis_url: str, queue_name: str) -> None:
    async with Queue(queue_name, connection=redis_url) as queue:
        for progress in ({"token": "sk_live_0123456789abcdef", "row": 7}, 40):
            await (await queue.add("job", {})).progress(progress)
        address = f"/api/v1/queues/{queue_name}?state=waiting"
        async with opened(redis_url, access=As(ROLES["viewer"])) as (http, _):
            hidden = [row["progress"] for row in (await http.get(address)).json()["list"]["jobs"]]
        async with opened(redis_url) as (http, _):
            shown = [row["progress"] for row in (await http.get(address)).json()["list"]["jobs"]]
    assert hidden == ["", "40"]
    assert "sk_live" not in shown[0]
    assert "7" in shown[0]


@pytest.mark.requirement("D-111")
async def test_read_only_refuses_every_change(redis_url: str, queue_name: str) -> None:
    async with (
        Queue(queue_name, connection=redis_url) as queue,
        opened(redis_url, dashboard=DashboardSettings(read_only=True)) as (http, _),
    ):
        await queue.add("job", {})
        assert (await http.post(f"/queues/{queue_name}/act/pause", headers=SAME)).status_code == 403
        page = (await http.get(f"/queues/{queue_name}")).text
        assert "read-only" in page
        assert "act/pause" not in page


@pytest.mark.requirement("D-118")
def test_too_many_requests_are_refused() -> None:
    rates = Rates(per_second=0.001, burst=3, most_streams=1)
    for _ in range(3):
        rates.count("ada")
    with pytest.raises(PageProblem, match="Too many"):
        rates.count("ada")
    rates.count("bo")
    rates.open_stream("ada")
    with pytest.raises(PageProblem, match="pages are open"):
        rates.open_stream("ada")
    rates.close_stream("ada")
    rates.open_stream("ada")


@pytest.mark.requirement("D-5")
async def test_the_host_application_decides_who_it_is(redis_url: str) -> None:
    async def decide(scope: Any) -> Visitor | None:
        return Visitor("host-user", Role.VIEWER) if b"let-in" in dict(scope["headers"]) else None

    async with Bullpen(settings=settings(redis_url)) as app:
        made = make_dashboard(app, access=decide)
        async with httpx.AsyncClient(transport=transport(made), base_url="http://shop.example") as http:
            assert (await http.get("/")).status_code == 401
            assert (await http.get("/login")).status_code == 404
            assert "host-user" in (await http.get("/", headers={"let-in": "1"})).text
        await made.aclose()
