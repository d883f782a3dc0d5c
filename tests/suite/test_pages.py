"""What pages say of the tree is so: paths that they name, and tables that repeat what code has."""

import re
from pathlib import Path

import pytest

from engines.probes.faults import FAULTS

ROOT = Path(__file__).parents[2]
PAGES = ("CONTRIBUTING.md", *(f"docs/{name}.md" for name in ("architecture", "ascend", "masks", "metrics", "vlm")))
TOPS = ("hardware", "engines", "rlworker", "recipes", "tests", "scripts", "docs", "requirements")
PLACEHOLDER = re.compile(r"\b[A-Z]+\b")
"""Such as NAME in ``hardware/NAME/platform.py``."""


def paths_in(page: str) -> set[str]:
    """Paths of the tree that a page names, in code or as the target of a link from the root."""
    named = re.findall(rf"(?<![\w/.])(?:{'|'.join(TOPS)})/[\w/.-]*\w/?", page)
    return {path for path in named if not PLACEHOLDER.search(path)}


@pytest.mark.parametrize("page", PAGES)
def test_every_path_on_a_page_exists(page):
    named = paths_in((ROOT / page).read_text())
    assert {path for path in named if not (ROOT / path).exists()} == set()


def test_a_path_that_is_not_there_is_found():
    page = "See `rlworker/cli.py`, `hardware/NAME/platform.py`, [docs](docs/no.md) and `torch/nn/functional.py`."
    assert paths_in(page) == {"rlworker/cli.py", "docs/no.md"}


def test_the_self_test_is_told_fault_by_fault():
    page = (ROOT / "docs" / "masks.md").read_text().partition("## The self-test")[2]
    told = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", page, re.M)[1:])
    assert told == {name: fault.found_by for name, fault in FAULTS.items()}
    assert "Twenty faults" in page and len(FAULTS) == 20


def test_the_emulator_has_as_many_requirements_as_the_page_says():
    from hardware.npu.emulator.contract import REQUIREMENTS

    assert f"lists {len(REQUIREMENTS)} requirements" in (ROOT / "docs" / "ascend.md").read_text()
