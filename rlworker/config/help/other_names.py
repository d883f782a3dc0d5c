"""Settings by their names in verl and TRL, as docs/from_verl.md has them; ``from_verl.md`` here is a link to it."""

import re
import sys
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

PAGE = Path(__file__).with_name("from_verl.md")
_HEAD = re.compile(r"\| (verl|TRL) \| here \| differs \|")
_SECTION = re.compile(r"[a-z_]+(\.[a-z_]+)*")
"""A heading that is the section of the keys below it."""


class Counterpart(NamedTuple):
    """A setting of another library, and its counterpart here.

    Attributes:
        section: of the key, empty for none. key: where ``*`` is any text. here: an option, or a function of a recipe;
            empty where there is neither. remark: the difference, or the reason and the remedy where there is neither.
    """

    section: str
    key: str
    here: str
    remark: str

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}".lstrip(".")


def read_counterparts(page: str) -> list[Counterpart]:
    """Read the tables of settings on a page: those whose head names a library, ``verl`` or ``TRL``."""
    found: list[Counterpart] = []
    headings, is_read = {}, False
    for line in page.splitlines():
        if heading := re.fullmatch(r"(#+) (.*)", line):
            level = len(heading[1])
            headings = {other: text for other, text in headings.items() if other < level} | {level: heading[2]}
        is_head = bool(_HEAD.fullmatch(line))
        is_read = is_head or (is_read and line.startswith("|"))
        if is_read and not is_head and not line.startswith("|-"):
            keys, here, remark = line[1:-1].split(" | ")
            section = ".".join(text for text in headings.values() if _SECTION.fullmatch(text))
            for key in re.findall(r"`([^`:]+)(?::[^`]*)?`", keys):
                found.append(Counterpart(section, key, _strip_markup(here), _strip_markup(remark)))
    return found


def _strip_markup(cell: str) -> str:
    """Strip a cell of the page of its markup: a dash of nothing goes, and a link becomes its text and its page."""
    cell = re.sub(r"\[([^]]*)\]\((#[^)]*)\)", r"\1 (docs/from_verl.md\2)", cell)
    cell = re.sub(r"\[[^]]*\]\((\w+\.md[^)]*)\)", r"docs/\1", cell)
    return re.sub(r"\*(\w+)\*", r"\1", cell.replace("`", "")).strip(" \u2013")


def find_counterparts(name: str, counterparts: Sequence[Counterpart]) -> list[Counterpart]:
    """Find the settings that someone may mean by a name: with its whole section, a part of it, none or another one."""
    last = name.rpartition(".")[2]
    rules = (
        lambda other: fnmatchcase(name, other.name),
        lambda other: other.name.endswith(f".{name}"),
        lambda other: not other.key.isalpha() and fnmatchcase(name, f"*.{other.key}"),  # "lr" alone says too little
        lambda other: "_" in last and other.name.rpartition(".")[2] == last,
    )
    return next((found for rule in rules if (found := [other for other in counterparts if rule(other)])), [])


def refuse_other_names(unknown: Sequence[tuple[str, str]], own: Collection[str]) -> None:
    """End the program where its command line has settings of verl or TRL, with their counterparts here.

    Args:
        unknown: word and name of each setting that is none of the program's. own: the program's options, such as
            ``--actor.tp``.
    """
    counterparts, told = read_counterparts(PAGE.read_text(encoding="utf-8")), []
    for word, name in unknown:
        for other in find_counterparts(name.replace("-", "_"), counterparts):
            options = {*re.findall(r"--([a-z][\w.-]*)", other.here)}
            here = other.here or "no option"
            here += " (of RL recipes)" if options and not {f"--{option}" for option in options} & {*own} else ""
            if name.replace("_", "-") in options:  # verl calls it so too
                here = "an option of RL recipes, which this one has no use for"
            told.append(f"  {word.partition('=')[0]}: {here}. {other.remark}".rstrip())
    if told:
        sys.exit(
            "error: settings of verl or TRL, and those in their place here (docs/from_verl.md):\n" + "\n".join(told)
        )
