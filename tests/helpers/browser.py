"""A headless Chromium for the tests, driven over its DevTools protocol: a small WebSocket, and one tab."""

import base64
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from patience import PATIENCE

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--no-default-browser-check", "--mute-audio", "--remote-debugging-port=0"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]


@contextmanager
def opened() -> Iterator["Tab"]:
    """A tab of a new browser with an empty profile, which is gone afterwards."""
    profile = tempfile.mkdtemp(prefix="nb-")
    process = subprocess.Popen(
        [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "HOME": profile},
    )
    try:
        tab = Tab(_address(Path(profile)))
        yield tab
        tab.close()
    finally:
        os.killpg(process.pid, 9)
        process.wait(60)
        shutil.rmtree(profile, ignore_errors=True)


def _address(profile: Path, within_s: float = 30) -> tuple[int, str]:
    """Port and path of the protocol, as Chromium writes them down."""
    deadline = time.monotonic() + within_s * PATIENCE
    while time.monotonic() < deadline:
        try:
            port, path = (profile / "DevToolsActivePort").read_text().splitlines()
        except (OSError, ValueError):
            time.sleep(0.05)
        else:
            return int(port), path
    raise AssertionError("Chromium did not start")


class Tab:
    def __init__(self, address: tuple[int, str]) -> None:
        self._link = _WebSocket(*address)
        self._number = 0
        self._session: str | None = None
        self.asked: list[str] = []
        """Every address that it asked for."""
        self.complaints: list[str] = []
        """What a person would see in the console, and exceptions."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        self._link.send(json.dumps(message | ({"sessionId": self._session} if self._session else {})))
        while True:
            answer = json.loads(self._link.receive())
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._hear(answer)

    def _hear(self, event: dict[str, Any]) -> None:
        match event.get("method"), event.get("params", {}):
            case "Network.requestWillBeSent", params:
                self.asked.append(params["request"]["url"])
            case "Runtime.exceptionThrown", params:
                details = params["exceptionDetails"]
                self.complaints.append(str(details.get("exception", {}).get("description", details["text"])))
            case "Runtime.consoleAPICalled", params if params["type"] in ("error", "warning", "assert"):
                self.complaints.append(f"console: {params['args']}")
            case "Log.entryAdded", params if params["entry"]["level"] in ("error", "warning"):
                self.complaints.append(f"{params['entry']['source']}: {params['entry']['text']}")

    def show(self, *, width: int, height: int, dark: bool, scale: int = 1, calm: bool = False) -> None:
        """What device it is, and what its owner prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        wishes = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce" if calm else ""},
        ]
        self.call("Emulation.setEmulatedMedia", features=wishes)

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        here = json.dumps(url.partition("#")[0])
        self.until(f"location.href.startsWith({here}) && document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Of a piece of JavaScript; a promise is waited for."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str, within_s: float = 30) -> Any:
        """Poll until it is true."""
        deadline = time.monotonic() + within_s * PATIENCE
        while not (value := self.value(expression)):
            assert time.monotonic() < deadline, f"not within {within_s:g} s: {expression}; {self.complaints}"
            time.sleep(0.1)
        return value

    def text(self, selector: str) -> str:
        return self.value(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Of the whole page, however long it is."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._link.close()


class _WebSocket:
    """RFC 6455 as far as a client of one honest server needs it."""

    def __init__(self, port: int, path: str) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=120)
        key = base64.b64encode(os.urandom(16)).decode()
        self._socket.sendall(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        self._stream = self._socket.makefile("rb")
        head = b"".join(iter(self._stream.readline, b"\r\n"))
        assert re.match(rb"HTTP/1\.1 101 ", head), head

    def send(self, text: str) -> None:
        data, mask = text.encode(), os.urandom(4)
        length = struct.pack("!BBQ", 0x81, 0xFF, len(data))
        stream = (mask * (len(data) // 4 + 1))[: len(data)]
        masked = (int.from_bytes(data) ^ int.from_bytes(stream)).to_bytes(len(data))
        self._socket.sendall(length + mask + masked)

    def receive(self) -> str:
        """The next whole text message."""
        parts = []
        while True:
            first, length = self._stream.read(2)
            if length == 126:
                (length,) = struct.unpack("!H", self._stream.read(2))
            elif length == 127:
                (length,) = struct.unpack("!Q", self._stream.read(8))
            data = self._stream.read(length)
            if first & 0x0F in (0, 1):
                parts.append(data)
                if first & 0x80:
                    return b"".join(parts).decode()

    def close(self) -> None:
        self._stream.close()
        self._socket.close()
