"""Write docs/configuration.md from the settings: the data classes that ``--help`` reads.

python scripts/pages/configuration.py            # write the page
python scripts/pages/configuration.py --check    # exit status 1 where the page differs from the settings
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from tyro.conf import Positional

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from engines.validation import collect_bounds, option, spell, spell_bounds  # noqa: E402
from recipes.common.smoke import RecipeConfig, VlmRecipeConfig  # noqa: E402
from recipes.common.worked_episodes import EpisodeToyConfig  # noqa: E402
from recipes.demos.cpu import DemoConfig  # noqa: E402
from recipes.demos.states import StateConfig  # noqa: E402
from rlworker.checks.config import BisectConfig, CheckConfig  # noqa: E402
from rlworker.config.run import RunConfig, TrainingConfig  # noqa: E402
from rlworker.config.sft import SftConfig  # noqa: E402

PAGE = ROOT / "docs" / "configuration.md"
HEADER = """# Configuration

```
.venv/bin/python -m recipes.grpo --help                 # settings without a section, and sections
.venv/bin/python -m recipes.grpo --help actor           # a section
.venv/bin/python scripts/pages/configuration.py         # writes this page; a test compares it
```

- A setting is a field of a data class in a recipe, and an option on its command line:
  `DataConfig(train=...)` is `--data.train`.
- A switch is turned on by `--resume` or `--resume True`, and off by `--no-resume` or
  `--resume False`.
- A list takes words with blanks between them: `--trackers wandb tensorboard`. A mapping takes keys
  and values in turn: `--rollout.vllm enforce_eager True`.
- A recipe may have other defaults than this page. `--help` shows the recipe's own.
- A setting's name in verl or TRL is answered with ours, from [from_verl.md](from_verl.md).
- Settings, folders and the fields of rows are checked before Ray, Megatron or vLLM starts.
- Tokens of prompts, chat templates and images are checked as rows are read, and so are the options
  of your own functions. In RL this happens beside the start of Ray, so `Ray is up` may be printed
  before. No engine loads a model until all of this is checked.
"""
GROUPS: tuple[tuple[str, type, type | None], ...] = (
    ("Every run that trains", TrainingConfig, None),
    ("Runs of RL", RunConfig, TrainingConfig),
    ("Supervised runs", SftConfig, TrainingConfig),
    ("Recipes for real models", RecipeConfig, RunConfig),
    ("Recipes for models that see images", VlmRecipeConfig, RecipeConfig),
    ("Demos", DemoConfig, RunConfig),
    ("The demo of a model with states", StateConfig, DemoConfig),
    ("Demos with several turns", EpisodeToyConfig, DemoConfig),
    ("rlworker check", CheckConfig, None),
    ("rlworker bisect", BisectConfig, None),
)
"""Title of a group of tables, its class, and a class whose fields stand in an earlier group, unless of another type."""


@cache
def read_field_docs(config: type) -> dict[str, str]:
    """Read the docstring below each field that a data class itself declares: name -> text on one line."""
    if not is_dataclass(config):
        return {}
    tree = ast.parse(inspect.getsource(sys.modules[config.__module__]))
    body = next(n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == config.__name__)
    docs = {}
    for line, following in zip(body, body[1:]):
        match line, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = " ".join(text.split())
    return docs


def find_doc(config: type, name: str) -> str:
    """Find the docstring of a field in the class or in the classes that it extends; empty where none has one."""
    return next((docs[name] for base in config.__mro__ if name in (docs := read_field_docs(base))), "")


def spell_type(kind: Any) -> str:
    """Spell a field's type with its bounds: ``a whole number, at least 1``."""
    bounds = collect_bounds(kind)
    text = spell(kind).replace("null", "none")
    if get_origin(kind) is tuple and get_args(inner := get_args(kind)[0]):
        is_choice = get_origin(inner) is Literal
        text = f"a list of {', '.join(map(repr, get_args(inner))) if is_choice else f'items, each {spell_type(inner)}'}"
    return f"{text}, {spell_bounds(bounds)}" if bounds else text


def spell_default(value: Any) -> str:
    """Spell a default as code; an empty text, list or mapping is "empty"."""
    if value in ("", (), {}):
        return "empty"
    return f"`{value}`"


def get_default(field: Field) -> Any:
    return field.default_factory() if field.default_factory is not MISSING else field.default


def write_tables(config: Any, section: str, left_out: set[str]) -> Iterator[str]:
    """Write the table of a section's own settings, then those of the sections within it."""
    kinds, rows, inner = get_type_hints(type(config), include_extras=True), [], []
    for field in fields(config):
        if field.name in left_out:
            continue
        name, value = field.name, getattr(config, field.name)
        if is_dataclass(value):
            inner.append((f"{section}.{name}".lstrip("."), value))
            continue
        if get_origin(kinds[name]) is dict and is_dataclass(make := get_args(kinds[name])[1]):
            inner.append((f"{name}.NAME", make()))
            continue
        is_first_word = Positional in getattr(kinds[name], "__metadata__", ())
        spelled = f"{name.upper()}, the first word" if is_first_word else f"`{option(section or 'config', name)}`"
        doc = find_doc(type(config), name)
        cells = (spelled, spell_type(kinds[name]), spell_default(value), doc.replace("|", r"\|"))
        rows.append("| " + " | ".join(cells) + " |")
    if rows:
        yield "\n".join(["| option | type | default | meaning |", "|---|---|---|---|", *rows])
    for name, value in inner:
        yield f"### {name}"
        yield textwrap.fill(" ".join((type(value).__doc__ or "").split()), 100)
        yield from write_tables(value, name, set())


def write_page() -> str:
    """Write the whole page: a heading and its tables for each group of settings."""
    parts = [HEADER.rstrip()]
    for title, config, earlier in GROUPS:
        default = config()
        kinds, others = (get_type_hints(each, include_extras=True) if each else {} for each in (config, earlier))
        known = {name for name, kind in others.items() if kinds.get(name) == kind}
        if config in (CheckConfig, BisectConfig):  # its engines have the settings of a run's
            known = {f.name for f in fields(default) if is_dataclass(getattr(default, f.name))}
        parts += [f"## {title}", *write_tables(default, "", known)]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    page = write_page()
    if sys.argv[1:] == ["--check"]:
        is_stale = PAGE.read_text(encoding="utf-8") != page
        if is_stale:
            print(f"{PAGE} differs from the settings; run python scripts/pages/configuration.py", file=sys.stderr)
        return int(is_stale)
    PAGE.write_text(page, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
