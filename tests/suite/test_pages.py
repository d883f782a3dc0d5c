"""Everything that a page says of the tree is there: paths, modules, options, links, messages, tables of code."""

import re
from functools import cache
from inspect import signature
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
)
FLOORS = ("hardware", "engines", "rlworker", "recipes")
TOPS = (*FLOORS, "tests", "scripts", "docs", "requirements", "docker")
PLACEHOLDER = re.compile(r"\b[A-Z]+\b")
"""A word such as NAME in ``hardware/NAME/platform.py``."""
FOREIGN = re.compile(
    r"^.*(?:srun |ray start|docker |vllm serve|#SBATCH|\bpip |-m pytest ).*$|`[^`]*(?:ray start|tool-call)[^`]*`", re.M
)
"""Commands of other programs, with options of their own."""


def paths_in(page: str) -> set[str]:
    """Find the paths of the tree that a page names; modules after ``-m`` and those of recipes count as files."""
    named = re.findall(rf"(?<![\w/.])(?:{'|'.join(TOPS)})/[\w/.-]*\w/?", page)
    modules = re.findall(r"-m ((?:recipes|tests|rlworker)[\w.]*)", page) + re.findall(r"\brecipes(?:\.[a-z]\w*)+", page)
    named += [path if (ROOT / (path := module.replace(".", "/"))).is_dir() else f"{path}.py" for module in modules]
    return {path for path in named if not PLACEHOLDER.search(path)}


@pytest.mark.parametrize("page", PAGES)
def test_every_path_and_command_on_a_page_exists(page):
    assert {path for path in paths_in((ROOT / page).read_text()) if not (ROOT / path).exists()} == set()


def test_a_path_that_is_not_there_is_found():
    page = "See `rlworker/base/errors.py`, `hardware/NAME/platform.py`, [docs](docs/no.md), `torch/nn.py`, recipes.a.b."
    assert paths_in(page) == {"rlworker/base/errors.py", "docs/no.md", "recipes/a/b.py"}
    assert paths_in("python -m recipes.demo_cpu; python scripts/no.py") == {"recipes/demo_cpu.py", "scripts/no.py"}


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_every_page_opens_with_a_command_or_a_table(page):
    title, blank, first, *_ = page.read_text().splitlines()
    assert title.startswith("# ") and not blank and first.startswith(("```", "|"))


@cache
def anchors(page: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.M | re.S), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: str, text: str) -> set[str]:
    broken = set()
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        if not file.exists() or (anchor and anchor not in anchors(str(file.resolve().relative_to(ROOT.resolve())))):
            broken.add(target)
    return broken


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_somewhere(page):
    assert broken_links(page, (ROOT / page).read_text()) == set()


def test_a_broken_link_is_found():
    text = "[a](masks.md#the-table) [b](masks.md#no) [c](no.md) [d](../README.md) [e](https://a.b/c) [f](#no)"
    assert broken_links("docs/masks.md", text) == {"masks.md#no", "no.md", "#no"}


@cache
def known_options() -> frozenset[str]:
    """Name every setting, as the generated page lists them, every option that a script's own text has, and the
    arguments of the commands of ``rlworker``."""
    import rlworker.__main__ as commands

    settings = re.findall(r"^\| `--([\w.-]+)` \|", (ROOT / "docs/configuration.md").read_text(), re.M)
    files = [*(ROOT / "scripts").rglob("*.*"), *(ROOT / "tests").glob("*.py"), *(ROOT / "tests/support").rglob("*.py")]
    files += [ROOT / "rlworker/__main__.py", *(ROOT / "recipes").rglob("*.py")]
    texts = [file.read_text() for file in files if file.suffix in (".py", ".sh")]
    own = [option for text in texts for option in re.findall(r"(?<![\w-])--([a-z][a-z-]*)", text)]
    own += [
        name.replace("_", "-")
        for command in (commands.report, commands.compare, commands.new)
        for name in signature(command).parameters
    ]
    return frozenset({*settings, *own, "help", "resume"} | {f"no-{name}" for name in settings})


@pytest.mark.parametrize("page", PAGES)
def test_every_option_on_a_page_is_a_setting(page):
    text = FOREIGN.sub("", (ROOT / page).read_text())
    sections = {name.partition(".")[0] for name in known_options() if "." in name}
    named = set(re.findall(r"(?<![\w-])--([a-z][\w.-]*\w)", text))
    named = {re.sub(r"^models\.\w+\.", "models.NAME.", name) for name in named}  # a name is the user's own
    assert named - known_options() - sections == set()


@cache
def read_code() -> str:
    sources = (path.read_text() for top in FLOORS for path in sorted((ROOT / top).rglob("*.py")))
    return "\n".join(re.sub(r"([\"'])\n\s*f?\1", "", source) for source in sources)


def is_in_code(message: str) -> bool:
    """Tell whether a line of the code has the parts of a message between its ``…`` in their order."""
    first, *rest = (re.escape(part.strip()) for part in message.split("…"))
    return bool(re.search(first + "".join(f"[^\n]*{part}" for part in rest), read_code()))


def messages_in(page: str) -> list[str]:
    tables = re.findall(r"^\| message contains \|.*\n\|[-|]+\n((?:\|.*\n?)+)", page, re.M)
    return [m for table in tables for row in table.splitlines() for m in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


@pytest.mark.parametrize(("page", "count"), [("docs/troubleshooting.md", 40), ("docs/data.md", 14)])
def test_every_message_on_a_page_is_in_the_code(page, count):
    messages = messages_in((ROOT / page).read_text())
    assert len(messages) >= count
    assert [message for message in messages if not is_in_code(message)] == []


def test_a_message_that_is_not_in_the_code_is_found():
    page = "| message contains | do |\n|---|---|\n| `nobody … wrote this`, `rows were given` | - |\n"
    assert messages_in(page) == ["nobody … wrote this", "rows were given"]
    assert [is_in_code(message) for message in messages_in(page)] == [False, True]


def test_every_argument_that_the_page_of_limits_calls_refused_is_refused():
    rows = re.findall(
        r"^\| [^|]+ \| (?:[^|]*is )?refused: ([^|]+) \|$", (ROOT / "docs" / "limits.md").read_text(), re.M
    )
    named = {name for row in rows for name in re.findall(r"`([a-z]\w+)`", row)}
    texts = (ROOT / "engines/pass_through.py").read_text() + "".join(
        path.read_text() for path in sorted((ROOT / "engines/config").glob("*.py"))
    )
    assert len(named) >= 13 and {name for name in named if not re.search(rf"\b{name}\b", texts)} == set()


def test_the_self_test_is_told_fault_by_fault():
    from engines.probes.faults import FAULTS

    page = (ROOT / "docs" / "masks.md").read_text().partition("## The self-test")[2].partition("## Faults of")[0]
    told = dict(re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", page, re.M)[1:])
    assert told == {name: fault.found_by for name, fault in FAULTS.items()}
    assert "Sixty-four faults" in page and len(FAULTS) == 64


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
