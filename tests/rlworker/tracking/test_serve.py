"""``rlworker report --serve``: the page follows the run; on loopback without a token, elsewhere with one."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path

import pytest
from support.program import run_program

from rlworker.__main__ import main
from rlworker.tracking.report.page import LIBRARY
from rlworker.tracking.report.serve import ReportServer


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"platform": "cpu"}))
    write_step(tmp_path, 1)
    return tmp_path


def write_step(folder: Path, step: int) -> None:
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "time_step": 2.0, "reward": step / 16}) + "\n")


@pytest.fixture
def serve():
    """Serve a folder at a host until the test ends."""
    servers = []

    def start(folder: Path, host: str) -> ReportServer:
        server = ReportServer(folder, host, 0)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def get(address: str, **headers: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_the_page_follows_the_run_and_writes_nothing(folder, serve):
    server = serve(folder, "127.0.0.1")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", server.address)
    before = sorted(folder.iterdir())
    status, page = get(server.address)
    version = get(f"{server.address}version")[1]
    assert status == 200 and "[0.0625]" in page and f'let shown = "{version}"' in page
    write_step(folder, 2)
    assert get(f"{server.address}version")[1] != version
    assert "[0.0625,0.125]" in get(f"{server.address}report.html")[1]
    assert len(get(server.address + LIBRARY)[1]) > 10**6 and get(f"{server.address}config.json")[0] == 404
    assert sorted(folder.iterdir()) == before


def test_a_page_from_elsewhere_is_refused_on_loopback(folder, serve):
    server = serve(folder, "127.0.0.1")
    port = server.server_address[1]
    assert get(server.address, Host=f"localhost:{port}")[0] == 200
    assert get(server.address, Host=f"example.com:{port}")[0] == 403


def test_any_other_address_needs_a_token(folder, serve):
    server = serve(folder, "0.0.0.0")
    token = server.address.rstrip("/").rpartition("/")[2]
    local = f"http://127.0.0.1:{server.server_address[1]}"
    assert len(token) >= 32
    for path in ("/", "/report.html", "/version", f"/{token[:-1]}/", f"/{token[:-1]}x/report.html"):
        assert get(local + path)[0] == 403, path
    assert get(f"{local}/{token}/report.html")[0] == get(f"{local}/{token}/")[0] == 200


def test_a_run_that_is_written_anew_is_no_end_of_the_server(folder, serve):
    server = serve(folder, "127.0.0.1")
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").unlink()
    status, said = get(server.address)
    assert status == 503 and "is not a run folder" in said
    (folder / "metrics.jsonl").write_text(text)
    assert get(server.address)[0] == 200


def test_the_command_says_the_address_where_there_is_no_browser(folder):
    environment = {name: value for name, value in os.environ.items() if name not in ("DISPLAY", "WAYLAND_DISPLAY")}
    command = [Path(sys.executable).parent / "rlworker", "report", folder, "--serve"]
    # A shell that starts tests in the background lets them ignore interrupts.
    heed = partial(signal.signal, signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, preexec_fn=heed)
    try:
        assert process.stdout
        first, second = process.stdout.readline(), process.stdout.readline()
        port = re.findall(r"^report: http://127\.0\.0\.1:(\d+)/ follows ", first)[0]
        assert f"ssh -L {port}:localhost:{port}" in second
        assert get(f"http://127.0.0.1:{port}/")[0] == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()


def test_a_browser_is_opened_where_there_is_a_screen(folder, monkeypatch, capsys):
    opened = []
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    monkeypatch.setattr(ReportServer, "serve_forever", lambda self: None)
    monkeypatch.setattr(sys, "argv", ["rlworker", "report", str(folder), "--serve"])
    main()
    assert len(opened) == 1 and f"report: {opened[0]} follows" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "said"),
    [(["--host", "192.0.2.1"], "cannot listen at '192.0.2.1'"), (["--host", "no.such.host.invalid"], "cannot listen")],
)
def test_an_address_that_is_not_there_is_an_error(folder, options, said):
    done = run_program(main, "report", folder, "--serve", *options)
    assert done.returncode == 1 and f"error: report: {said}" in done.stderr and "give --host" in done.stderr


def test_a_folder_without_a_run_is_an_error(tmp_path):
    done = run_program(main, "report", tmp_path, "--serve")
    assert done.returncode == 1 and "is not a run folder" in done.stderr
