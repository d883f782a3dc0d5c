"""What pages say of the tree is so: paths that they name, and tables that repeat what code has."""

import re
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from engines.probes.faults import FAULTS

ROOT = Path(__file__).parents[2]
NAMES = ("architecture", "ascend", "cuda", "episodes", "from_verl", "masks", "metrics", "models", "vlm")
PAGES = ("CONTRIBUTING.md", *(f"docs/{name}.md" for name in NAMES))
TOPS = ("hardware", "engines", "rlworker", "recipes", "tests", "scripts", "docs", "requirements", "docker")
PLACEHOLDER = re.compile(r"\b[A-Z]+\b")
"""Such as NAME in ``hardware/NAME/platform.py``."""
OTHER_OPTIONS = {
    "name",
    "check",
    "fast",
    "kills",
    "list",
    "memory-gb",
    "stops",
    "timeout",
    "npu",
    "only",
    "help",
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
    from recipes.common.plays import PlayConfig
    from recipes.common.smoke import SftVlmRecipeConfig, VlmRecipeConfig
    from recipes.demos.cpu import DemoConfig
    from rlworker.checks.config import CheckConfig

    return set().union(*map(options, (VlmRecipeConfig, SftVlmRecipeConfig, DemoConfig, PlayConfig, CheckConfig)))


@pytest.mark.parametrize("page", PAGES)
def test_every_option_on_a_page_is_a_setting(page, every_option):
    if page == "docs/from_verl.md" and "actor.optimizer.lr" not in every_option:
        pytest.skip("the page has the optimizer's keys in a section of their own, which the settings lack")
    named = set(re.findall(r"(?<![\w-])--([a-z][\w.-]*\w)", (ROOT / page).read_text()))
    assert named - every_option - OTHER_OPTIONS == set()


def test_the_self_test_is_told_fault_by_fault():
    page = (ROOT / "docs" / "masks.md").read_text().partition("## The self-test")[2].partition("## Faults of")[0]
    told = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", page, re.M)[1:])
    assert told == {name: fault.found_by for name, fault in FAULTS.items()}
    assert "Thirty faults" in page and len(FAULTS) == 30


def test_the_emulator_has_as_many_requirements_as_the_page_says():
    from hardware.npu.emulator.contract import REQUIREMENTS

    assert f"lists {len(REQUIREMENTS)} requirements" in (ROOT / "docs" / "ascend.md").read_text()


def test_the_page_on_cuda_has_every_requirement_by_name():
    from hardware.cuda.emulator.contract import REQUIREMENTS

    page = (ROOT / "docs" / "cuda.md").read_text()
    table = page.partition("## The contract")[2].partition("\n- ")[0]
    rows = [row.split(" | ") for row in re.findall(r"^\| (.+) \|$", table, re.M)[1:]]
    told = {name: sentence for names, _, sentence in rows for name in names.split(", ")}
    assert told.keys() == {requirement.name for requirement in REQUIREMENTS}
    assert f"has {len(REQUIREMENTS)} requirements" in page
    for requirement in REQUIREMENTS:
        assert told[requirement.name].startswith("silent" if requirement.silent else "refused"), requirement.name


@pytest.mark.parametrize("file", sorted((ROOT / "docker").iterdir()), ids=lambda path: path.name)
def test_an_image_copies_what_is_there_and_says_that_nobody_built_it(file):
    text = file.read_text()
    sources = [words[1] for words in map(str.split, text.splitlines()) if words[:1] == ["COPY"]]
    assert len(sources) == 2 and all((ROOT / source).exists() for source in sources)
    assert "UNTESTED" in text.splitlines()[0] and f"docker/{file.name}" in text
