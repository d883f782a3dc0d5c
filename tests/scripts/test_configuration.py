"""docs/configuration.md has the settings as they are."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
from annotated_types import Ge

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def configuration():
    sys.path.insert(0, str(ROOT / "scripts" / "pages"))
    import configuration

    sys.path.pop(0)
    return configuration


@dataclass(frozen=True)
class _Inner:
    """Inner settings."""

    kind: Literal["a", "b"] = "a"
    """Kind of it."""


@dataclass(frozen=True)
class _Outer:
    size: Annotated[int, Ge(1)] = 3
    """Size of it,
    in metres."""
    names: tuple[str, ...] = ()
    """Names | others."""
    inner: _Inner = _Inner()


def test_the_page_is_that_of_the_settings(configuration):
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == configuration.write_page(), "run python scripts/pages/configuration.py"
    assert "| `--actor.tp` | a whole number, at least 1 | `1` |" in page


def test_every_setting_has_a_meaning(configuration):
    rows = [row for row in configuration.write_page().splitlines() if row.startswith("| `--")]
    assert len(rows) > 90 and [row for row in rows if row.endswith("|  |")] == []


def test_a_table_has_type_default_and_meaning_of_each_setting(configuration):
    table, heading, doc, inner = configuration.write_tables(_Outer(), "", set())
    assert table.splitlines()[2:] == [
        "| `--size` | a whole number, at least 1 | `3` | Size of it, in metres. |",
        r"| `--names` | a list (text) | empty | Names \| others. |",
    ]
    assert (heading, doc) == ("### inner", "Inner settings.")
    assert inner.splitlines()[2:] == ["| `--inner.kind` | one of 'a', 'b' | `a` | Kind of it. |"]
