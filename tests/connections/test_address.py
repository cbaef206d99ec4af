"""What may be written as an address, and what a wrong one is told."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from bullpen import Queue
from bullpen.errors import InvalidOption
from bullpen.redis import Connection
from bullpen.redis.address import ClusterAddress, NodeAddress, SentinelAddress, parse_url


def endpoint(url: str) -> NodeAddress:
    address = parse_url(url)
    assert isinstance(address, NodeAddress)
    return address


@pytest.mark.requirement("W-20")
class TestOneServer:
    @pytest.mark.parametrize(
        ("url", "expected"),
        [
            ("redis://", NodeAddress()),
            ("redis://cache", NodeAddress(host="cache")),
            ("redis://cache:7000/3", NodeAddress(host="cache", port=7000, db=3)),
            ("redis://cache/?db=4", NodeAddress(host="cache", db=4)),
            ("redis://[::1]:7000", NodeAddress(host="::1", port=7000)),
            ("redis://[fe80::1]", NodeAddress(host="fe80::1")),
            ("redis://[fe80::1%25eth0]", NodeAddress(host="fe80::1%eth0")),
            ("REDIS://cache:7000/3\n", NodeAddress(host="cache", port=7000, db=3)),
            ("unix:/run/redis.sock", NodeAddress(path="/run/redis.sock")),
            ("redis://:secret@cache", NodeAddress(host="cache", password="secret")),
            ("redis://ada:secret@cache", NodeAddress(host="cache", username="ada", password="secret")),
            (
                "redis://cache?username=ada&password=secret",
                NodeAddress(host="cache", username="ada", password="secret"),
            ),
            ("unix:///run/redis.sock", NodeAddress(path="/run/redis.sock")),
            ("unix:///run/a%20b.sock?db=2", NodeAddress(path="/run/a b.sock", db=2)),
            ("unix://ada:secret@/run/r.sock", NodeAddress(path="/run/r.sock", username="ada", password="secret")),
        ],
    )
    def test_a_url_is_read(self, url: str, expected: NodeAddress) -> None:
        """Every form of the documentation."""
        assert parse_url(url) == expected

    @pytest.mark.parametrize("password", ["p@ss", "a:b", "a/b", "50%", "#1", "a?b", "spaß 密", "'\"\\"])
    def test_a_password_may_hold_any_character(self, password: str) -> None:
        """Generated passwords do; percent-encoded they pass through a URL unharmed."""
        from urllib.parse import quote

        encoded = quote(password, safe="")

        assert endpoint(f"redis://ada:{encoded}@cache:7000/1") == NodeAddress(
            host="cache", port=7000, db=1, username="ada", password=password
        )
        assert Connection("redis://cache:7000/1", username="ada", password=password).address == NodeAddress(
            host="cache", port=7000, db=1, username="ada", password=password
        )

    def test_only_the_last_at_sign_ends_the_password(self) -> None:
        """People forget to encode it, and there is only one way to read it."""
        assert endpoint("redis://ada:p@ss@cache").password == "p@ss"

    def test_parts_may_be_given_by_keyword(self) -> None:
        """As Node's `connection` object: host, port, password, db, tls."""
        address = Connection(host="cache", port=7000, password="secret", db=2, tls=True).address

        assert isinstance(address, NodeAddress)
        assert (address.host, address.port, address.password, address.db) == ("cache", 7000, "secret", 2)
        assert address.tls is not None and address.tls.verify_mode is ssl.CERT_REQUIRED

    def test_without_anything_it_is_the_usual_port_of_this_machine(self) -> None:
        assert Connection().address == NodeAddress(host="localhost", port=6379)

    def test_a_url_beside_a_host_is_refused(self) -> None:
        """Which of the two was meant?"""
        with pytest.raises(InvalidOption, match="host: expected a URL or host and port, not both"):
            Connection("redis://one", host="two")


@pytest.mark.requirement("W-66")
class TestManyServers:
    def test_sentinels_are_read(self) -> None:
        """User and password are for the servers; sentinels have their own."""
        address = parse_url(
            "redis+sentinel://ada:secret@one,two:26380/orders?db=3&sentinel_username=watch&sentinel_password=eye"
        )

        assert address == SentinelAddress(
            seeds=(
                NodeAddress(host="one", port=26379, username="watch", password="eye"),
                NodeAddress(host="two", port=26380, username="watch", password="eye"),
            ),
            service="orders",
            node=NodeAddress(host="one", port=26379, db=3, username="ada", password="secret"),
        )
        assert str(address) == "service 'orders' of sentinels one:26379, two:26380"

    def test_a_cluster_is_read(self) -> None:
        address = parse_url("redis+cluster://ada:secret@one:7000,[::1]:7001")

        assert address == ClusterAddress(
            seeds=(
                NodeAddress(host="one", port=7000, username="ada", password="secret"),
                NodeAddress(host="::1", port=7001, username="ada", password="secret"),
            )
        )
        assert str(address) == "cluster one:7000, [::1]:7001"

    @pytest.mark.parametrize(
        ("hosts", "expected"),
        [
            ("[::1]", [("::1", 6379)]),
            ("[::1],[::2]:7001", [("::1", 6379), ("::2", 7001)]),
            ("[::1]:7000,two", [("::1", 7000), ("two", 6379)]),
            ("one,[fe80::1]:7001,three:7002", [("one", 6379), ("fe80::1", 7001), ("three", 7002)]),
        ],
    )
    @pytest.mark.parametrize("login", ["", ":secret@", "ada:se[ret@", "ada:[secret]@", "ada:secre]t@"])
    def test_hosts_in_brackets_may_stand_anywhere(
        self, hosts: str, expected: list[tuple[str, int]], login: str
    ) -> None:
        """Python's own reading of URLs takes brackets in one place or another, as its micro version likes."""
        address = parse_url(f"redis+cluster://{login}{hosts}")

        assert isinstance(address, ClusterAddress)
        assert [(seed.host, seed.port) for seed in address.seeds] == expected
        assert {seed.password or "" for seed in address.seeds} == {login[:-1].rpartition(":")[2]}

    @pytest.mark.parametrize("hosts", ["one,[::1", "one,::1]", "one,[]", "one,[two]", "one,[::1]7001", "[::1]x,two"])
    def test_brackets_hold_a_whole_address_or_are_refused(self, hosts: str) -> None:
        with pytest.raises(InvalidOption, match="expected redis://host:port/db"):
            Connection(f"redis+cluster://:s3cr3t@{hosts}")

    @pytest.mark.parametrize("scheme", ["rediss+sentinel", "rediss+cluster"])
    def test_tls_is_for_all_of_them(self, scheme: str) -> None:
        """Sentinels speak TLS too where the servers do."""
        address = parse_url(f"{scheme}://one,two/{'orders' if 'sentinel' in scheme else ''}")

        assert not isinstance(address, NodeAddress)
        assert all(seed.tls is not None for seed in (*address.seeds, address.node))

    def test_keywords_are_for_the_servers(self) -> None:
        connection = Connection("redis+sentinel://one,two/orders", username="ada", password="a/b", db=1)

        assert isinstance(connection.address, SentinelAddress)
        assert connection.address.node == NodeAddress(host="one", port=26379, db=1, username="ada", password="a/b")
        assert connection.address.seeds[0].password is None

    def test_keywords_are_for_every_node_of_a_cluster(self) -> None:
        connection = Connection("redis+cluster://one,two", password="a/b")

        assert isinstance(connection.address, ClusterAddress)
        assert [seed.password for seed in connection.address.seeds] == ["a/b", "a/b"]


class TestRefused:
    @pytest.mark.parametrize(
        ("url", "message"),
        [
            ("http://cache", "expected redis://host:port/db"),
            ("cache:6379", "expected redis://host:port/db"),
            ("", "expected redis://host:port/db"),
            ("redis://cache:port", "expected redis://host:port/db"),
            ("redis://cache:99999", "a port from 1 to 65535"),
            ("redis://cache/orders", "a database number"),
            ("redis://cache/-1", "a database number"),
            ("redis://one,two", "one host"),
            ("redis://[::1", "expected redis://host:port/db"),
            ("redis://[::1]7000", "expected redis://host:port/db"),
            ("redis://ada@cache", "expected redis://host:port/db"),
            ("unix://", "a socket path after unix://"),
            ("unix:///run/r.sock?db=x", "a database number"),
            ("redis+sentinel://one,two", "the name of the service"),
            ("redis+cluster://one/3", "a cluster has only number 0"),
            ("redis://cache?verify=no", "one of db, password, username after the `?` of redis://"),
            ("rediss://cache?verify=maybe", "verify=yes, verify=ca or verify=no"),
            ("rediss://cache?key=k.pem", "cert=<file> beside key=<file>"),
            ("rediss://cache?ca=/nowhere.pem", "ca=<file with certificates> that can be read"),
            ("rediss://cache?cert=/nowhere.pem", "cert=<file> and key=<file> that match each other"),
        ],
    )
    def test_a_wrong_url_is_refused_when_it_is_given(self, url: str, message: str) -> None:
        """Not when the first job is added, at night."""
        with pytest.raises(InvalidOption) as refused:
            Connection(url)

        assert message in str(refused.value)

    def test_a_misspelt_parameter_gets_a_suggestion(self) -> None:
        with pytest.raises(InvalidOption, match="did you mean 'verify'"):
            Connection("rediss://cache?verfy=no")

    @pytest.mark.parametrize(
        "url",
        [
            "redis://ada:s3cr3t@cache:port",
            "redis://ada:s3cr3t/x@cache",
            "redis://:s3cr3t@one,two",
            "redis://:s3cr3t@cache/notanumber",
            "redis://cache/x?password=s3cr3t",
            "redis+sentinel://:s3cr3t@one",
            "http://ada:s3cr3t@cache",
            "redis://ada:s3cr3t@[::1",
        ],
    )
    def test_no_message_shows_a_password(self, url: str) -> None:
        """Messages end in logs and bug reports; so do the causes of exceptions."""
        with pytest.raises(InvalidOption) as refused:
            Connection(url)

        shown = f"{refused.value!r} {refused.value.__cause__!r} {refused.value.value!r}"
        assert "s3cr3t" not in shown
        assert "s3cr3t" not in repr(Connection("redis://ada:s3cr3t@cache").address)

    def test_a_cluster_has_one_database(self) -> None:
        with pytest.raises(InvalidOption, match="a cluster has only number 0"):
            Connection("redis+cluster://one", db=2)

    def test_a_user_needs_a_password(self) -> None:
        with pytest.raises(InvalidOption, match="a password beside `username`"):
            Connection("redis://cache", username="ada")


@pytest.mark.requirement("W-72")
class TestTls:
    def test_certificates_are_verified_unless_the_url_says_otherwise(self) -> None:
        """The default must be the safe one."""
        modes = {
            query: (tls.verify_mode, tls.check_hostname)
            for query in ("", "?verify=yes", "?verify=ca", "?verify=no")
            if (tls := endpoint(f"rediss://cache{query}").tls) is not None
        }

        assert modes == {
            "": (ssl.CERT_REQUIRED, True),
            "?verify=yes": (ssl.CERT_REQUIRED, True),
            "?verify=ca": (ssl.CERT_REQUIRED, False),
            "?verify=no": (ssl.CERT_NONE, False),
        }

    def test_a_file_that_holds_no_certificate_is_named(self, tmp_path: Path) -> None:
        wrong = tmp_path / "ca.pem"
        wrong.write_text("not a certificate")

        with pytest.raises(InvalidOption, match=r"ca\.pem"):
            Connection(f"rediss://cache?ca={wrong}")


def test_the_forms_of_an_address_name_the_embedded_server() -> None:
    with pytest.raises(InvalidOption, match="or embedded://directory"):
        Queue("q", connection="redi://localhost")
    with pytest.raises(InvalidOption, match="the embedded one is opened by `connection=` of Queue"):
        Connection("embedded:///tmp/x")
