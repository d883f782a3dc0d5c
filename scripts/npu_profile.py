"""Check that the packages of the npu profile have what this project takes from them.

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


def find_uses(tree: Path) -> dict[str, set[str]]:
    """Return dotted name -> keywords that it is called with, for all that the tree takes from these packages."""
    uses: dict[str, set[str]] = {}
    for folder in ("hardware", "engines", "rlworker", "recipes"):
        for path in sorted((tree / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                for name, keywords in _walk_names(node):
                    if name.startswith(OPERATORS) or name.split(".")[0] in PACKAGES.values():
                        uses.setdefault(name, set()).update(keywords)
    return uses


def _walk_names(node: ast.AST):
    """Yield ``(dotted name, keywords)`` of what a node imports, reads or calls."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, ()) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level == 0:
        yield from ((f"{node.module}.{alias.name}", ()) for alias in node.names)
    elif isinstance(node, ast.Attribute):
        name = _join_name(node)
        if name.startswith(("torch_npu.", OPERATORS)):
            yield name, ()
    elif isinstance(node, ast.Call):
        name = _join_name(node.func)
        if name.startswith(("torch_npu.", OPERATORS)):
            yield name, [keyword.arg or "**" for keyword in node.keywords]


def _join_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_join_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def read_pins() -> dict[str, str]:
    """Return package -> version, of the packages that are looked into."""
    lines = (line.split("==") for line in REQUIREMENTS.read_text().splitlines() if "==" in line and line[0] != "#")
    return {name: version.strip() for name, version in lines if name in PACKAGES}


def find_problems(tree: Path) -> list[str]:
    """List the uses that the stored data does not vouch for."""
    stored = json.loads(DATA.read_text())
    pins, problems = read_pins(), []
    if stored["profile"] != pins:
        problems.append(f"{DATA.name} is of {stored['profile']}, pinned is {pins}")
    for name, keywords in sorted(find_uses(tree).items()):
        if name.startswith(OPERATORS):
            schema = stored["operators"].get(name.removeprefix(OPERATORS))
            parameters = re.findall(r"(\w+)(?:=[^,)]*)?[,)]", schema.split("->")[0]) if schema else "missing"
        else:
            parameters = stored["names"].get(name, "missing")
        if parameters == "missing":
            problems.append(f"{name} is not known to be in the npu profile")
        elif isinstance(parameters, list) and keywords - {*parameters}:
            problems.append(f"{name} takes no {sorted(keywords - {*parameters})}, it takes {parameters}")
    return problems


# -- reading wheels


class Wheel:
    """The sources of one package."""

    def __init__(self, path: Path):
        self.archive = zipfile.ZipFile(path)
        self.files = set(self.archive.namelist())

    def read_source(self, file: str) -> str:
        return self.archive.read(file).decode()

    def find_file(self, module: str) -> str | None:
        path = module.replace(".", "/")
        return next((file for file in (f"{path}.py", f"{path}/__init__.py") if file in self.files), None)

    @cache  # noqa: B019
    def list_names(self, module: str) -> dict[str, ast.AST | tuple[str, str]]:
        """Return what a module binds, by name: a definition, or the module and name that it is imported from."""
        file = self.find_file(module)
        if file is None:
            return {}
        package = module if file.endswith("__init__.py") else module.rpartition(".")[0]
        bindings: dict[str, ast.AST | tuple[str, str]] = {}
        for node in ast.walk(ast.parse(self.read_source(file))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                bindings.setdefault(node.name, node)
            elif isinstance(node, ast.Assign):
                bindings |= {target.id: node for target in node.targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                bindings[node.target.id] = node
            elif isinstance(node, ast.ImportFrom):
                origin = self._resolve_origin(package, node)
                for alias in node.names:
                    if alias.name == "*":
                        bindings |= self.list_names(origin)
                    else:
                        bindings[alias.asname or alias.name] = (origin, alias.name)
        return bindings

    @staticmethod
    def _resolve_origin(package: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        base = package.split(".")[: len(package.split(".")) - node.level + 1]
        return ".".join([*base, *([node.module] if node.module else [])])

    @cache  # noqa: B019
    def list_lazy_names(self) -> set[str]:
        """Return the names in ``__all__`` of the package's modules: its top imports them when they are asked for."""
        exports = set()
        for file in self.files:
            if file.endswith(".py") and "__all__" in (source := self.read_source(file)):
                for node in ast.parse(source).body:
                    if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                        exports |= {item.value for item in ast.walk(node.value) if isinstance(item, ast.Constant)}
        return exports

    def look_up(self, name: str, passed: tuple[str, ...] = ()) -> list[str] | str | None:
        """Return the parameters of a function, None for anything else that is there, "missing" where nothing is."""
        if name in passed:  # modules that import it from each other, and load it when it is asked for
            return None
        if self.find_file(name) or any(file.startswith(name.replace(".", "/") + "/") for file in self.files):
            return None
        module, _, attribute = name.rpartition(".")
        binding = self.list_names(module).get(attribute, "missing")
        if isinstance(binding, tuple):
            return self.look_up(".".join(binding), (*passed, name)) if self.find_file(binding[0]) else None
        if isinstance(binding, ast.FunctionDef):
            arguments = binding.args
            return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        if binding == "missing" and "." not in module and attribute in self.list_lazy_names():
            return None
        return "missing" if binding == "missing" else None


def write_profile(tree: Path, wheels: Path) -> list[str]:
    """Look everything up in the wheels, store what they have, and return a line for each name they lack."""
    packages = {}
    for package, version in read_pins().items():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(wheels)]
        subprocess.run([*command, f"{package}=={version}"], check=True)
        packages[PACKAGES[package]] = Wheel(next(wheels.glob(f"{package.replace('-', '_')}-*.whl")))
    schemas = packages["torch_npu"].read_source(SCHEMAS)
    operators, names, missing = {}, {}, []
    for name in sorted(find_uses(tree)):
        if name.startswith(OPERATORS):
            operator = name.removeprefix(OPERATORS)
            schema = re.search(rf"func: ({operator}\(.*)", schemas)
            entry = schema[1].strip() if schema else "missing"
            operators |= {operator: entry} if schema else {}
        else:
            entry = packages[name.split(".")[0]].look_up(name)
            names |= {name: entry} if entry != "missing" else {}
        if entry == "missing":
            missing.append(name)
    text = json.dumps({"profile": read_pins(), "operators": operators, "names": names}, indent=1)
    one_line = re.sub(r"\[[^\]]*\]", lambda match: re.sub(r"\s+", " ", match[0]), text)
    DATA.write_text(one_line + "\n")
    return [f"{name} is not in the npu profile" for name in missing]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="download the wheels and store what they have")
    parser.add_argument("--wheels", type=Path, help="where the wheels are kept; left out, a temporary folder")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the sources to read")
    options = parser.parse_args()
    problems = []
    if options.write:
        with tempfile.TemporaryDirectory() as temporary:
            problems = write_profile(options.tree, options.wheels or Path(temporary))
    problems += find_problems(options.tree)
    print("\n".join(problems) or f"{len(find_uses(options.tree))} names are in the npu profile")
    sys.exit(bool(problems))
