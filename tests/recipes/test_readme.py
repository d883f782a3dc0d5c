"""The README: its commands run, its recipe is the one that is written, and what it counts is counted."""

import os
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "README.md").read_text()
COMMANDS = [
    line.partition("  #")[0].strip()
    for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.M | re.S)
    for line in block.splitlines()
]
FAMILIES = ROOT / "engines" / "models" / "families"
SMALL = "--steps 1 --actor.ranks 1 --prompts-per-step 2 --samples-per-prompt 2 --data.max-prompt-tokens 192 "
SMALL += "--rollout.max-new-tokens 16 --rollout.max-model-len 256 --rollout.kv-cache-mb 64 --rollout.max-num-seqs 8"
"""Sizes for the tiny model of two layers and 256 positions."""


def test_it_is_short_and_its_picture_small():
    assert PAGE.count("\n") <= 120
    (picture,) = re.findall(r"!\[[^\]]*\]\((.*?)\)", PAGE)
    assert 10_000 < (ROOT / picture).stat().st_size <= 150_000


def test_it_shows_the_recipe_that_new_writes():
    (recipe,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    assert len(recipe.splitlines()) <= 12
    written = (files("rlworker.data.starters") / "templates" / "text.py.txt").read_text("utf-8")
    assert written.endswith(recipe) and recipe.startswith("def reward(")


def test_its_families_are_counted():
    """Every room of families has a row with their number and their names."""
    counts = {room.name: len(list(room.glob("[!_]*.py"))) for room in FAMILIES.iterdir() if room.is_dir()}
    counts.pop("__pycache__", None)
    assert f"| {sum(counts.values())} families |" in PAGE
    rows = re.findall(r"^\| (\d+) (of text|with experts|that see): (.*?) \|", PAGE, re.M)
    assert {kind: (int(number), len(names.split(", "))) for number, kind, names in rows} == {
        kind: (counts[room],) * 2
        for kind, room in (("of text", "text"), ("with experts", "experts"), ("that see", "images"))
    }


def test_it_names_every_page():
    pages = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert pages <= set(re.findall(r"\(docs/([\w.]+\.md)\)", PAGE))


def test_its_commands_are_those_that_are_run():
    """A command that is added is run below, or said here to be run otherwise."""
    assert [command.split()[1] for command in COMMANDS if command.startswith("bash")] == [
        "scripts/demo.sh",
        "scripts/test.sh",  # this
    ]
    assert len(COMMANDS) == 8


@pytest.mark.large
@pytest.mark.product
@pytest.mark.timeout(900)
def test_its_commands_run(tmp_path):
    """In order, in a folder with the project's packages; FOLDER is the tiny model that the recipe's trial left."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    (tmp_path / ".venv").symlink_to(ROOT / ".venv")
    for command in COMMANDS:
        small = command.replace("FOLDER", "mine/run_smoke/model")
        if command.startswith("bash scripts/test.sh"):
            continue
        if command.startswith("bash scripts/demo.sh"):
            small = f"cd {ROOT} && {command} --smoke --run-dir {tmp_path}/demo"
        if command.endswith("recipe.py --model FOLDER"):
            small += f" {SMALL}"
        if " plan " in command:
            small += f" {SMALL}"
        done = subprocess.run(["bash", "-euc", small], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{small}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert (tmp_path / "mine" / "run_smoke" / "run" / "report.html").is_file()
    assert (tmp_path / "mine" / "run" / "checkpoints").is_dir() and (tmp_path / "demo" / "report.html").is_file()
    shutil.rmtree(tmp_path / "demo")
