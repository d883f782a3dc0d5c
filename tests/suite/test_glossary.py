"""docs/glossary.md: each term has one meaning, in a whole sentence, and a home that is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("hardware", "engines", "rlworker", "recipes")
FIELD = (
    "advantage estimator",
    "environment",
    "KV cache",
    "micro-batch",
    "offload",
    "on-policy",
    "replica",
    "rollout",
    "tool call",
    "trajectory",
    "turn",
)
"""Terms that a reader of the field looks for."""


def read_glossary(page: str) -> dict[str, tuple[str, list[str]]]:
    """Read the table: word -> its meaning and its homes. A word that stands twice raises."""
    found: dict[str, tuple[str, list[str]]] = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and (homes := re.findall(r"`([^`]+)`", cells[2])):
            assert cells[0] not in found, f"{cells[0]} has two meanings"
            found[cells[0]] = cells[1], homes
    return found


WORDS = read_glossary((ROOT / "docs" / "glossary.md").read_text())


@pytest.mark.parametrize("word", WORDS)
def test_each_word_has_a_meaning_and_a_home(word):
    meaning, homes = WORDS[word]
    assert meaning[0].isupper() and meaning.endswith(".")
    for home in homes:
        path = ROOT / home
        assert path.is_dir() if home.endswith("/") else path.is_file(), home
        assert home.split("/")[0] in PACKAGES


def test_a_word_with_two_meanings_is_found():
    row = "| turn | One sample. | `rlworker/__main__.py` |"
    assert read_glossary(row) == {"turn": ("One sample.", ["rlworker/__main__.py"])}
    with pytest.raises(AssertionError, match="turn has two meanings"):
        read_glossary(f"{row}\n{row}")


def test_the_glossary_has_the_terms_of_the_field_and_stays_small_enough_to_read():
    assert set(FIELD) <= set(WORDS)
    assert list(WORDS) == sorted(WORDS, key=str.lower)
    assert len(WORDS) <= 60
