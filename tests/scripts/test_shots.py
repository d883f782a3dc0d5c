"""The report as a browser shows it: nothing is too wide, curves are drawn without a network, in light and dark."""

import json
import math
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "pages"))

import shots  # pyright: ignore[reportMissingImports]  beside the project

from rlworker.tracking.report.compare import write_comparison
from rlworker.tracking.report.page import write_report

pytestmark = [
    pytest.mark.large,
    pytest.mark.skipif(not shots.find_browser(), reason="this machine has no Chromium"),
]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """The pages of two runs, whose samples have long words and whose settings have long lines."""
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "two")]
    for scale, folder in enumerate(folders, 1):
        stored = {"platform": "cpu", "model": "/a/long/path" * 12, "steps": 40}
        (folder / "config.json").write_text(json.dumps(stored))
        lines = [
            {"step": step, "time_step": 1.0, "reward": scale * math.log(step), "truncated": 0.5, "kl": 0.1 / step}
            for step in range(1, 31)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        sample = {"prompt": "word " * 50, "completion": "x" * 400, "answer": "2", "reward": 1.0, "version": 3}
        turns = [{"by": "prompt", "text": "y" * 300}, {"by": "model", "text": "z" * 300, "learns": True}]
        (folder / "rollouts").mkdir()
        rows = [sample, sample | {"turns": turns}]
        (folder / "rollouts" / "step_000030.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [write_report(folders[0]), write_comparison(folders)]


def test_pages_fit_a_desktop_and_a_phone_without_a_network(pages):
    with shots.browsing() as page:
        for file in pages:
            heights = []
            for width in shots.WIDTHS:
                for theme, background in (("light", "rgb(255, 255, 255)"), ("dark", "rgb(20, 23, 28)")):
                    page.open(file.as_uri(), width, shots.SCREEN, theme)
                    seen = shots.measure(page)
                    case = f"{file.name} {width} {theme}"
                    assert seen["overflow"] <= 0 and seen["drawn"] and seen["background"] == background, case
                    first = "model" if file.name == "report.html" else "Results"
                    assert first in seen["first"] and any("Reward" in name for name in seen["first"]), case
                    heights.append(seen["height"])
            assert heights[2] > heights[0], "a phone shows one column"
        assert page.errors == []


def test_a_served_page_draws_what_the_run_writes(tmp_path):
    import threading

    from rlworker.tracking.report.serve import ReportServer

    (tmp_path / "config.json").write_text(json.dumps({"platform": "cpu", "model": "m"}))
    lines = tmp_path / "metrics.jsonl"
    lines.write_text(json.dumps({"step": 1, "time_step": 1.0, "reward": 0.5}) + "\n")
    with ReportServer(tmp_path, "127.0.0.1", 0) as server, shots.browsing() as page:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page.open(server.address, 1280, shots.SCREEN, "light")
        count = "document.querySelector('.plot').data[0].x.length"
        assert page.evaluate(count) == 1
        page.evaluate("document.querySelector('details').open = true")
        with open(lines, "a") as file:
            file.write(json.dumps({"step": 2, "time_step": 1.0, "reward": 0.75}) + "\n")
        wait = f"new Promise(done => {{ const look = () => {count} == 2 ? done(true) : setTimeout(look, 100); look(); "
        assert page.evaluate(f"{wait} setTimeout(() => done(false), 15000); }})")
        assert page.evaluate("document.querySelector('details').open"), "what was open stays open"
        server.shutdown()
        assert page.errors == []
