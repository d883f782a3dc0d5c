"""A page that follows a run: the report over HTTP, which the browser takes anew whenever the run has written.

On loopback the address alone is enough. At any other address the path has a token that nobody can guess.
"""

import hmac
import ipaddress
import os
import secrets
import socket
import sys
import threading
import webbrowser
from functools import cached_property
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from rlworker.tracking.report.page import LIBRARY, read_library, render_report

_WRITTEN = ("metrics.jsonl", "config.json", "outages.jsonl", "validation.jsonl", "summary.json", "starts.jsonl")
"""Files of a run folder that make a new page when they change."""
_HTML, _JAVASCRIPT, _TEXT = "text/html; charset=utf-8", "text/javascript; charset=utf-8", "text/plain; charset=utf-8"


class ReportServer(ThreadingHTTPServer):
    """Serves the report of a run folder; nothing is written into the folder.

    Args:
        folder: the run folder. host: address at which it listens. port: its port; 0 takes a free one.

    Raises:
        ValueError: the folder holds no run, plotly is not installed, or the address or port cannot be used.
    """

    daemon_threads = True

    def __init__(self, folder: Path, host: str, port: int):
        self.folder = folder
        self._lock = threading.Lock()
        self._version, self._page = "", ""
        self.render()
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            listen_at = str(address[0])
            self.address_family = family
            super().__init__((listen_at, int(address[1])), _Handler)
        except OSError as error:
            raise ValueError(
                f"report: cannot listen at {host!r}, port {port} ({error}); give --host an address of this machine, "
                "such as 127.0.0.1 or 0.0.0.0, and --port a free one, or 0"
            ) from error
        self.is_local = ipaddress.ip_address(listen_at.partition("%")[0]).is_loopback
        self.token = "" if self.is_local else secrets.token_urlsafe(24)

    @property
    def address(self) -> str:
        """The address of the page, with its token."""
        host, port = self.server_address[:2]
        name = str(host)
        if ipaddress.ip_address(name.partition("%")[0]).is_unspecified:
            name = socket.gethostname()
        name = f"[{name}]" if ":" in name else name
        return f"http://{name}:{port}/{self.token}/" if self.token else f"http://{name}:{port}/"

    @cached_property
    def library(self) -> str:
        return read_library()

    def read_version(self) -> str:
        """Read a text that changes whenever the run writes what the page shows."""
        paths = [self.folder / name for name in _WRITTEN]
        stats = [path.stat() for path in paths if path.is_file()]
        return "-".join(f"{stat.st_mtime_ns:x}.{stat.st_size:x}" for stat in stats)

    def render(self) -> str:
        """Render the page, unless it was rendered since the run last wrote."""
        with self._lock:
            version = self.read_version()
            if version != self._version or not self._page:
                self._page = render_report(self.folder, follows=version or "none")
                self._version = version
            return self._page


class _Handler(BaseHTTPRequestHandler):
    """Answers the three files of the page."""

    server: ReportServer

    def do_GET(self) -> None:
        name = self._find_name()
        if name is None:
            self._send(HTTPStatus.FORBIDDEN, "rlworker report: the address needs the token that the command printed\n")
        elif name in ("", "report.html"):
            try:
                self._send(HTTPStatus.OK, self.server.render(), _HTML)
            except (ValueError, OSError, KeyError) as error:  # the run is being written anew
                self._send(HTTPStatus.SERVICE_UNAVAILABLE, f"rlworker report: {error}\n")
        elif name == "version":
            self._send(HTTPStatus.OK, self.server.read_version() or "none")
        elif name == LIBRARY:
            self._send(HTTPStatus.OK, self.server.library, _JAVASCRIPT)
        else:
            self._send(HTTPStatus.NOT_FOUND, "rlworker report: there is no such page\n")

    def _find_name(self) -> str | None:
        """Find the name of the asked file; None if the request may not see it.

        On loopback a name in the header Host that is no loopback's means that a page from elsewhere asks.
        """
        path = self.path.partition("?")[0].removeprefix("/")
        if self.server.is_local:
            host = self.headers.get("Host", "").rpartition(":")[0].strip("[]")
            return path if host in ("localhost", "127.0.0.1", "::1") or host.startswith("127.") else None
        token, _, name = path.partition("/")
        return name if hmac.compare_digest(token.encode(), self.server.token.encode()) else None

    def _send(self, status: HTTPStatus, text: str, kind: str = _TEXT) -> None:
        body = text.encode("utf-8", "replace")
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "max-age=3600" if kind == _JAVASCRIPT else "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a page asks every few seconds."""


def serve_report(folder: Path, host: str = "127.0.0.1", port: int = 0) -> None:
    """Serve the report of a run until the program is interrupted. A browser is opened where there is a screen.

    Args:
        folder: the run folder. host: address at which to listen. port: its port; 0 takes a free one.

    Raises:
        ValueError: as ``ReportServer``.
    """
    with ReportServer(folder, host, port) as server:
        print(f"report: {server.address} follows {folder}; Ctrl-C ends it", flush=True)
        if not _open_browser(server.address) and server.is_local:
            number = server.server_address[1]
            print(
                f"report: from another machine: ssh -L {number}:localhost:{number} {socket.gethostname()}", flush=True
            )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(flush=True)


def _open_browser(address: str) -> bool:
    """Open the page where there is a screen, and tell whether a browser took it."""
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return False
    try:
        return webbrowser.open(address)
    except webbrowser.Error:
        return False
