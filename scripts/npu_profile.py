"""What this project takes from the packages of the npu profile, and whether those packages have it.

    python scripts/npu_profile.py            compares the tree with hardware/npu/profile.json
    python scripts/npu_profile.py --write    downloads the wheels that requirements/npu.txt names, and looks it all up

Looked up are every name imported from torch_npu, transformers, vllm and megatron, every call of torch_npu with its
keywords, and the schema of every operator. Read from the wheels' sources: nothing of them is run.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
DATA = ROOT / "hardware" / "npu" / "profile.json"
REQUIREMENTS = ROOT / "requirements" / "npu.txt"
PACKAGES = {
    "torch-npu": "torch_npu",
    "transformers": "transformers",
    "vllm": "vllm",
    "megatron-core": "megatron",
}
"""Distribution -> what it is imported as."""
OPERATORS = "torch.ops.npu."
SCHEMAS = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"


def used(tree: Path) -> dict[str, set[str]]:
    """Dotted name -> the keywords it is called with somewhere, of all that the tree takes from these packages."""
    found: dict[str, set[str]] = {}
    for folder in ("hardware", "engines", "rlworker", "recipes"):
        for path in sorted((tree / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                for name, keywords in _taken(node):
                    if name.startswith(OPERATORS) or name.split(".")[0] in PACKAGES.values():
                        found.setdefault(name, set()).update(keywords)
    return found


def _taken(node: ast.AST):
    if isinstance(node, ast.Import):
        yield from ((alias.name, ()) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        yield from ((f"{node.module}.{alias.name}", ()) for alias in node.names)
    elif isinstance(node, ast.Attribute):
        name = _dotted(node)
        if name.startswith(("torch_npu.", OPERATORS)):
            yield name, ()
    elif isinstance(node, ast.Call):
        name = _dotted(node.func)
        if name.startswith(("torch_npu.", OPERATORS)):
            yield name, [keyword.arg or "**" for keyword in node.keywords]


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def pinned() -> dict[str, str]:
    lines = (line.split("==") for line in REQUIREMENTS.read_text().splitlines() if "==" in line and line[0] != "#")
    return {name: version.strip() for name, version in lines if name in PACKAGES}


def problems(tree: Path) -> list[str]:
    """What the stored data does not vouch for."""
    stored = json.loads(DATA.read_text())
    found = [] if stored["profile"] == pinned() else [f"{DATA.name} is of {stored['profile']}, pinned is {pinned()}"]
    for name, keywords in sorted(used(tree).items()):
        if name.startswith(OPERATORS):
            schema = stored["operators"].get(name.removeprefix(OPERATORS))
            parameters = re.findall(r"(\w+)(?:=[^,)]*)?[,)]", schema.split("->")[0]) if schema else "missing"
        else:
            parameters = stored["names"].get(name, "missing")
        if parameters == "missing":
            found.append(f"{name} is not known to be in the npu profile")
        elif isinstance(parameters, list) and keywords - {*parameters}:
            found.append(f"{name} takes no {sorted(keywords - {*parameters})}, it takes {parameters}")
    return found


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
        return next((file for file in (f"{path}.py", f"{path}/__init__.py") if file in self.files), None)

    @cache  # noqa: B019
    def names(self, module: str) -> dict[str, ast.AST | tuple[str, str]]:
        """What a module binds: a definition, or where it is imported from."""
        file = self.file_of(module)
        if file is None:
            return {}
        package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
        found: dict[str, ast.AST | tuple[str, str]] = {}
        for node in ast.walk(ast.parse(self.source(file))):
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
                        found |= self.names(origin)
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
        found = self.names(module).get(last, "missing")
        if isinstance(found, tuple):
            return self.look_up(".".join(found), (*passed, name)) if self.file_of(found[0]) else None
        if isinstance(found, ast.FunctionDef):
            return [argument.arg for argument in (*found.args.posonlyargs, *found.args.args, *found.args.kwonlyargs)]
        if found == "missing" and "." not in module and last in self.lazy_names():
            return None
        return "missing" if found == "missing" else None


def write(tree: Path, wheels: Path) -> list[str]:
    """Look everything up in the wheels and store what was found; returns what was not."""
    opened = {}
    for package, version in pinned().items():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(wheels)]
        subprocess.run([*command, f"{package}=={version}"], check=True)
        opened[PACKAGES[package]] = Wheel(next(wheels.glob(f"{package.replace('-', '_')}-*.whl")))
    schemas = opened["torch_npu"].source(SCHEMAS)
    operators, names, missing = {}, {}, []
    for name in sorted(used(tree)):
        if name.startswith(OPERATORS):
            operator = name.removeprefix(OPERATORS)
            schema = re.search(rf"func: ({operator}\(.*)", schemas)
            found = schema[1].strip() if schema else "missing"
            operators |= {operator: found} if schema else {}
        else:
            found = opened[name.split(".")[0]].look_up(name)
            names |= {name: found} if found != "missing" else {}
        if found == "missing":
            missing.append(name)
    text = json.dumps({"profile": pinned(), "operators": operators, "names": names}, indent=1)
    one_line = re.sub(r"\[[^\]]*\]", lambda each: re.sub(r"\s+", " ", each[0]), text)
    DATA.write_text(one_line + "\n")
    return [f"{name} is not in the npu profile" for name in missing]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="download the wheels and store what they have")
    parser.add_argument("--wheels", type=Path, help="where the wheels are kept; left out, a temporary folder")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the sources to read")
    options = parser.parse_args()
    found = []
    if options.write:
        with tempfile.TemporaryDirectory() as temporary:
            found = write(options.tree, options.wheels or Path(temporary))
    found += problems(options.tree)
    print("\n".join(found) or f"{len(used(options.tree))} names are in the npu profile")
    sys.exit(bool(found))
