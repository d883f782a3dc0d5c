"""``rlworker new``: what it writes runs as it is."""

import ast
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import get_args

import pytest
from PIL import Image
from support.program import run_program

from recipes.common.numbers import find_number
from rlworker.__main__ import main
from rlworker.data.starters.new import Kind, make_starter

KINDS = get_args(Kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_has_a_recipe_a_reward_and_ten_rows(tmp_path, kind):
    done = run_program(main, "new", tmp_path / "mine", "--kind", kind)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == [str(tmp_path / "mine" / name) for name in ("recipe.py", "train.jsonl")]
    assert f"python {tmp_path}/mine/recipe.py --smoke" in done.stdout
    tree = ast.parse((tmp_path / "mine" / "recipe.py").read_text())
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert "reward" in names and (names > {"play", "multiply"}) == (kind == "tools")
    rows = [json.loads(line) for line in (tmp_path / "mine" / "train.jsonl").read_text().splitlines()]
    assert len(rows) == 10 and all(find_number(row["answer"]) == row["answer"] for row in rows)
    assert len({json.dumps(row["prompt"]) for row in rows} | {str(row.get("images")) for row in rows}) >= 10


def count_squares(image: Image.Image) -> int:
    """Count squares by their pixels of another colour than the ground's."""
    return sum(image.getpixel((x, y)) != (30, 30, 30) for x in range(3, 56, 14) for y in range(3, 56, 14))


def test_answers_of_images_are_right(tmp_path):
    folder = tmp_path / "mine"
    make_starter(folder, "images")
    for line in (folder / "train.jsonl").read_text().splitlines():
        row = json.loads(line)
        with Image.open(folder / row["images"][0]) as image:
            assert str(count_squares(image)) == row["answer"]


@pytest.mark.parametrize("kind", ["file", "empty folder"])
def test_what_is_there_is_not_touched(tmp_path, kind):
    target = tmp_path / "mine"
    target.mkdir() if kind == "empty folder" else target.write_text("kept")
    done = run_program(main, "new", target)
    assert done.returncode == 1 and "is there already, and is not touched" in done.stderr
    assert list(target.iterdir()) == [] if kind == "empty folder" else target.read_text() == "kept"


@pytest.mark.large
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.product] * (kind != "text")) for kind in KINDS])
def test_it_runs_as_written(tmp_path, kind):
    """On a tiny model, with its own ten rows, in under three minutes."""
    folder = tmp_path / "mine"
    make_starter(folder, kind)
    start = time.monotonic()
    done = subprocess.run([sys.executable, folder / "recipe.py", "--smoke"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert time.monotonic() - start < 180
    run = folder / "run_smoke" / "run"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2] and lines[-1]["episode_failures"] == 0
    assert json.loads((run / "config.json").read_text())["data"]["train"] == str(folder / "train.jsonl")
    sample = json.loads(next(iter(sorted((run / "rollouts").iterdir()))).read_text().splitlines()[0])
    assert ("times" if kind == "tools" else "?") in sample["prompt"]
    if kind == "tools":
        assert Path(run / "report.html").read_text().count("multiply") >= 1, "the template shows the tool"
