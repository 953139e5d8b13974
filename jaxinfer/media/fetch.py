"""From the URL of an image to its bytes: data URLs always, anything else only as a policy allows.

A server that opens URLs for strangers can be made to read what only it can reach (server-side request forgery). So: one
parser reads a URL, here and in the client; a name is resolved once, all its addresses must be public, and the connection
goes to one of them; redirects pass through the same gate; nothing is unpacked; bytes and time are limited.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import os
import re
import socket
import stat
import urllib.parse
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path

import aiohttp
import yarl
from aiohttp.abc import AbstractResolver, ResolveResult

from jaxinfer.errors import ConfigError, RequestError

_SPACE = str.maketrans("", "", " \t\r\n\f")
_DATA = re.compile(r"data:(?P<type>[^,;]*)(?P<parameters>(?:;[^,;]*)*),", re.IGNORECASE)
# Networks whose addresses end in an IPv4 address, which is what is reached: mapped, and translated by NAT64.
_WRAPPERS = (ip_network("::ffff:0:0/96"), ip_network("64:ff9b::/96"))
_INTERNET = ip_network("2000::/3")  # all of IPv6 that is given out
_CLOSED = (  # inside of it, or of IPv4, and not for strangers, though ipaddress may call some global
    ip_network("192.0.0.0/24"),
    ip_network("168.63.129.16/32"),  # answers with an Azure machine's secrets
    ip_network("2002::/16"),  # 6to4: leads to any IPv4 address
    ip_network("3fff::/20"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchPolicy:
    """What may be fetched. The default is data URLs alone.

    Attributes:
      allow_http: http: and https: URLs of public hosts.
      hosts: these alone, and the subdomains of those that begin with a dot; empty: all.
      networks: addresses that are allowed though they are not public, such as "10.1.0.0/16".
      directory: files below it may be named by file: URLs; None: no files.
      max_bytes: of one file.
      timeout_s: for one URL, redirects included, seconds.
    """

    allow_http: bool = False
    hosts: tuple[str, ...] = ()
    networks: tuple[str, ...] = ()
    directory: Path | None = None
    max_bytes: int = 20 * 2**20
    max_redirects: int = 3
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        if self.max_bytes < 1 or self.max_redirects < 0 or not self.timeout_s > 0:
            raise ConfigError(
                f"fetching needs max_bytes={self.max_bytes} and timeout_s={self.timeout_s} above 0, "
                f"and max_redirects={self.max_redirects} of at least 0"
            )
        for network in self.networks:
            try:
                ip_network(network)
            except ValueError as error:
                raise ConfigError(f"a network that may be fetched from is not one: {error}") from None

    def permits(self, address: str) -> bool:
        """Whether an IP address may be connected to."""
        ip = ip_address(address.partition("%")[0])
        if any(ip in wrapper for wrapper in _WRAPPERS):
            ip = IPv4Address(int(ip) & 0xFFFFFFFF)
        return _is_public(ip) or any(ip in ip_network(network) for network in self.networks)

    def permits_host(self, host: str) -> bool:
        """Whether a URL may name this host, whatever its address."""
        host = host.lower().rstrip(".")
        return not self.hosts or any(
            host == known or (known.startswith(".") and host.endswith(known))
            for known in (name.lower() for name in self.hosts)
        )


async def fetch(url: str, policy: FetchPolicy) -> bytes:
    """The bytes behind a URL. Raises RequestError (code "invalid_image_url"): refused, not found, too large or too slow."""
    scheme = url[:8].partition(":")[0].lower()
    if scheme == "data":
        return decode_data_url(url, policy.max_bytes)
    if scheme == "file" and policy.directory is not None:
        return await asyncio.to_thread(_read_file, url, policy.directory, policy.max_bytes)
    if scheme in ("http", "https") and policy.allow_http:
        try:
            async with asyncio.timeout(policy.timeout_s):
                return await _download(url, policy)
        except TimeoutError:
            raise _refusal(f"an image URL did not answer within {policy.timeout_s:g} seconds") from None
    allowed = ["data"] + ["file"] * (policy.directory is not None) + ["http and https"] * policy.allow_http
    raise _refusal(f"image URLs may be {', '.join(allowed)} here: send the image as data:image/png;base64,…")


def decode_data_url(url: str, max_bytes: int) -> bytes:
    """The bytes in a base64 data: URL (RFC 2397) of an image. Raises RequestError as `fetch` does."""
    head = _DATA.match(url, 0, 200)
    if head is None:
        raise _refusal("an image's data URL must look like data:image/png;base64,…")
    parameters = [parameter.strip().lower() for parameter in head["parameters"].split(";")]
    if parameters[-1] != "base64":
        raise _refusal("an image's data URL must be base64: data:image/png;base64,…")
    kind = head["type"].strip().lower()
    if kind and not kind.startswith("image/"):
        raise _refusal(f"an image's data URL has the media type {kind[:40]!r}: it must be an image's")
    if (len(url) - head.end()) * 3 // 4 > max_bytes * 3:  # escaped characters take three
        raise _too_large(max_bytes)
    text = url[head.end() :]
    if "%" in text:
        text = urllib.parse.unquote(text)
    text = text.translate(_SPACE).rstrip("=")
    if len(text) * 3 // 4 > max_bytes:
        raise _too_large(max_bytes)
    try:
        # Pictures strung together with commas, as videos are sent elsewhere, end here.
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        raise _refusal("an image's data URL is not valid base64") from None


async def _download(url: str, policy: FetchPolicy) -> bytes:
    # A connector for each download: no connection, cookie or proxy of another one is used again.
    connector = aiohttp.TCPConnector(
        resolver=_GuardedResolver(policy),
        socket_factory=lambda address: _socket(address, policy),
        use_dns_cache=False,
        force_close=True,
    )
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),  # the caller's covers everything
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        headers={"Accept": "image/*", "Accept-Encoding": "identity"},
    ) as session:
        try:
            target = yarl.URL(url)
            for _ in range(1 + policy.max_redirects):
                _check_target(target, policy)
                async with session.get(target, allow_redirects=False) as response:
                    if response.status not in (301, 302, 303, 307, 308):
                        return await _body(response, policy.max_bytes)
                    target = target.join(yarl.URL(response.headers.get("Location", "")))
        except (aiohttp.ClientError, ValueError, OSError) as error:
            raise _refusal(f"an image URL cannot be fetched ({type(error).__name__})") from None
    raise _refusal(f"an image URL redirects more than {policy.max_redirects} times")


def _check_target(target: yarl.URL, policy: FetchPolicy) -> None:
    host = target.host
    if target.scheme not in ("http", "https") or not host:
        raise _refusal("an image URL, or what it redirects to, is neither http nor https")
    if target.user is not None or target.password is not None:
        raise _refusal("an image URL must not hold a user name or password")
    if not policy.permits_host(host):
        raise _refusal(f"images may not be fetched from {host[:100]!r}")
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return  # a name: the resolver looks at its addresses
    if not policy.permits(host):
        raise _forbidden(host)


class _GuardedResolver(AbstractResolver):
    """Resolves a name once, to addresses that the policy permits or not at all; the client connects to these."""

    def __init__(self, policy: FetchPolicy):
        self._policy = policy

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, family=family)
        results: list[ResolveResult] = []
        for kind, _, protocol, _, address in found:
            ip = str(address[0])
            # One inner address is enough to refuse a name: another try could get it.
            if not self._policy.permits(ip):
                raise _forbidden(host)
            results.append(
                ResolveResult(
                    hostname=host,
                    host=ip,
                    port=port,
                    family=kind,
                    proto=protocol,
                    flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
                )
            )
        return results

    async def close(self) -> None:
        """Nothing is held."""


def _socket(address: aiohttp.AddrInfoType, policy: FetchPolicy) -> socket.socket:
    """The last gate: whatever the URL said and the client made of it, this is what it connects to."""
    family, kind, protocol, _, place = address
    if not policy.permits(str(place[0])):
        raise OSError("the address is not public")
    return socket.socket(family, kind, protocol)


async def _body(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    if response.status != 200:
        raise _refusal(f"an image URL answered {response.status}")
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        raise _refusal("an image URL answered with compressed content, which is not unpacked")
    if (response.content_length or 0) > max_bytes:
        raise _too_large(max_bytes)
    body = bytearray()
    async for chunk in response.content.iter_chunked(2**16):
        body += chunk
        if len(body) > max_bytes:
            raise _too_large(max_bytes)
    return bytes(body)


def _read_file(url: str, directory: Path, max_bytes: int) -> bytes:
    parts = urllib.parse.urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
        raise _refusal("a file: URL must be file:///PATH")
    try:
        root = directory.resolve(strict=True)
        path = Path(urllib.parse.unquote(parts.path)).resolve(strict=True)
        if not path.is_relative_to(root):
            raise _refusal("a file: URL leads out of the directory that images may be read from")
        # Every link is resolved; one put there since, and what is not a plain file, is not opened.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise _refusal("a file: URL does not name a plain file")
            data = file.read(max_bytes + 1)
    except (OSError, ValueError, RuntimeError):
        raise _refusal("a file: URL names no file that can be read") from None
    if len(data) > max_bytes:
        raise _too_large(max_bytes)
    return data


def _is_public(ip: IPv4Address | IPv6Address) -> bool:
    if ip.version == 6 and ip not in _INTERNET:
        return False
    closed = any(ip in network for network in _CLOSED)
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or closed)


def _forbidden(host: str) -> RequestError:
    return _refusal(f"images may not be fetched from {host[:100]!r}: its address is not public")


def _too_large(max_bytes: int) -> RequestError:
    return _refusal(f"an image is larger than {max_bytes} bytes: make it smaller")


def _refusal(message: str) -> RequestError:
    return RequestError(message, param="messages", code="invalid_image_url")
