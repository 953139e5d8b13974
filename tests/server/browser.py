"""Headless Chromium over chromedriver's plain W3C WebDriver protocol."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
ENTER, ESCAPE, TAB, UP, LEFT, SHIFT = "\ue007", "\ue00c", "\ue004", "\ue013", "\ue012", "\ue008"
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


def missing() -> str | None:
    """Which program is not installed, if one is not."""
    return next((p for p in ("chromium", "chromedriver") if shutil.which(p) is None), None)


class Browser:
    """One session. Elements are named by CSS selectors."""

    def __init__(self, driver: str, profile: Path):
        self._driver = driver
        options = {
            "args": [*FLAGS, f"--user-data-dir={profile}"],
            "binary": shutil.which("chromium"),
        }
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        created = self._send("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{created['sessionId']}"

    def close(self) -> None:
        self._send("DELETE", self._session)

    def open(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def run(self, script: str, *args: Any) -> Any:
        """The value of a JavaScript function's body."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(args)})

    def text(self, selector: str) -> str:
        """Text content, shown or not; "" when there is no such element."""
        return self.run("return document.querySelector(arguments[0])?.textContent ?? ''", selector)

    def click(self, selector: str) -> None:
        """As a user would: it fails where something else is in the way."""
        self._call("POST", f"/element/{self._find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        self._call("POST", f"/element/{self._find(selector)}/value", {"text": text})

    def press(self, *keys: str) -> None:
        """Keys, one after the other, for whatever has the focus."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def label(self, handle: dict[str, str]) -> str:
        """The accessible name, as assistive technology is told it."""
        return self._call("GET", f"/element/{handle[_ELEMENT]}/computedlabel")

    def resize(self, width: int, height: int) -> None:
        """Size of the page, in CSS pixels; windows cannot be as narrow as phones."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        command = {"cmd": "Emulation.setDeviceMetricsOverride", "params": size}
        self._call("POST", "/goog/cdp/execute", command)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def console(self) -> list[str]:
        """What the console has said since the last call: errors, failed loads, violations of the content policy."""
        return [entry["message"] for entry in self._call("POST", "/se/log", {"type": "browser"})]

    def wait(self, condition: Callable[[], Any], seconds: float = 10.0) -> Any:
        """The first true value of `condition` within the time."""
        end = time.perf_counter() + seconds
        while not (value := condition()):
            assert time.perf_counter() < end, "it did not happen in time"
            time.sleep(0.05)
        return value

    def wait_text(self, selector: str, text: str, seconds: float = 10.0) -> None:
        """Until an element's text holds `text`."""
        end = time.perf_counter() + seconds
        while text not in (found := self.text(selector)):
            assert time.perf_counter() < end, f"{selector} says {found!r}, not {text!r}"
            time.sleep(0.05)

    def _find(self, selector: str) -> str:
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        return found[_ELEMENT]

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        return self._send(method, self._session + path, body)

    def _send(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._driver + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            with error:
                value = json.load(error)["value"]
            raise AssertionError(f"{value['error']}: {value['message'].splitlines()[0]}") from None


@contextlib.contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """A browser with a fresh profile in this folder."""
    with subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as driver:
        assert driver.stdout is not None
        port = None
        for line in driver.stdout:
            if found := re.search(r"started successfully on port (\d+)", line):
                port = found[1]
                break
        assert port is not None, "chromedriver did not start"
        rest = threading.Thread(target=driver.stdout.read, daemon=True)  # so that it never waits to be read
        rest.start()
        try:
            browser = Browser(f"http://127.0.0.1:{port}", profile)
            try:
                yield browser
            finally:
                browser.close()
        finally:
            driver.terminate()
            driver.wait(10)
            rest.join(10)
