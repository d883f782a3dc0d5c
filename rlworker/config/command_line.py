"""Read settings from a command line."""

import argparse
import re
import sys
from collections.abc import Collection, Sequence
from dataclasses import asdict, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import tyro

from engines.config import ServedModelConfig
from engines.validation import option
from hardware.platforms import PLATFORMS
from rlworker.base.errors import show_settings_errors
from rlworker.config.algorithm import Algorithm
from rlworker.config.run import RunConfig, TrainingConfig

show_settings_errors()  # a recipe makes its default settings next

Config = TypeVar("Config")

_MAPPINGS = ("megatron", "vllm", "chat_template_args", "heldout_sets", "sources", "buckets", "teachers")
"""Settings whose value is a mapping."""
_SETTING = re.compile(r"(?:--|\+{1,2})?([a-z][\w.-]*)(=.*)?", re.S)
"""A word of a command line that may set something: ``--name``, ``--name=value``, or verl's ``name=value``."""


def parse_config(
    default: Config, description: str | None = None, args: Sequence[str] | None = None, prog: str | None = None
) -> Config:
    """Read settings from the command line. ``--help`` shows settings without a section, ``--help SECTION`` a section.

    Args:
        default: a frozen dataclass, whose fields that are dataclasses are its sections. Settings that the command line
            does not name keep the default's values, which for a run are first fitted to the named model and platform.
        description: description of the program for ``--help``; None takes the docstring of the default's class.
        args: arguments instead of the program's own. prog: name of the program instead of its file's name.

    Raises:
        SystemExit: help was asked for, or the command line is wrong; the message names the option and a remedy.
    """
    args, switches = sys.argv[1:] if args is None else args, _map_switches(default)
    default = _add_models(default, args)
    own = {*(option("config", key) for key in flatten_config(default)), *switches.values()}
    if unknown := _list_unknown(args, own):
        _import_help().refuse_other_names(unknown, own)
    if ("--evaluate", "evaluate") in unknown and isinstance(default, TrainingConfig):
        sys.exit(
            "error: --evaluate: a recipe of supervised training has no reward to evaluate by; evaluate its checkpoint "
            "by an RL recipe, such as recipes.grpo"
        )
    args = _spell_options(args, switches)
    if isinstance(default, TrainingConfig):
        _refuse_several_sources(args, is_rl=isinstance(default, RunConfig))
        try:
            default = _fit_default(default, args)
        except ValueError as error:
            sys.exit(f"error: {error}")
    parse = partial(tyro.cli, description=description, prog=prog)
    if help_options := {"-h", "--help"} & {*args}:
        if isinstance(default, RunConfig) and not default.models:
            default = replace(default, models={"NAME": ServedModelConfig()})
        _import_help().show_help(parse, default, args[args.index(help_options.pop()) + 1 :])
    return parse(type(default), default=default, args=args)


def _import_help():
    """Import what only a command line needs that asks for help, or is wrong."""
    from rlworker.config import help

    return help


def _add_models(default: Config, args: Sequence[str]) -> Config:
    """Add the served models that a command line names, as in ``--models.NAME.model``, to those of a recipe.

    Raises:
        SystemExit: a name has other characters, or a key is none of a served model.
    """
    if not isinstance(default, RunConfig):
        return default
    names, keys = [], [option("config", each.name)[2:] for each in fields(ServedModelConfig)]
    for word in (word.partition("=")[0] for word in args if word.startswith("--models.")):
        match = re.fullmatch(r"--models\.([A-Za-z0-9_]+)\.([\w-]+)", word)
        if not match or match[2].replace("_", "-") not in keys:
            sys.exit(
                f"error: {word}: expected --models.NAME.KEY, a NAME of letters, digits and underscores, and a KEY of "
                f"{', '.join(keys)}"
            )
        names.append(match[1])
    return replace(default, models={name: ServedModelConfig() for name in names} | default.models)


def _list_unknown(args: Sequence[str], own: Collection[str]) -> list[tuple[str, str]]:
    """List the settings of a command line that are none of the program's options: word and name of each.

    An option without its section is left to the parser.

    Args:
        own: the program's options, such as ``--actor.tp``.
    """
    known = {*own, *(f"--{option.rpartition('.')[2]}" for option in own if "." in option)}
    named = [match for match in map(_SETTING.fullmatch, args) if match]
    named = [match for match in named if match[0].startswith("--") or (match[2] and "." in match[1])]  # else a value
    return [(match[0], match[1]) for match in named if f"--{match[1].replace('_', '-')}" not in known]


def _spell_options(args: Sequence[str], switches: dict[str, str]) -> list[str]:
    """Spell options as tyro has them: with hyphens, and of a switch ``--resume True`` as ``--resume``,
    ``--resume=False`` as ``--no-resume``.

    Args:
        switches: as ``_map_switches``.
    """
    spelled, rest = [], [*args]
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if word.startswith("--"):
            word = (name := name.replace("_", "-")) + equals + value
        if name in switches:
            if not equals and rest and rest[0].lower() in ("true", "false"):
                value = rest.pop(0)
            word = {"true": name, "false": switches[name]}.get(value.lower(), word)
        spelled.append(word)
    return spelled


def _refuse_several_sources(args: Sequence[str], is_rl: bool) -> None:
    """End the program where an option of one source of rows has several, as verl's lists do, and say what to write."""
    for place, word in enumerate(args):
        name, _, value = word.partition("=")
        if name not in ("--data.train", "--data.heldout"):
            continue
        values = [value] if value else []
        for following in args[place + 1 :]:
            if following.startswith("--"):
                break
            values.append(following)
        if len(values) == 1 and values[0].startswith("[") and not Path(values[0]).exists():
            values = re.findall(r"[^\[\],'\"\s]+", values[0])
        if len(values) < 2:
            continue
        others = " ".join(values[1:])
        if name == "--data.heldout":
            remedy = f"name the others as sets: --data.heldout-sets {' '.join(f'SET {each}' for each in values[1:])}"
        elif is_rl:
            shares = " ".join(f"{each} 1" for each in values[1:])
            remedy = f"name the others with their weights: --curriculum.sources {shares}"
        else:
            remedy = "join the files into one"
        sys.exit(
            f"error: {name} takes one source of rows, got {len(values)}: {values[0]} {others}; {remedy}. Parquet files "
            "of a folder are one source: name the folder, or a pattern such as 'FOLDER/*.parquet'"
        )


def _map_switches(config: Any, section: str = "") -> dict[str, str]:
    """Map the option of each switch of a config and its sections to the one that turns it off."""
    kinds, offs = get_type_hints(type(config)), {}
    for name in (f.name for f in fields(config)):
        if is_dataclass(value := getattr(config, name)):
            offs |= _map_switches(value, f"{section}.{name}".lstrip("."))
        elif kinds[name] is bool:
            offs[option(section or "config", name)] = option(section or "config", f"no_{name}")
    return offs


def _fit_default(default: TrainingConfig, args: Sequence[str]) -> TrainingConfig:
    """Fit a recipe's settings to the model, platform and algorithm that the command line names, before the rest of it
    is read.

    A recipe may take sizes from the first two (``TrainingConfig.fit_to_model``, ``move_to_platform``). They are
    defaults like the others, so that a key that the user gives wins over them, and ``--help`` shows them. Parts that a
    recipe sets are of its own algorithm.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("platform", "model", "algorithm.name"):
        parser.add_argument(option("config", name), dest=name.replace(".", "_"), nargs="?")
    named = parser.parse_known_args(args)[0]
    if isinstance(default, RunConfig) and named.algorithm_name:
        no_parts: dict[str, Any] = dict.fromkeys(part.name for part in fields(Algorithm))  # all are those of the name
        default = replace(default, algorithm=replace(default.algorithm, **no_parts))
    default = replace(default, model=named.model or default.model).fit_to_model()
    name = named.platform
    is_another = name in PLATFORMS and name != default.platform  # a wrong name is reported when all options are read
    return default.move_to_platform(name) if is_another else default


def flatten_config(config: Any) -> dict[str, Any]:
    """Return a config as dotted key -> value: ``{"steps": 100, "actor.tp": 1, "actor.optimizer.lr": 1e-6, ...}``."""
    return flatten(asdict(config))


def flatten(settings: dict, prefix: str = "") -> dict[str, Any]:
    """Return nested settings as dotted key -> value; a setting whose value is a mapping counts as one value."""
    flat = {}
    for key, value in settings.items():
        nested = isinstance(value, dict) and key not in _MAPPINGS
        flat |= flatten(value, f"{prefix}{key}.") if nested else {prefix + key: value}
    return flat
