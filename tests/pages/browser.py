"""A headless Chromium, driven over the DevTools protocol by a WebSocket: enough to look at a page.

Not a test by itself. `Browser` starts one process with a profile of its own and ends it; `look`
opens a page at a width and returns what a reader would have noticed.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import websocket

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
)
# Every picture: how large it is, what replaces it, how many colours a coarse copy of it has.
PICTURES = """
Array.from(document.images).map(image => {
  const canvas = document.createElement('canvas');
  canvas.width = 64; canvas.height = 64;
  const context = canvas.getContext('2d');
  if (image.naturalWidth) context.drawImage(image, 0, 0, 64, 64);
  const data = context.getImageData(0, 0, 64, 64).data, seen = new Set();
  for (let i = 0; i < data.length; i += 4) seen.add(data.slice(i, i + 4).join());
  const box = image.getBoundingClientRect();
  return {alt: image.alt, width: image.naturalWidth, height: image.naturalHeight,
          shown: box.width * box.height, colours: seen.size};
})
"""
OVERFLOW = "[document.documentElement.scrollWidth, window.innerWidth]"


def find() -> str | None:
    """The Chromium on PATH."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@dataclass
class Seen:
    """What one look at a page found."""

    complaints: list[str] = field(default_factory=list)  # console errors and exceptions
    requests: list[str] = field(default_factory=list)  # every address that was asked for
    pictures: list[dict] = field(default_factory=list)
    scroll_width: int = 0
    inner_width: int = 0
    height: int = 0
    title: str = ""


class Browser:
    def __init__(self, executable: str, timeout: float = 30.0):
        self.timeout, self.next, self.events = timeout, 0, []
        self.profile = tempfile.mkdtemp(prefix="rlk-chromium-")
        self.log = open(Path(self.profile) / "log.txt", "w+b")
        command = [executable, *FLAGS, f"--user-data-dir={self.profile}/profile", "about:blank"]
        self.process = subprocess.Popen(
            command, stdout=self.log, stderr=self.log, start_new_session=True
        )
        try:
            self.socket = websocket.create_connection(self._address(), timeout=timeout)
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
            self.session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.call(f"{domain}.enable")
        except BaseException:
            self.close()
            raise

    session: str | None = None

    def look(self, page: Path, width: int, screenshot: Path | None = None, dark=False) -> Seen:
        """Open a page at that width (CSS pixels) and wait until it has loaded."""
        self.events.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=900, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page.resolve().as_uri())
        self._until("Page.loadEventFired")
        self.evaluate(
            "Promise.allSettled(Array.from(document.images).map(i => i.decode())).then(() => 1)"
        )
        pictures = self.evaluate(PICTURES)
        scroll, inner = self.evaluate(OVERFLOW)
        height = self.evaluate("document.documentElement.scrollHeight")
        if screenshot:
            self._capture(screenshot, width, height)
        return Seen(
            self._complaints(), self._requests(), pictures, scroll, inner, height,
            self.evaluate("document.title"),
        )  # fmt: skip

    def evaluate(self, expression: str):
        answer = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression[:60]}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def call(self, method: str, **params) -> dict:
        self.next += 1
        message = {"id": self.next, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.socket.send(json.dumps(message))
        while True:
            answer = json.loads(self.socket.recv())
            if answer.get("id") == self.next:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def close(self) -> None:
        try:
            self.socket.close()
        except Exception:
            pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        self.log.close()
        shutil.rmtree(self.profile, ignore_errors=True)

    def _address(self) -> str:
        deadline = time.monotonic() + self.timeout
        while time.monotonic() < deadline:
            said = Path(self.log.name).read_text(errors="replace")
            found = re.search(r"DevTools listening on (ws://\S+)", said)
            if found:
                return found.group(1)
            if self.process.poll() is not None:
                raise RuntimeError(f"chromium ended with {self.process.returncode}: {said[-800:]}")
            time.sleep(0.05)
        raise TimeoutError("chromium said no address")

    def _until(self, method: str) -> None:
        while not any(event.get("method") == method for event in self.events):
            self.events.append(json.loads(self.socket.recv()))

    def _capture(self, target: Path, width: int, height: int) -> None:
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, 12000), "scale": 1}
        shot = self.call(
            "Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True
        )
        target.write_bytes(base64.b64decode(shot["data"]))

    def _complaints(self) -> list[str]:
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"].get("text")))
            elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
                found.append(str(params["args"]))
            elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(params["entry"]["text"])
        return found

    def _requests(self) -> list[str]:
        sent = (e for e in self.events if e.get("method") == "Network.requestWillBeSent")
        return [e["params"]["request"]["url"] for e in sent]
