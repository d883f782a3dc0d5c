"""What this project takes from the packages of a profile, and whether those packages have it.

    python scripts/profile_names.py npu            compares the tree with hardware/npu/profile.json
    python scripts/profile_names.py cuda --write   downloads the wheels that requirements/cuda.txt names, and looks
                                                   everything up in them

Looked up is every name that is imported from the profile's packages. Of torch, torch_npu and their modules, by whatever
name they are imported, also what is read from them and called, with its keywords; and the schema of every operator of
an NPU. Members of a class count as there where the class inherits from another. Read are the wheels' sources and stubs,
whose names are stored: nothing of them is run.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Profile:
    """Attributes:
    packages: distribution -> what it is imported as. followed: modules of which attributes are looked up too.
    operators: what operators are called by; schemas: the file of a wheel that has theirs, ``module:path``.
    """

    packages: dict[str, str]
    followed: tuple[str, ...]
    operators: str = ""
    schemas: str = ""


_SHARED = {"transformers": "transformers", "vllm": "vllm", "megatron-core": "megatron"}
PROFILES = {
    "npu": Profile(
        {"torch-npu": "torch_npu"} | _SHARED,
        ("torch_npu",),
        "torch.ops.npu.",
        "torch_npu:torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml",
    ),
    "cuda": Profile({"torch": "torch"} | _SHARED, ("torch",)),
}


class Names:
    """The names of one profile.

    Args:
        profile: its name, also that of its requirements and of the folder that has what was stored.
    """

    def __init__(self, profile: str):
        self.profile, self.name = PROFILES[profile], profile
        self.data = ROOT / "hardware" / profile / "profile.json"
        self.requirements = ROOT / "requirements" / f"{profile}.txt"

    def used(self, tree: Path) -> dict[str, set[str]]:
        """Dotted name -> the keywords it is called with somewhere, of all that the tree takes from these packages."""
        found: dict[str, set[str]] = {}
        for folder in ("hardware", "engines", "rlworker", "recipes"):
            for path in sorted((tree / folder).rglob("*.py")):
                parsed = ast.parse(path.read_text())
                known = _list_modules(parsed)
                for node in ast.walk(parsed):
                    for name, keywords in self._taken(node, known):
                        found.setdefault(name, set()).update(keywords)
        return found

    def _taken(self, node: ast.AST, known: dict[str, str]) -> Iterator[tuple[str, list[str]]]:
        imported = []
        if isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from ((name, []) for name in imported if name.split(".")[0] in self.profile.packages.values())
        called = isinstance(node, ast.Call)
        if called or isinstance(node, ast.Attribute):
            name = _spell(node.func if called else node, known)
            if self._is_operator(name) or self._is_followed(name):
                yield name, [keyword.arg or "**" for keyword in node.keywords] if called else []

    def _is_operator(self, name: str) -> bool:
        return bool(self.profile.operators) and name.startswith(self.profile.operators)

    def _is_followed(self, name: str) -> bool:
        return "." in name and name.split(".")[0] in self.profile.followed and not name.startswith("torch.ops.")

    def pinned(self) -> dict[str, str]:
        lines = self.requirements.read_text().splitlines()
        pins = (line.split("==") for line in lines if "==" in line and line[0] != "#")
        return {name: version.strip() for name, version in pins if name in self.profile.packages}

    def problems(self, tree: Path) -> list[str]:
        """What the stored data does not vouch for."""
        stored = json.loads(self.data.read_text())
        own = self.pinned()
        found = [] if stored["profile"] == own else [f"{self.data.name} is of {stored['profile']}, pinned is {own}"]
        for name, keywords in sorted(self.used(tree).items()):
            if self._is_operator(name):
                schema = stored["operators"].get(name.removeprefix(self.profile.operators))
                parameters = re.findall(r"(\w+)(?:=[^,)]*)?[,)]", schema.split("->")[0]) if schema else "missing"
            else:
                parameters = stored["names"].get(name, "missing")
            if parameters == "missing":
                found.append(f"{name} is not known to be in the {self.name} profile")
            elif isinstance(parameters, list) and "**" not in parameters and keywords - {*parameters}:
                found.append(f"{name} takes no {sorted(keywords - {*parameters})}, it takes {parameters}")
        return found

    def write(self, tree: Path, wheels: Path) -> list[str]:
        """Look everything up in the wheels and store what was found; returns what was not."""
        opened, read = {}, {}
        for package, version in self.pinned().items():
            named = f"{package.replace('-', '_')}-{version}-*.whl"
            if not (path := next(wheels.glob(named), None)):
                command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(wheels)]
                subprocess.run([*command, f"{package}=={version}"], check=True)
                path = next(wheels.glob(named))
            opened[self.profile.packages[package]], read[package] = Wheel(path), path.name
        operators, names, missing = {}, {}, []
        for name in sorted(self.used(tree)):
            if self._is_operator(name):
                package, _, file = self.profile.schemas.partition(":")
                operator = name.removeprefix(self.profile.operators)
                schema = re.search(rf"func: ({operator}\(.*)", opened[package].source(file))
                found = schema[1].strip() if schema else "missing"
                operators |= {operator: found} if schema else {}
            else:
                found = opened[name.split(".")[0]].look_up(name)
                names |= {name: found} if found != "missing" else {}
            if found == "missing":
                missing.append(name)
        stored = {"profile": self.pinned(), "wheels": read, "operators": operators, "names": names}
        one_line = re.sub(r"\[[^\]]*\]", lambda each: re.sub(r"\s+", " ", each[0]), json.dumps(stored, indent=1))
        self.data.write_text(one_line + "\n")
        return [f"{name} is not in the {self.name} profile" for name in missing]


def _list_modules(parsed: ast.Module) -> dict[str, str]:
    """Name in a file -> the module that it was imported as: ``{"F": "torch.nn.functional", "torch": "torch"}``."""
    found = {}
    for node in ast.walk(parsed):
        for alias in node.names if isinstance(node, ast.Import) else ():
            top = alias.name.split(".")[0]
            found[alias.asname or top] = alias.name if alias.asname else top
    return found


def _spell(node: ast.AST, known: dict[str, str]) -> str:
    """What is read from a module that the file imports, as a dotted name; empty for anything else."""
    if isinstance(node, ast.Attribute):
        owner = _spell(node.value, known)
        return owner and f"{owner}.{node.attr}"
    return known.get(node.id, "") if isinstance(node, ast.Name) else ""


# -- reading wheels


class Wheel:
    """The sources of one package."""

    def __init__(self, path: Path):
        self.archive = zipfile.ZipFile(path)
        self.files = set(self.archive.namelist())

    def source(self, file: str) -> str:
        return self.archive.read(file).decode()

    def file_of(self, module: str) -> str | None:
        path = module.replace(".", "/")
        files = (f"{path}{end}" for end in (".py", "/__init__.py", ".pyi", "/__init__.pyi"))
        return next((file for file in files if file in self.files), None)

    @cache  # noqa: B019
    def parse(self, file: str) -> ast.Module:
        return ast.parse(self.source(file))

    @cache  # noqa: B019
    def names(self, module: str) -> dict[str, ast.AST | tuple[str, str]]:
        """What a module binds: a definition, or where it is imported from."""
        file = self.file_of(module)
        if file is None:
            return {}
        package = module if "/__init__.py" in file else module.rpartition(".")[0]
        found: dict[str, ast.AST | tuple[str, str]] = {}
        for node in ast.walk(self.parse(file)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                found.setdefault(node.name, node)
            elif isinstance(node, ast.Assign):
                found |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found[node.target.id] = node
            elif isinstance(node, ast.ImportFrom):
                origin = self._origin(package, node)
                for alias in node.names:
                    if alias.name == "*":
                        found |= {name: (origin, name) for name in self.names(origin)}
                    else:
                        found[alias.asname or alias.name] = (origin, alias.name)
        return found

    @staticmethod
    def _origin(package: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        base = package.split(".")[: len(package.split(".")) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])

    @cache  # noqa: B019
    def lazy_names(self) -> set[str]:
        """What the package's modules say they export: its top imports them when they are asked for."""
        found = set()
        for file in self.files:
            if file.endswith(".py") and "__all__" in (source := self.source(file)):
                for node in ast.parse(source).body:
                    if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                        found |= {item.value for item in ast.walk(node.value) if isinstance(item, ast.Constant)}
        return found

    def look_up(self, name: str, passed: tuple[str, ...] = ()) -> list[str] | str | None:
        """Parameters of a function, None of anything else that is there, "missing" where nothing is."""
        if name in passed:  # modules that import it from each other, and load it when it is asked for
            return None
        if self.file_of(name) or any(file.startswith(name.replace(".", "/") + "/") for file in self.files):
            return None
        module, _, last = name.rpartition(".")
        if not self.file_of(module):
            return self._look_up_member(module, last)
        found = self.names(module).get(last, "missing")
        if isinstance(found, tuple):
            return self.look_up(".".join(found), (*passed, name)) if self.file_of(found[0]) else None
        if isinstance(found, ast.FunctionDef):
            return self._parameters(module, last)
        if found == "missing" and "." not in module and last in self.lazy_names():
            return None
        return "missing" if found == "missing" else None

    def _parameters(self, module: str, name: str) -> list[str]:
        """Of a function and, in a stub, of everything that it is overloaded with."""
        found: dict[str, None] = {}
        for node in ast.walk(self.parse(self.file_of(module))):
            if isinstance(node, ast.FunctionDef) and node.name == name:
                every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                found |= dict.fromkeys(argument.arg for argument in every)
                found |= {"**": None} if node.args.kwarg else {}
        return list(found)

    def _look_up_member(self, owner: str, name: str) -> str | None:
        """None where a class has the member, or inherits from one that may, or where the owner is no class."""
        module, _, last = owner.rpartition(".")
        if not module or self.look_up(owner) == "missing":
            return "missing"
        found = self.names(module).get(last)
        while isinstance(found, tuple):
            found = self.names(found[0]).get(found[1])
        if not isinstance(found, ast.ClassDef) or found.bases or found.keywords:
            return None
        members = {node.name for node in found.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        for node in found.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            members |= {target.id for target in targets if isinstance(target, ast.Name)}
        return None if name in members else "missing"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", choices=PROFILES)
    parser.add_argument("--write", action="store_true", help="download the wheels and store what they have")
    parser.add_argument("--wheels", type=Path, help="where the wheels are kept; left out, a temporary folder")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the sources to read")
    options = parser.parse_args()
    names, found = Names(options.profile), []
    if options.write:
        with tempfile.TemporaryDirectory() as temporary:
            found = names.write(options.tree, options.wheels or Path(temporary))
    found += names.problems(options.tree)
    print("\n".join(found) or f"{len(names.used(options.tree))} names are in the {options.profile} profile")
    sys.exit(bool(found))
