"""API keys: who may call which route. Deny by default: every route asks for a key unless it is named open here."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import Any

from aiohttp import web

from jaxinfer.errors import ConfigError
from jaxinfer.server.errors import HTTPFailure

# Canonical paths of routes. The page at / holds no data; what it fetches asks for the key.
OPEN = frozenset(("/health", "/ready", "/"))
_ADMIN = "/admin/"


class Keys:
    """Keys from a file, one a line; blank lines and those that begin with # are left out. Only digests are kept."""

    def __init__(self, path: Path):
        try:
            lines = [line.strip() for line in path.read_text().splitlines()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the keys file {path} cannot be read: {error}") from None
        self._digests = [_digest(line) for line in lines if line and not line.startswith("#")]
        if not self._digests:
            raise ConfigError(f"the keys file {path} holds no key: write one a line")

    def allow(self, key: str) -> bool:
        """Compares with every key, in time that does not depend on how much of one is right."""
        digest = _digest(key)
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found


def authorization(keys: Keys | None, admin_keys: Keys | None) -> Any:
    """Middleware. It looks at the route that was matched, not at the path that was sent."""

    @web.middleware
    async def authorize(request: web.Request, handler: Any) -> web.StreamResponse:
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else None
        if route is not None and route.startswith(_ADMIN):
            if admin_keys is None:
                raise HTTPFailure(403, "admin routes are off: start the server with --admin-keys-file")
            _check(request, admin_keys)
        elif keys is not None and route not in OPEN and request.method != "OPTIONS":
            _check(request, keys)
        return await handler(request)

    return authorize


def _check(request: web.Request, keys: Keys) -> None:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        key = request.headers.get("x-api-key", "")
    if not key:
        raise HTTPFailure(401, "an API key is needed: send Authorization: Bearer KEY", code="missing_api_key")
    if not keys.allow(key.strip()):
        raise HTTPFailure(401, "the API key is not one of this server's", code="invalid_api_key")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
