"""Measure what of this project one GRPO run over text imports, and whether it uses all of it.

    python3 scripts/run_lines.py [--files] [--types]

The run is real: a tiny model, two steps, one training rank, one rollout engine. Each of its processes notes which of
the project's modules it imports, which of their functions it runs and of which of their dataclasses it makes a value.
Printed are the modules, their lines (neither blank nor a comment) and their syntax nodes, in sum and against a limit,
and the modules of which no process of the run ever runs anything. The program ends with 1 if there is such a module, or
if the nodes are over the limit.

``--files`` lists the modules with their lines and nodes, and the kinds of processes that import them. ``--types`` lists
the classes of this project that any process instantiates between the first request of the second step and its groups.
"""

import argparse
import ast
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 95_000
"""Most syntax nodes that a GRPO run over text may import."""
KINDS = {"TrainWorker.__init__": "rank", "RolloutWorker.__init__": "engine", "EnvWorker.__init__": "environment"}
"""Function that a process of a kind runs -> the kind. The process that runs none of them is the driver."""
NOTE = '''
import ast, builtins, os, sys, threading, time
from importlib.machinery import PathFinder, SourceFileLoader

OURS = ("hardware", "engines", "rlworker", "recipes")
noted = set()

def note(*words):
    """Append a line to the notes, at once: processes of Ray end without notice."""
    line = " ".join((str(os.getpid()), *words)) + chr(10)
    with open(os.environ["RUN_NOTES"], "a") as file:
        file.write(line)

def note_call(module, function):
    if (module, function) not in noted:
        noted.add((module, function))
        note("call", module, function)

POST_INIT = """
def __post_init__(self, *values):
    if inherited := getattr(super(), "__post_init__", None):
        inherited(*values)
"""

class NotingCalls(ast.NodeTransformer):
    """Let every function of a module note that it runs."""

    def __init__(self, module):
        self.module, self.names = module, []

    def visit_inside(self, node):
        self.names.append(node.name)
        self.generic_visit(node)
        self.names.pop()
        return node

    def visit_ClassDef(self, node):
        decorators = [ast.unparse(each) for each in node.decorator_list]
        methods = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
        if any("dataclass" in each and "slots" not in each for each in decorators) and "__post_init__" not in methods:
            (added,) = ast.parse(POST_INIT).body
            for each in ast.walk(added):
                each.lineno = each.end_lineno = node.lineno
                each.col_offset = each.end_col_offset = 0
            node.body.append(added)
        return self.visit_inside(node)

    def visit_FunctionDef(self, node):
        self.visit_inside(node)
        call = ast.Expr(ast.Call(
            func=ast.Name("__note_call__", ast.Load()),
            args=[ast.Constant(self.module), ast.Constant(".".join([*self.names, node.name]))],
            keywords=[],
        ))
        node.body.insert(1 if ast.get_docstring(node, clean=False) is not None else 0, call)
        for added in ast.walk(call):
            ast.copy_location(added, node)
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

class Loader(SourceFileLoader):
    def get_code(self, fullname):
        path = self.get_filename(fullname)
        tree = NotingCalls(fullname).visit(ast.parse(self.get_data(path), path))
        return compile(tree, path, "exec", dont_inherit=True)

class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.split(".")[0] not in OURS:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec and type(spec.loader) is SourceFileLoader:
            note("import", name)
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec

def note_type(frame, event, _):
    name, (first, *_) = frame.f_code.co_name, (*frame.f_code.co_varnames[: frame.f_code.co_argcount], "")
    if event == "call" and first and (name in ("__init__", "__new__") or first == "_cls"):  # of a NamedTuple
        made = frame.f_locals[first]
        kind = made if isinstance(made, type) else type(made)
        if kind.__module__.split(".")[0] in OURS:
            note("type", str(time.time()), kind.__module__, kind.__qualname__)
    elif name in ("begin", "wait") and frame.f_code.co_filename.endswith("rollouts/loop.py"):
        note(event + "-loop", str(time.time()), name)

builtins.__note_call__ = note_call
sys.meta_path.insert(0, Finder)
if os.environ.get("RUN_TYPES"):
    threading.setprofile(note_type)
    sys.setprofile(note_type)
'''
"""``sitecustomize`` of the run's processes."""
MAKE = """
import sys
from pathlib import Path
from recipes.common.addition import make_data, make_model
folder = Path(sys.argv[1])
make_model(folder / "model", seed=0)
make_data(folder / "data")
"""


def find_python() -> str:
    """Find the interpreter that has the project's packages."""
    python = ROOT / ".venv" / "bin" / "python"
    return str(python) if python.exists() else sys.executable


def trace_run(folder: Path, traces_types: bool) -> list[list[str]]:
    """Run GRPO in a folder: the notes of its processes, as words."""
    python, environment = find_python(), os.environ | {"HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    subprocess.run([python, "-W", "ignore", "-c", MAKE, folder], env=environment, cwd=ROOT, check=True)
    (folder / "site").mkdir()
    (folder / "site" / "sitecustomize.py").write_text(NOTE)
    options = ["--model", f"{folder}/model", "--run-dir", f"{folder}/run", "--steps", "2", "--prompts-per-step", "4"]
    options += ["--data.train", f"{folder}/data/train.jsonl", "--samples-per-prompt", "2", "--environment.workers", "1"]
    options += ["--rollout.max-new-tokens", "8", "--rollout.max-model-len", "64", "--rollout.kv-cache-mb", "64"]
    options += ["--data.max-prompt-tokens", "16", "--actor.dtype", "float32", "--rollout.dtype", "float32"]
    options += ["--data.heldout", f"{folder}/data/heldout.jsonl"]
    environment |= {"PYTHONPATH": f"{folder}/site{os.pathsep}{environment['PYTHONPATH']}"}
    environment |= {"RUN_NOTES": f"{folder}/notes"} | ({"RUN_TYPES": "1"} if traces_types else {})
    subprocess.run([python, "-W", "ignore", "-m", "recipes.grpo", *options], env=environment, cwd=ROOT, check=True)
    return [line.split() for line in (folder / "notes").read_text().splitlines()]


def find_file(module: str) -> Path:
    """Find the file of a module of this project."""
    place = ROOT.joinpath(*module.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")


def list_imports(notes: list[list[str]]) -> dict[str, list[str]]:
    """Map each module that was imported to the kinds of processes that did, in order of the alphabet."""
    kinds = {process: KINDS[words[-1]] for process, kind, *words in notes if kind == "call" and words[-1] in KINDS}
    found = defaultdict(set)
    for process, kind, *words in notes:
        if kind == "import":
            found[words[0]].add(kinds.get(process, "driver"))
    return {module: sorted(found[module]) for module in sorted(found)}


def list_functions(tree: ast.Module) -> list[str]:
    """List the functions of a module that do something; the body of a protocol's is a docstring or ``...``."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [
        function.name
        for function in functions
        if not all(isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant) for each in function.body)
    ]


def find_unused(modules: list[str], notes: list[list[str]]) -> list[str]:
    """Find the modules that have functions, of which no process ran any."""
    used = {words[0] for _, kind, *words in notes if kind == "call"}
    return [module for module in modules if module not in used and list_functions(parse(module))]


def parse(module: str) -> ast.Module:
    return ast.parse(find_file(module).read_text())


def count_nodes(tree: ast.Module) -> int:
    """Count the syntax nodes of a file; whether a name is read or set is no node."""
    return sum(1 for node in ast.walk(tree) if not isinstance(node, ast.expr_context))


def count_lines(file: Path) -> int:
    """Count the lines of a file that are neither blank nor a comment."""
    return sum(1 for line in file.read_text().splitlines() if (text := line.strip()) and text[0] != "#")


def list_types(notes: list[list[str]]) -> list[str]:
    """List the types that were instantiated while the episodes of the last rollout ran."""
    begun = [words[0] for _, kind, *words in notes if kind == "call-loop" and words[1] == "begin"]
    done = [words[0] for _, kind, *words in notes if kind == "return-loop" and words[1] == "wait"]
    made = [(time, ".".join(names)) for _, kind, time, *names in notes if kind == "type"]
    return list(dict.fromkeys(name for time, name in sorted(made) if begun[-1] <= time <= done[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="list the modules")
    parser.add_argument("--types", action="store_true", help="list the types that a rollout makes")
    asked = parser.parse_args()
    with TemporaryDirectory() as folder:
        notes = trace_run(Path(folder), asked.types)
    imports = list_imports(notes)
    nodes = {module: count_nodes(parse(module)) for module in imports}
    lines = {module: count_lines(find_file(module)) for module in imports}
    for module, kinds in imports.items() if asked.files else ():
        print(f"{lines[module]:5d} lines {nodes[module]:5d} nodes  {module}  ({', '.join(kinds)})")
    if asked.types:
        types = list_types(notes)
        print(*types, f"{len(types)} types", sep="\n")
    total = sum(nodes.values())
    print(f"{len(imports)} modules, {sum(lines.values())} lines, {total} syntax nodes; the limit is {LIMIT}")
    for module in (unused := find_unused(list(imports), notes)):
        print(f"unused: {module}, {nodes[module]} nodes: imported, and the run uses nothing of it")
    sys.exit(bool(unused) or total > LIMIT)


if __name__ == "__main__":
    main()
