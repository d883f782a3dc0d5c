"""docs/glossary.md: each word has its home, and eight of them have it to themselves."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("hardware", "engines", "rlworker", "recipes")
ALONE = ("loss", "advantage", "mask", "packing", "weight sync", "checkpoint", "family", "platform")
"""Words that stand in the name of their home alone."""


def glossary(page: str) -> dict[str, list[str]]:
    """Read the table: word -> its home, and the parts of it. A word that stands twice raises."""
    found: dict[str, list[str]] = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and (homes := re.findall(r"`([^`]+)`", cells[2])):
            assert cells[0] not in found, f"{cells[0]} has two meanings"
            found[cells[0]] = homes
    return found


HOMES = glossary((ROOT / "docs" / "glossary.md").read_text())


def stem(word: str) -> str:
    """What names of files have of a word: ``famil`` of family and families, ``pack`` of packing and packs."""
    return re.sub(r"(ing|y)$", "", word).replace(" ", "_")


def is_at_home(path: str, word: str, homes: list[str]) -> bool:
    """Whether a path is a word's home, a part of it or in it; a folder's path ends in a slash."""
    if word == "platform" and re.fullmatch(r"hardware/\w+/platform\.py", path):
        return True
    return any(path == home or (home.endswith("/") and path.startswith(home)) for home in homes)


def strangers(word: str, homes: list[str], paths: list[str]) -> list[str]:
    """List the paths that have a word in the last part of their name and are not at its home."""
    named = [path for path in paths if stem(word) in path.rstrip("/").rpartition("/")[2]]
    return [path for path in named if not is_at_home(path, word, homes)]


def every_path() -> list[str]:
    """Files under the four packages, and the folders that they are in with a slash at their end."""
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*") if path.is_file()]
    files = [path.relative_to(ROOT) for path in files if "__pycache__" not in path.parts]
    return [*map(str, files), *{f"{folder}/" for file in files for folder in file.parents}]


@pytest.mark.parametrize("word", HOMES)
def test_each_word_has_its_home(word):
    for home in HOMES[word]:
        path = ROOT / home
        assert path.is_dir() if home.endswith("/") else path.is_file(), home
        assert home.split("/")[0] in PACKAGES


@pytest.mark.parametrize("word", ALONE)
def test_eight_words_have_their_home_to_themselves(word):
    assert word in HOMES
    assert not strangers(word, HOMES[word], every_path())


def test_a_stranger_is_found():
    paths = [
        "engines/models/family.py",
        "engines/models/families/",
        "engines/families.py",
        "engines/megatron/layout.py",
    ]
    assert strangers("family", ["engines/models/"], paths) == ["engines/families.py"]
    assert strangers("packing", ["engines/megatron/layout.py"], ["engines/packs/", "engines/megatron/layout.py"])
    platforms = ["hardware/platform.py", "hardware/npu/platform.py", "rlworker/platform.py"]
    assert strangers("platform", ["hardware/platform.py"], platforms) == ["rlworker/platform.py"]


def test_the_glossary_stays_small_enough_to_read():
    assert list(HOMES) == sorted(HOMES, key=str.lower)
    assert len(ALONE) < len(HOMES) <= 50
