"""The page at `/`: a chat, live charts and the model's facts, in one file of plain HTML and JavaScript.

What a model writes is the least trustworthy text there is. The page inserts it as text alone, and the headers make that more than a
promise: scripts and styles run only if they are the very ones in the file, nothing is loaded from or sent to anywhere else, and
where Trusted Types are known no string can become markup or script.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from importlib import resources

from aiohttp import web

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


async def page(request: web.Request) -> web.Response:
    content, headers = _page()
    if request.headers.get("If-None-Match") == headers["ETag"]:
        return web.Response(status=304, headers=headers)
    return web.Response(body=content, content_type="text/html", charset="utf-8", headers=headers)


@functools.cache
def _page() -> tuple[bytes, dict[str, str]]:
    """The page and its headers."""
    content = resources.files("jaxinfer.server").joinpath("static", "index.html").read_bytes()
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(content.decode()):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    policy = {
        "default-src": "'none'",
        "script-src": " ".join(hashes["script"]),
        "style-src": " ".join(hashes["style"]),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
    }
    return content, headers
