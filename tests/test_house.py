"""The rules of the house: imports run down and in no circle, rooms stay small, hardware is named in hardware/ alone."""

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from support.suite.imports import ROOT, TESTS, files_of, imported, names, parse
from support.suite.prose import count_words, find_long_lines, split_sentences

from hardware.platforms import PLATFORMS

FLOORS = {"hardware": 0, "engines": 1, "rlworker": 2, "recipes": 3}
HARDWARE_WORD = re.compile(r"(cuda|npu|nccl|hccl|ascend)(:.*)?", re.I)
SOURCES = sorted(path for package in FLOORS for path in (ROOT / package).rglob("*.py"))
OTHERS = [path for path in SOURCES if path.relative_to(ROOT).parts[0] != "hardware"]
"""Sources that know no platform."""


def test_imports_run_down():
    for path in SOURCES:
        package = path.relative_to(ROOT).parts[0]
        tops = {name.split(".")[0] for name in imported(path, types=True)}
        assert not {top for top in tops if FLOORS.get(top, -1) > FLOORS[package]}, path
        assert package in ("rlworker", "recipes") or "ray" not in tops, path


NAMES_OF_PLATFORMS = {
    # torch's kind of device, where no platform is asked.
    ("engines/megatron/memory/offload.py", "cpu"),
    ("engines/megatron/layout.py", "cpu"),
    # Seconds of a processor.
    ("scripts/bench/step.py", "cpu"),
}
"""Files outside hardware/ that may say a word which is a platform's name as well."""


def test_no_platform_is_named_outside_hardware():
    """A platform is one folder and its line in hardware/platforms.py: who names one elsewhere forgets the next."""
    rooms = {place.split(".")[1] for place in PLATFORMS.values()}
    assert {"cpu", "npu"} <= rooms < {path.name for path in (ROOT / "hardware").iterdir()}
    for path in (*OTHERS, *sorted((ROOT / "scripts").rglob("*.py"))):
        nodes = list(ast.walk(parse(path)))
        said = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        named = {words for words in said | imported(path) if re.match(rf"hardware\.({'|'.join(rooms)})\b", words)}
        named |= {word for word in said if word in PLATFORMS or HARDWARE_WORD.fullmatch(word.strip())}
        owned = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
        named |= {f"torch.{node.attr}" for node in owned if node.value.id == "torch" and node.attr in ("cuda", "npu")}
        allowed = {name for where, name in NAMES_OF_PLATFORMS if where == str(path.relative_to(ROOT))}
        assert not named - allowed, f"{path}: ask the platform, by hardware.platforms.get_platform"


def test_files_and_functions_stay_short():
    for path in SOURCES:
        text = path.read_text()
        assert text.count("\n") <= 500, path
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 80, f"{path}:{node.lineno} {node.name}"


def test_types_are_checked_everywhere():
    """By every rule of basic mode, over whole packages; the few lines that are left out say which rule and why."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["basedpyright"]
    where = {"pythonVersion": "3.11", "venvPath": ".", "venv": ".venv"}
    assert settings == {"include": [*FLOORS], "typeCheckingMode": "basic"} | where
    lines = [line for path in SOURCES for line in path.read_text().splitlines()]
    ignored = [line for line in lines if re.search(r"#\s*(type|pyright|basedpyright):", line)]
    assert len(ignored) <= 30
    for line in ignored:
        assert re.search(r"# pyright: ignore\[\w+\]  \S+ \S+", line), f"say which rule and why: {line.strip()}"


FRAGMENT = re.compile(
    r"(?i:of|over|in|at|on|by|for|with|without|into|what|where|how|which|when|whether|why|who|whose)\s"
)
"""A docstring that begins so is no sentence of its own; "On-policy" is a word."""
PREPOSITION = re.compile(r"_?(of|over|in|at|on|by|for|with|without|into|around|before|after|under|within|per)_")
"""A function named so is no verb; ``to_`` and ``from_`` are what conversions are called."""


def test_functions_are_verbs_and_docstrings_begin_with_a_sentence():
    for path in SOURCES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef):
                assert not PREPOSITION.match(node.name), f"{path}:{node.lineno} {node.name}: say what it does"
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                text = ast.get_docstring(node) or ""
                assert not FRAGMENT.match(text), f"{path}: {text.splitlines()[0]!r}: begin with a whole sentence"


def entries(folder: Path) -> list[Path]:
    """Files and folders that someone looking for something has to look through."""
    files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    found = {folder / path.relative_to(folder).parts[0] for path in files}
    return sorted(path for path in found if path.name != "__init__.py" and not path.name.startswith("."))


def test_rooms_stay_small_enough_to_look_through():
    for top in (ROOT / name for name in (*FLOORS, "tests", "scripts")):
        for folder in [top, *(path for path in top.rglob("*") if path.is_dir())]:
            assert len(entries(folder)) <= 12, f"{folder}: make rooms in it"


def test_tests_lie_in_the_rooms_of_what_they_test():
    rooms = [path for top in FLOORS for path in (TESTS / top).rglob("*") if path.is_dir() and entries(path)]
    assert rooms
    for room in rooms:
        assert (ROOT / room.relative_to(TESTS)).is_dir(), f"{room}: there is no such room to test"


def room_of(path: Path) -> Path:
    """The folder of a file. One that lies beside rooms stands for itself: a door to them, or what they stand on."""
    beside_rooms = any(other.parent.parent == path.parent for other in SOURCES)
    return (path if beside_rooms else path.parent).relative_to(ROOT)


def circle(edges: dict[Path, set[Path]]) -> list[Path]:
    """A way that ends where it began, or nothing if there is none."""
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def wing_of(path: Path) -> Path:
    """The folder of a package that a file lies in, with all folders in it."""
    return Path(*path.relative_to(ROOT).parts[:2])


@pytest.mark.parametrize(
    "place_of", [lambda path: path.relative_to(ROOT), room_of, wing_of], ids=["files", "rooms", "wings"]
)
def test_no_imports_in_a_circle(place_of):
    """Imports in functions count too, since they only hide a circle until someone moves them; and imports for type
    checkers, since a reader of either file needs the other."""
    edges: dict[Path, set[Path]] = {}
    for path in SOURCES:
        ours = {file for module in imported(path, types=True) for file in files_of(module)} & set(SOURCES)
        here = edges.setdefault(place_of(path), set())
        here |= {place_of(file) for file in ours if file.name != "__init__.py"} - {place_of(path)}
    assert not (way := circle(edges)), " <- ".join(map(str, way))


def test_a_circle_is_found():
    a, b, c = Path("a"), Path("b"), Path("c")
    assert circle({a: {b}, b: {c}, c: set()}) == []
    assert set(circle({a: {b}, b: {c}, c: {b}})) == {b, c}


def test_the_controller_imports_neither_engine():
    for path in (ROOT / "recipes").rglob("*.py"):
        assert not (way := way_to(path, {"megatron", "vllm"})), " -> ".join(way)


def test_a_stranger_of_the_same_name_is_refused(tmp_path):
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware" / "__init__.py").write_text("")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import rlworker"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode and "ImportError: rlworker: the package 'hardware' resolves to" in done.stderr


def reads(tree: ast.AST, is_config: bool) -> set[tuple[str, str]]:
    """``(owner, name)`` of the attributes that code reads, the owner being the last word of what they are read from;
    a config's own checks of a value's range aside, which are no use of it."""
    found = set()
    for node in ast.iter_child_nodes(tree):
        is_function = is_config and isinstance(node, ast.FunctionDef)
        if is_function and (node.name == "__post_init__" or node.name.lstrip("_").startswith("check")):
            continue
        found |= reads(node, is_config)
        if isinstance(node, ast.Attribute):
            found.add((getattr(node.value, "attr", getattr(node.value, "id", "")), node.attr))
    return found


def test_every_config_key_has_a_reader():
    """A field of a config that nothing reads is a knob that does nothing."""
    import dataclasses

    from engines.config import MegatronConfig, OptimizerConfig, ServedModelConfig, VllmConfig
    from recipes.common.smoke import RecipeConfig, SftRecipeConfig
    from recipes.common.worked_episodes import EpisodeToyConfig
    from recipes.demos.cpu import DemoConfig
    from rlworker.config import sections
    from rlworker.config.algorithm import AlgorithmConfig
    from rlworker.config.validation import ValidationConfig

    owners = {  # what a value of this class is called where it is read
        MegatronConfig: {"actor", "config", "engine"},
        OptimizerConfig: {"optimizer"},
        VllmConfig: {"rollout", "config"},
        ServedModelConfig: {"own", "config", "each"},
        AlgorithmConfig: {"algorithm", "parts", "self"},
        sections.CriticConfig: {"critic"},
        sections.CurriculumConfig: {"curriculum", "config", "settings", "self"},
        sections.DataConfig: {"data"},
        sections.CheckpointConfig: {"checkpoint"},
        sections.PlacementConfig: {"placement"},
        sections.LimitsConfig: {"limits"},
        RecipeConfig: {"config", "self"},
        SftRecipeConfig: {"config", "self"},
        DemoConfig: {"config", "self"},
        EpisodeToyConfig: {"config", "self"},
        sections.EnvironmentConfig: {"environment"},
        ValidationConfig: {"validation", "settings", "self"},
    }
    read = set().union(*(reads(parse(path), "config" in str(path.relative_to(ROOT))) for path in SOURCES))
    for config, called in owners.items():
        unread = {field.name for field in dataclasses.fields(config)} - {
            name for owner, name in read if owner in called
        }
        assert not unread, f"{config.__name__}: nothing reads {unread}"


def test_there_are_few_enough_keys_to_know():
    """At most 20 in a section, in none too, and 147 in all: of every config that a command line sets."""
    from recipes.common.smoke import VlmRecipeConfig
    from recipes.common.worked_episodes import EpisodeToyConfig
    from recipes.demos.cpu import DemoConfig
    from rlworker.checks.config import CheckConfig
    from rlworker.config.command_line import flatten_config
    from rlworker.config.sft import SftConfig

    for config in (VlmRecipeConfig, DemoConfig, EpisodeToyConfig, SftConfig, CheckConfig):
        sections = Counter(key.rpartition(".")[0] for key in flatten_config(config()))
        assert sections["actor.optimizer"] and max(sections.values()) <= 20, sections
        assert sections.total() <= 147, sections


MASK_FORMS = re.compile(
    r"cu_seqlens\w*|max_seqlen\w*|attn_mask\w*|AttnMaskType|is_causal|BlockMask|create_block_mask|flex_attention|"
    r"varlen_attn|scaled_dot_product_attention|sparse_mode|atten_mask|pre_tockens|next_tockens|actual_seq_\w+|"
    r"PackedSeqParams|window_size|to_blocking_mask|to_additive_mask|npu_fusion_attention|count_tokens_before"
)
"""Words in which some backend takes its mask."""
PASSED_ON = {
    # Megatron calls core attention with this argument, and so does the probe; it is None.
    ("engines/probes/mixing.py", "attn_mask_type"),
    # A key of a vision tower's config.json.
    ("recipes/common/shapes.py", "window_size"),
}


def test_no_mask_form_outside_hardware():
    """Engines and recipes say a rule; in which form a kernel is told it, hardware/ alone knows."""
    forms = {path: {name for name in names(parse(path)) if MASK_FORMS.fullmatch(name)} for path in SOURCES}
    for path in OTHERS:
        assert forms.pop(path) <= {name for where, name in PASSED_ON if where == str(path.relative_to(ROOT))}, path
    assert {"attn_mask", "is_causal", "to_blocking_mask"} <= set().union(*forms.values())


def test_a_family_is_named_in_its_file_alone():
    """So that a further family is a further file: nothing else in engines/ chooses by ``model_type``. A planted fault
    says which model it is planted in."""
    families = ROOT / "engines" / "models" / "families"
    family_names = {path.stem for path in families.rglob("[!_]*.py")}
    assert {"llama", "qwen2_5_vl"} <= family_names
    for path in (ROOT / "engines").rglob("*.py"):
        if families in path.parents or path == ROOT / "engines" / "probes" / "faults.py":
            continue
        for node in ast.walk(parse(path)):
            is_choice = isinstance(node, ast.Compare | ast.Match) and "model_type" in names(node)
            is_name = isinstance(node, ast.Constant) and node.value in family_names
            assert not (is_choice or is_name), f"{path}:{node.lineno}: state it in engines/models/families"


HEAVY = {"transformers", "ray", "vllm", "megatron", "datasets", "pyarrow", "torchvision"}
HEAVY |= {"plotly", "math_verify", "tensorboard", "wandb"}
"""Packages that take up to ten CPU-seconds to import: a test or fixture that needs one imports it as it runs."""
HEAVY_MODULES = {"torch.nn.attention.varlen", "torch._dynamo", "torch.fx"}
"""Modules that bring torch's compiler."""
LIGHT = [TESTS / "conftest.py", *sorted(TESTS.rglob("test_*.py"))]
"""What every run of pytest loads."""


def way_to(path: Path, packages: set[str]) -> list[str]:
    """Follow imports from a file to one of some packages: the shortest way there, or nothing if there is none."""
    ways, seen = [(path, [str(path.relative_to(ROOT))])], {path}
    for here, way in ways:  # it grows as it is read
        for module in sorted(imported(here, on_load=True)):
            if module.split(".")[0] in packages or module in HEAVY_MODULES:
                return [*way, module]
            new = [file for file in files_of(module) if file not in seen]
            seen.update(new)
            ways += [(file, [*way, str(file.relative_to(ROOT))]) for file in new]
    return []


def test_collection_imports_nothing_heavy():
    """So that ``pytest -k gae`` costs what the test costs. conftest, which every run loads, has no torch either."""
    for path in LIGHT:
        way = way_to(path, HEAVY | {"torch"} if path.name == "conftest.py" else HEAVY)
        assert not way, f"{' -> '.join(way)}: import it in the function or fixture that needs it"


def test_a_heavy_import_is_found_behind_others():
    workers, processor = (ROOT / path for path in ("rlworker/cluster/workers.py", "engines/images/processor.py"))
    assert way_to(workers, HEAVY) == ["rlworker/cluster/workers.py", "ray"]
    assert way_to(processor, HEAVY | {"torch"}) == [], "in functions, or for types alone"


PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_prose_can_be_read_once():
    """Lines have at most 100 characters, sentences at most 25 words."""
    for page in PAGES:
        text = page.read_text()
        assert not (long := find_long_lines(text, 100)), (page, long)
        assert not (long := [each for each in split_sentences(text) if count_words(each) > 25]), (page, long)


def test_long_lines_and_sentences_are_found():
    wide, words = "word " * 20 + "end", "word " * 13
    assert find_long_lines(f"{wide}\n| {wide} |\n```\n{wide}\n```\n[a](https://{'b' * 100})\n", 100) == [wide]
    page = f"# {words}\n{words}\n{words}\n- One. Two `a b`.\n- {words}; {words}\n\n| {words} | e.g. this (3.11). |\n"
    assert list(map(count_words, split_sentences(page))) == [13, 26, 1, 2, 26, 13, 3]
