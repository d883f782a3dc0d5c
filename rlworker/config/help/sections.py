"""Show help about settings, one section at a time."""

import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import field, fields, is_dataclass, make_dataclass
from functools import partial
from typing import Annotated, Any, get_type_hints

import tyro

from engines.validation import collect_bounds, spell_bounds


def show_help(parse: partial, default: Any, following: Sequence[str]) -> None:
    """Print help and end the program.

    The help is about the section that the first of the ``following`` words names, or else about the settings without a
    section, with a list of all sections.
    """
    sections = {f.name: getattr(default, f.name) for f in fields(default)}
    models = {name: next(iter(value.values())) for name, value in sections.items() if name == "models"}  # any of them
    sections = {name: value for name, value in sections.items() if is_dataclass(value)} | models
    section = next((word for word in following[:1] if not word.startswith("-")), "")
    if section and section not in sections:
        sys.exit(f"error: --help {section}: there is no such section; take one of {', '.join(sections)}")
    hidden = {f.name for f in fields(default)} - {section} if section else sections.keys()
    with suppress(SystemExit):
        parse(_make_help_class(default, hidden), args=["--help"])
    if not section:
        print("sections, whose options --help SECTION shows, such as --help actor:")
        for name, value in sections.items():
            print(f"  {name:12s}{' '.join((type(value).__doc__ or '').split())}")
    sys.exit(0)


def _make_help_class(default: Any, hidden: Collection[str] = ()) -> type:
    """Make a placeholder of a config's class, from which help is drawn: defaults as given, with their bounds."""
    kinds, shown = get_type_hints(type(default), include_extras=True), []
    for name, kind in ((f.name, kinds[f.name]) for f in fields(default)):
        make = partial(getattr, default, name)
        if name in hidden:
            kind = tyro.conf.Suppress[kind]
        elif is_dataclass(make()):
            kind = make = _make_help_class(make())
        elif bounds := collect_bounds(kind):
            text = f"(default: {{}}; {spell_bounds(bounds)})"
            kind = Annotated[kind, tyro.conf.arg(help_behavior_hint=text.format)]
        shown.append((name, kind, field(default_factory=make)))
    name, bases, namespace = type(default).__name__, (type(default),), {"__doc__": type(default).__doc__}
    return make_dataclass(name, shown, bases=bases, namespace=namespace, frozen=True)
