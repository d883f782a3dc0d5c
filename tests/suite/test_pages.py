"""What pages say of the tree is so: paths that they name, and tables that repeat what code has."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from engines.probes.faults import FAULTS

ROOT = Path(__file__).parents[2]
NAMES = ("architecture", "ascend", "from_verl", "masks", "metrics", "vlm")
PAGES = ("CONTRIBUTING.md", *(f"docs/{name}.md" for name in NAMES))
TOPS = ("hardware", "engines", "rlworker", "recipes", "tests", "scripts", "docs", "requirements")
PLACEHOLDER = re.compile(r"\b[A-Z]+\b")
"""Such as NAME in ``hardware/NAME/platform.py``."""
OTHER_OPTIONS = {
    "costs",
    "measured",
    "name",
    "check",
    "fast",
    "kills",
    "list",
    "memory-gb",
    "stops",
    "write",
    "algorithm",
}
"""What stands after two dashes and is no setting: options of scripts, and a section."""


def paths_in(page: str) -> set[str]:
    """Paths of the tree that a page names, those of recipes as modules too, such as ``recipes.grpo``."""
    named = re.findall(rf"(?<![\w/.])(?:{'|'.join(TOPS)})/[\w/.-]*\w/?", page)
    named += [f"{module.replace('.', '/')}.py" for module in re.findall(r"\brecipes(?:\.[a-z]\w*)+", page)]
    return {path for path in named if not PLACEHOLDER.search(path)}


@pytest.mark.parametrize("page", PAGES)
def test_every_path_on_a_page_exists(page):
    named = paths_in((ROOT / page).read_text())
    assert {path for path in named if not (ROOT / path).exists()} == set()


def test_a_path_that_is_not_there_is_found():
    page = (
        "See `rlworker/cli.py`, `hardware/NAME/platform.py`, [docs](docs/no.md), `torch/nn/functional.py`, recipes.a.b."
    )
    assert paths_in(page) == {"rlworker/cli.py", "docs/no.md", "recipes/a/b.py"}


def options(config: type, prefix: str = "") -> set[str]:
    """Spell a config's settings as options, without the dashes before them."""
    kinds, found = get_type_hints(config), set()
    for field in fields(config):
        name = prefix + field.name.replace("_", "-")
        kind = kinds[field.name]
        found |= options(kind, f"{name}.") if is_dataclass(kind) else {name}
    return found


@pytest.fixture(scope="module")
def every_option() -> set[str]:
    from recipes.common.smoke import SftVlmRecipeConfig, VlmRecipeConfig
    from recipes.demos.cpu import DemoConfig
    from rlworker.checks.config import CheckConfig

    return set().union(*map(options, (VlmRecipeConfig, SftVlmRecipeConfig, DemoConfig, CheckConfig)))


@pytest.mark.parametrize("page", PAGES)
def test_every_option_on_a_page_is_a_setting(page, every_option):
    if page == "docs/from_verl.md" and "actor.optimizer.lr" not in every_option:
        pytest.skip("the page has the optimizer's keys in a section of their own, which the settings lack")
    named = set(re.findall(r"(?<![\w-])--([a-z][\w.-]*\w)", (ROOT / page).read_text()))
    assert named - every_option - OTHER_OPTIONS == set()


def test_the_self_test_is_told_fault_by_fault():
    page = (ROOT / "docs" / "masks.md").read_text().partition("## The self-test")[2]
    told = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", page, re.M)[1:])
    assert told == {name: fault.found_by for name, fault in FAULTS.items()}
    assert "Twenty faults" in page and len(FAULTS) == 20


def test_the_emulator_has_as_many_requirements_as_the_page_says():
    from hardware.npu.emulator.contract import REQUIREMENTS

    assert f"lists {len(REQUIREMENTS)} requirements" in (ROOT / "docs" / "ascend.md").read_text()
