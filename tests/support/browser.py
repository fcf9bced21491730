"""Headless Chromium over its DevTools protocol: a page's requests, console errors and content."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from websockets.sync.client import ClientConnection, connect

STARTS_WITHIN = 60.0
"""Seconds: on a machine that is busy with other tests it takes a while."""


def find_chromium() -> str | None:
    """Chromium's command, under any of its names in Linux distributions."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@dataclass
class Page:
    """An open page.

    Attributes:
        requests: addresses of all requests, including the page itself.
        errors: error messages on the console, and uncaught exceptions.
    """

    tab: Tab
    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def evaluate(self, expression: str) -> Any:
        """A JavaScript expression's JSON-able value; of a promise, the resolved value."""
        options = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = self.tab.call("Runtime.evaluate", **options)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']['text']}")
        return answer["result"].get("value")

    def see(self, method: str, parameters: dict[str, Any]) -> None:
        """An event of the protocol."""
        if method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(parameters["exceptionDetails"]["text"])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "assert"):
            self.errors.append(str([argument.get("value") for argument in parameters["args"]]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])


class Tab:
    """One tab."""

    def __init__(self, connection: ClientConnection):
        self._connection, self._calls = connection, 0
        self._page: Page | None = None
        self._loaded = False
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command's result; events received earlier are recorded."""
        self._calls += 1
        self._connection.send(json.dumps({"id": self._calls, "method": method, "params": parameters}))
        while True:
            message = self._receive()
            if message.get("id") == self._calls:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]

    def open(self, path: Path, width: int = 1200) -> Page:
        """The page once it has loaded, in a window so many pixels wide."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self._page, self._loaded = Page(self), False
        self.call("Page.navigate", url=path.resolve().as_uri())
        while not self._loaded:
            self._receive()
        return self._page

    def _receive(self) -> dict[str, Any]:
        message = json.loads(self._connection.recv(timeout=STARTS_WITHIN))
        if "method" in message:
            self._loaded = self._loaded or message["method"] == "Page.loadEventFired"
            if self._page is not None:
                self._page.see(message["method"], message["params"])
        return message


@contextmanager
def browser(chromium: str, profile: Path) -> Iterator[Tab]:
    """A browser that resolves no host name, without Chromium's sandbox, which root cannot use."""
    command = [
        chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions",
        "--no-first-run", "--disable-background-networking", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
        "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
    ]  # fmt: skip
    said = profile / "stderr.log"
    with said.open("w") as stream:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stream)
    try:
        port = _port(process, profile / "DevToolsActivePort", said)
        with connect(f"ws://127.0.0.1:{port}{_target(port)}", max_size=None, open_timeout=STARTS_WITHIN) as connection:
            yield Tab(connection)
    finally:
        process.terminate()
        process.wait()


def _port(process: subprocess.Popen, file: Path, said: Path) -> int:
    deadline = time.monotonic() + STARTS_WITHIN
    while time.monotonic() < deadline:
        lines = file.read_text().splitlines() if file.is_file() else []
        if len(lines) > 1:
            return int(lines[0])
        if process.poll() is not None:
            raise RuntimeError(f"chromium ended: {said.read_text()[-2000:]}")
        time.sleep(0.05)
    raise TimeoutError("chromium did not start")


def _target(port: int) -> str:
    """The path of the open tab."""
    with urlopen(f"http://127.0.0.1:{port}/json", timeout=STARTS_WITHIN) as answer:
        tabs = [tab for tab in json.load(answer) if tab["type"] == "page"]
    return tabs[0]["webSocketDebuggerUrl"].partition(f":{port}")[2]
