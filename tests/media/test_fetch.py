"""URLs of images: what a policy lets through, and every way around it that other servers were attacked by (S16-S19)."""

from __future__ import annotations

import asyncio
import base64
import os
import socket
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.errors import ConfigError, RequestError
from jaxinfer.media.fetch import FetchPolicy, decode_data_url, fetch

BODY = b"\x89PNG not really"
OPEN = FetchPolicy(allow_http=True)
LOCAL = FetchPolicy(allow_http=True, networks=("127.0.0.1/32",), max_bytes=1000, timeout_s=5.0)


def answer(body: bytes = BODY, status: str = "200 OK", **headers: Any) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Server:
    """A web server on a socket that answers each path with given bytes; `hits` are the requests it got."""

    def __init__(self):
        self.answers: dict[str, bytes] = {"/a.png": answer()}
        self.hits: list[str] = []
        self.pause = 0.0  # before each byte of an answer
        self.endless = b""  # sent again and again after an answer
        self.port = 0

    def url(self, path: str = "/a.png", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def redirect(self, path: str, target: str, status: str = "302 Found") -> None:
        self.answers[path] = answer(b"", status, Location=target)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.hits.append(head.decode())
            data = self.answers[head.split()[1].decode()]
            if self.pause:
                for byte in data:
                    writer.write(bytes([byte]))
                    await writer.drain()
                    await asyncio.sleep(self.pause)
            writer.write(data)
            while self.endless:
                writer.write(self.endless)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


def with_server(test: Callable[[Server], Coroutine[Any, Any, None]]) -> Server:
    async def run() -> Server:
        server = Server()
        listener = await asyncio.start_server(server.handle, "127.0.0.1", 0)
        server.port = listener.sockets[0].getsockname()[1]
        try:
            await test(server)
        finally:
            listener.close()
        return server

    return asyncio.run(run())


async def refused(url: str, policy: FetchPolicy) -> str:
    with pytest.raises(RequestError) as caught:
        await fetch(url, policy)
    assert caught.value.code == "invalid_image_url"
    assert caught.value.param == "messages"
    assert "\n" not in str(caught.value)
    return str(caught.value)


def names(monkeypatch: pytest.MonkeyPatch, table: dict[str, list[list[str]]]) -> list[str]:
    """Answers of the system's resolver: each name's addresses, one list a look-up; returns the names looked up."""
    asked: list[str] = []
    real = socket.getaddrinfo

    def getaddrinfo(host: str, port: int, *args: Any, **kwargs: Any) -> list[Any]:
        if host not in table:
            return real(host, port, *args, **kwargs)
        asked.append(host)
        found = table[host].pop(0) if len(table[host]) > 1 else table[host][0]
        kinds = [socket.AF_INET6 if ":" in ip else socket.AF_INET for ip in found]
        return [(kind, socket.SOCK_STREAM, 6, "", (ip, port)) for kind, ip in zip(kinds, found, strict=True)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


def test_nothing_but_data_urls_unless_allowed():
    async def test(server: Server) -> None:
        data = "data:image/png;base64," + base64.b64encode(BODY).decode()
        assert await fetch(data, FetchPolicy()) == BODY
        for url in (
            server.url(),
            server.url().upper(),
            "ftp://x/a",
            "file:///etc/passwd",
            "a.png",
            "",
            "gopher:x",
        ):
            assert "may be data here" in await refused(url, FetchPolicy())

    assert not with_server(test).hits


def test_an_allowed_address_is_fetched(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # not ours to use

    async def test(server: Server) -> None:
        assert await fetch(server.url(), LOCAL) == BODY
        assert await fetch(server.url().replace("http", "HTTP"), LOCAL) == BODY

    [head, _] = with_server(test).hits
    assert "Accept-Encoding: identity" in head


@pytest.mark.parametrize(
    "host",
    [
        *(
            "127.0.0.1",
            "localhost",
            "127.1",
            "2130706433",
            "0x7f.1",
            "0177.0.0.1",
            "127.0.0.1.",
            "0.0.0.0",
            "0",
        ),
        *(
            "１２７.0.0.1",
            "127。0.0.1",
            "[::1]",
            "[::]",
            "[::ffff:127.0.0.1]",
            "[::127.0.0.1]",
            "[::ffff:0:127.0.0.1]",
        ),
        *(
            "[64:ff9b::127.0.0.1]",
            "[2002:7f00:1::]",
            "[fe80::1%25lo]",
            "user@127.0.0.1",
            "a.com:80@127.0.0.1",
        ),
    ],
)
def test_no_spelling_of_an_inner_address_is_connected_to(host: str):
    async def test(server: Server) -> None:
        await refused(server.url(host=host), OPEN)

    assert not with_server(test).hits


def test_a_client_that_takes_numbers_for_addresses_gets_no_socket(monkeypatch: pytest.MonkeyPatch):
    """Older ones hand 127.1 and 2130706433 to the system, which reads them as 127.0.0.1, without asking a resolver."""
    monkeypatch.setattr("aiohttp.connector.is_canonical_ipv4_address", lambda host: True)

    async def test(server: Server) -> None:
        for host in ("127.1", "2130706433", "127.0.0.1."):
            await refused(server.url(host=host), OPEN)

    assert not with_server(test).hits


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::8.8.8.8", True),
        ("10.0.0.1", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("127.255.0.1", False),
        ("0.0.0.0", False),
        ("100.64.0.1", False),  # carriers', and Alibaba's metadata
        ("169.254.169.254", False),  # metadata of most clouds
        ("168.63.129.16", False),  # Azure's
        ("192.0.0.192", False),  # Oracle's
        ("224.0.0.1", False),
        ("240.0.0.1", False),
        ("255.255.255.255", False),
        ("::", False),
        ("::1", False),
        ("::ffff:169.254.169.254", False),
        ("::169.254.169.254", False),
        ("64:ff9b::10.0.0.1", False),
        ("64:ff9b:1::1", False),
        ("2002:a9fe:a9fe::", False),
        ("2001:0:7f00:1::ffff:ffff", False),  # Teredo
        ("fd00:ec2::254", False),
        ("fe80::1%eth0", False),
        ("fec0::1", False),
        ("4000::1", False),
        ("2001:db8::1", False),
        ("3fff::1", False),
        ("ff02::1", False),
    ],
)
def test_public_addresses(address: str, public: bool):
    assert OPEN.permits(address) is public


def test_networks_open_inner_addresses():
    policy = FetchPolicy(allow_http=True, networks=("10.1.0.0/16", "fd00::/8"))
    assert policy.permits("10.1.2.3")
    assert policy.permits("::ffff:10.1.2.3")
    assert policy.permits("fd00::1")
    assert not policy.permits("10.2.0.1")
    assert policy.permits("8.8.8.8")


def test_names_are_refused_for_any_inner_address(monkeypatch: pytest.MonkeyPatch):
    table = {
        "inner.example": [["10.0.0.1"]],
        "mixed.example": [["93.184.216.34", "127.0.0.1"]],
        "mapped.example": [["::ffff:169.254.169.254"]],
    }
    names(monkeypatch, table)

    async def test(server: Server) -> None:
        for host in table:
            assert "not public" in await refused(server.url(host=host), OPEN)

    assert not with_server(test).hits


def test_a_name_is_resolved_once(monkeypatch: pytest.MonkeyPatch):
    """Rebinding: the second answer of the resolver is never asked for."""
    asked = names(monkeypatch, {"images.example": [["127.0.0.1"], ["127.0.0.2"]]})

    async def test(server: Server) -> None:
        assert await fetch(server.url(host="images.example"), LOCAL) == BODY

    [head] = with_server(test).hits
    assert "Host: images.example" in head
    assert asked == ["images.example"]


def test_redirects_pass_the_same_gate(monkeypatch: pytest.MonkeyPatch):
    names(monkeypatch, {"inner.example": [["127.0.0.2"]]})

    async def test(server: Server) -> None:
        for status in ("301 M", "302 F", "303 S", "307 T", "308 P"):
            server.redirect("/near", "/a.png", status)
            assert await fetch(server.url("/near"), LOCAL) == BODY
        hits = len(server.hits)
        for target in (
            server.url(host="127.0.0.2"),
            server.url(host="inner.example"),
            server.url(host="localhost").replace("localhost", "[::1]"),
            server.url(host="user:secret@127.0.0.1"),
            "http://169.254.169.254/latest/meta-data/",
            "file:///etc/passwd",
            "data:image/png;base64,AAAA",
            "gopher://127.0.0.1/",
            "http://",
            "",
        ):
            server.redirect("/far", target)
            await refused(server.url("/far"), LOCAL)
        server.redirect("/loop", "/loop")
        assert "redirects more than 3 times" in await refused(server.url("/loop"), LOCAL)
        assert all(head.split()[1] in ("/far", "/loop") for head in server.hits[hits:])

    with_server(test)


def test_hosts_can_be_named(monkeypatch: pytest.MonkeyPatch):
    hosts = ("images.example", ".cdn.example")
    policy = FetchPolicy(allow_http=True, networks=("127.0.0.1/32",), hosts=hosts)
    there = ("images.example", "IMAGES.example", "a.b.cdn.example")
    elsewhere = (
        "cdn.example",
        "evilcdn.example",
        "images.example.evil.example",
        "other.example",
        "127.0.0.1",
    )
    names(monkeypatch, {host.lower(): [["127.0.0.1"]] for host in (*there, *elsewhere[:-1])})

    async def test(server: Server) -> None:
        for host in there:
            assert await fetch(server.url(host=host), policy) == BODY
        for host in elsewhere:
            assert "may not be fetched" in await refused(server.url(host=host), policy)
        server.redirect("/away", server.url(host="other.example"))
        await refused(server.url("/away", host="images.example"), policy)

    assert len(with_server(test).hits) == len(there) + 1


def test_bytes_are_limited():
    async def test(server: Server) -> None:
        server.answers["/fits"] = answer(bytes(1000))
        assert len(await fetch(server.url("/fits"), LOCAL)) == 1000
        server.answers["/large"] = answer(bytes(1001))
        assert "1000 bytes" in await refused(server.url("/large"), LOCAL)
        server.answers["/lies"] = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
        server.endless = b"400\r\n" + bytes(1024) + b"\r\n"
        assert "1000 bytes" in await refused(server.url("/lies"), LOCAL)

    with_server(test)


def test_time_is_limited_and_slow_bytes_do_not_extend_it():
    policy = FetchPolicy(allow_http=True, networks=("127.0.0.1/32",), timeout_s=0.3)

    async def test(server: Server) -> None:
        server.pause = 0.02
        start = time.monotonic()
        assert "0.3 seconds" in await refused(server.url(), policy)
        assert time.monotonic() - start < 5

    with_server(test)


def test_answers_that_are_no_file():
    async def test(server: Server) -> None:
        server.answers["/missing"] = answer(b"", "404 Not Found")
        assert "answered 404" in await refused(server.url("/missing"), LOCAL)
        server.answers["/packed"] = answer(b"\x1f\x8b", Content_Encoding="gzip")
        assert "compressed" in await refused(server.url("/packed"), LOCAL)
        server.answers["/short"] = b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nabc"
        await refused(server.url("/short"), LOCAL)
        server.answers["/noise"] = b"\0\1\2\r\n\r\n"
        await refused(server.url("/noise"), LOCAL)

    with_server(test)


def test_nobody_there():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/"
        assert "cannot be fetched" in asyncio.run(refused(url, LOCAL))


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http:///a",
        "http://a b/",
        "http://[::1/",
        "http://a.com\\@127.0.0.1/",
        "https:",
        "http://x:99999/",
    ],
)
def test_urls_that_are_none(url: str):
    asyncio.run(refused(url, LOCAL))


def test_files_below_a_directory(tmp_path: Path):
    folder, outside = tmp_path / "images", tmp_path / "secret.png"
    (folder / "deep").mkdir(parents=True)
    (folder / "deep" / "a b.png").write_bytes(BODY)
    (folder / "link.png").symlink_to("deep/a b.png")
    (folder / "escape.png").symlink_to(outside)
    (folder / "big.png").write_bytes(bytes(101))
    os.mkfifo(folder / "pipe.png")
    outside.write_bytes(b"secret")
    policy = FetchPolicy(directory=folder, max_bytes=100)
    root = folder.as_uri()
    for name in ("deep/a%20b.png", "link.png", "deep/../link.png"):
        assert asyncio.run(fetch(f"{root}/{name}", policy)) == BODY
    for name in (
        *(
            "escape.png",
            "../secret.png",
            "%2e%2e/secret.png",
            "..%2Fsecret.png",
            "deep",
            "missing.png",
            "pipe.png",
        ),
        *("a%00.png", "big.png", "link.png?x=1"),
    ):
        asyncio.run(refused(f"{root}/{name}", policy))
    asyncio.run(refused(root.replace("file://", "file://host") + "/link.png", policy))
    asyncio.run(refused(root + "/link.png", FetchPolicy(allow_http=True)))
    asyncio.run(refused(f"{tmp_path.as_uri()}/images2/../secret.png", policy))


@given(
    st.binary(max_size=300), st.sampled_from(["image/png", "image/jpeg;a=b", "IMAGE/WEBP", ""]), st.booleans()
)
def test_data_urls(data: bytes, kind: str, escaped: bool):
    text = base64.b64encode(data).decode()
    if escaped:
        text = text.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D")
    assert decode_data_url(f"data:{kind};base64,{text}", 300) == data
    wrapped = "\r\n".join(text[i : i + 75] for i in range(0, len(text), 75))
    assert decode_data_url(f"DATA:{kind};Base64,{wrapped}", 300) == data
    assert decode_data_url(f"data:{kind};base64,{text.rstrip('=')}", 300) == data


@pytest.mark.parametrize(
    "url",
    [
        "data:",
        "data:image/png",
        "data:image/png,AAAA",
        "data:image/png;base64",
        "data:image/png;base64;x,AAAA",
        "data:image/png;base64,A",
        "data:image/png;base64,A*AA",
        "data:image/png;base64,A=AA",
        "data:image/png;base64,Ａ",
        "data:text/html;base64,AAAA",
        "data:video/jpeg;base64,AAAA",
        "data:" + "x" * 1000 + ";base64,AAAA",
    ],
)
def test_data_urls_that_are_none(url: str):
    asyncio.run(refused(url, FetchPolicy()))


def test_thousands_of_frames_in_a_data_url():
    """S19: frames strung together with commas, as some take videos."""
    frames = ",".join([base64.b64encode(b"\xff\xd8\xff\xe0 frame").decode()] * 5000)
    for kind in ("video/jpeg", "image/jpeg"):
        asyncio.run(refused(f"data:{kind};base64,{frames}", FetchPolicy()))


def test_data_urls_are_limited_before_they_are_decoded():
    text = base64.b64encode(bytes(1001)).decode()
    with pytest.raises(RequestError, match="larger than 1000 bytes"):
        decode_data_url(f"data:image/png;base64,{text}", 1000)
    # Escapes take more room than what they stand for.
    assert len(decode_data_url("data:image/png;base64," + "%41" * 1332, 1000)) == 999


@pytest.mark.parametrize(
    "settings",
    [{"max_bytes": 0}, {"timeout_s": 0.0}, {"max_redirects": -1}, {"networks": ("10.0.0.0/33",)}],
)
def test_policies_that_cannot_be(settings: dict[str, Any]):
    with pytest.raises(ConfigError):
        FetchPolicy(**settings)
