"""Takes pictures of pages as desktops and phones show them, light and dark, and tells what the first screen has.

    python scripts/pages/shots.py runs/mine/report.html --to shots     # 1,280 and 390 pixels, light and dark
    python scripts/pages/shots.py runs/mine/report.html --picture docs/report.png

It needs Chromium, which runs without a network.
"""

import argparse
import base64
import json
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from websockets.sync.client import ClientConnection, connect

WIDTHS = (1280, 390)
SCREEN = 800
"""Pixels of the first screen's height."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
_NETWORK = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
_MEASURE = """
(() => {
  const shown = [...document.querySelectorAll("h1, h2, h3, .opening th, .notice, .axes, .plot")];
  const first = shown.filter(element => element.getBoundingClientRect().top < %d);
  return JSON.stringify({
    overflow: document.documentElement.scrollWidth - innerWidth,
    drawn: document.querySelectorAll(".plot .main-svg").length > 0,
    first: first.map(element => element.classList.contains("plot") ? "[curve]" : element.innerText.split("\\n")[0]),
    height: document.documentElement.scrollHeight,
    background: getComputedStyle(document.body).backgroundColor,
  });
})()
"""


def find_browser() -> str:
    """Find Chromium; empty if this machine has none."""
    return next(filter(None, map(shutil.which, BROWSERS)), "")


class Page:
    """A page in the browser, over Chromium's DevTools protocol."""

    def __init__(self, connection: ClientConnection):
        self._connection, self._number = connection, 0
        self.errors: list[str] = []
        """Errors of the page's scripts, and files that it did not get."""

    def call(self, method: str, **arguments) -> dict:
        """Call a method, and return its result."""
        self._number += 1
        self._connection.send(json.dumps({"id": self._number, "method": method, "params": arguments}))
        while True:
            message = json.loads(self._connection.recv(timeout=60))
            if message.get("method") in ("Runtime.exceptionThrown", "Network.loadingFailed"):
                self.errors.append(json.dumps(message["params"])[:300])
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]

    def evaluate(self, script: str):
        """Evaluate a script in the page; a promise is awaited."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        return result["result"].get("value")

    def open(self, address: str, width: int, height: int, theme: str) -> None:
        """Open an address at a width in pixels and in a theme, ``light`` or ``dark``, and wait for its curves."""
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")
        size = dict(width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
        self.call("Page.navigate", url=address)
        self.evaluate(
            "new Promise(done => { const wait = () => document.readyState == 'complete' && "
            "document.querySelector('.plot .main-svg') ? setTimeout(done, 300) : setTimeout(wait, 50); wait(); "
            "setTimeout(done, 20000); })"
        )

    def shoot(self, file: Path) -> None:
        """Write a picture of the first screen."""
        file.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browsing() -> Iterator[Page]:
    """Open a page in a browser of its own.

    Raises:
        RuntimeError: there is no browser, or it does not start.
    """
    if not (browser := find_browser()):
        raise RuntimeError(f"shots: none of {', '.join(BROWSERS)} is installed; install Chromium")
    with tempfile.TemporaryDirectory(prefix="rlworker-shots-", ignore_cleanup_errors=True) as profile:
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", _NETWORK]
        command += ["--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr
            said = (re.search(r"ws://[^/]+:(\d+)/", line) for line in process.stderr)
            port = next((match[1] for match in said if match), None)
            if port is None:
                raise RuntimeError("shots: the browser ended before it listened")
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
                (target, *_) = [each for each in json.load(answer) if each["type"] == "page"]
            with connect(target["webSocketDebuggerUrl"], max_size=None) as connection:
                yield Page(connection)
        finally:
            process.kill()
            process.wait()


def measure(page: Page) -> dict:
    """Measure an open page: pixels by which it is too wide, its height, and what its first screen has."""
    return json.loads(page.evaluate(_MEASURE % SCREEN))


def main() -> None:
    """Take the pictures that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="+", type=Path, help="HTML files")
    parser.add_argument("--to", type=Path, help="folder of the pictures, each PAGE_WIDTH_THEME.png")
    parser.add_argument("--picture", type=Path, help="one picture of the first page, 1,280 pixels wide and light")
    options = parser.parse_args()
    with browsing() as page:
        if options.picture:
            page.open(options.pages[0].absolute().as_uri(), WIDTHS[0], SCREEN, "light")
            page.shoot(options.picture)
            Image.open(options.picture).quantize(64).save(options.picture, optimize=True)
            print(f"{options.picture}: {options.picture.stat().st_size:,} bytes")
            return
        for file in options.pages:
            for width in WIDTHS:
                for theme in ("light", "dark"):
                    page.open(file.absolute().as_uri(), width, SCREEN, theme)
                    found = measure(page)
                    print(f"{file.name} {width} {theme}: {json.dumps(found, ensure_ascii=False)}")
                    if options.to:
                        options.to.mkdir(parents=True, exist_ok=True)
                        page.shoot(options.to / f"{file.stem}_{width}_{theme}.png")
        for error in page.errors:
            print(f"error: {error}")
    sys.exit(bool(page.errors))


if __name__ == "__main__":
    main()
