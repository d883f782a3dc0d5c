"""Imports within functions are few: each hides from a reader what a module needs, so that each has a reason.

A reason is a part that a run may do without, a package that takes seconds to import, or another machine's packages.
What has one comes in at one place, which its callers share.
"""

import ast

from support.suite.imports import ROOT, files_of, parse

PACKAGES = ("hardware", "engines", "rlworker", "recipes")
LIMIT = 60
"""Most imports of the project's own modules within functions, calls that import by a name among them."""
BY_NAME = ("import_module", "resolve_name")
"""Functions that import what a text names."""
FAULTS = ("engines/probes/faults.py", "engines/probes/planted/")
"""A planted fault imports what it breaks as it is planted, in a process that has imported it already."""


def is_own(module: str | None) -> bool:
    return module is not None and module.split(".")[0] in PACKAGES and bool(files_of(module))


def list_late_imports(tree: ast.Module) -> list[str]:
    """Imports of own modules within functions of a file, one for each statement; and calls that import by a name,
    unless that is a text that names a module of another project."""
    functions = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
    ]
    inside = {id(node): node for function in functions for node in ast.walk(function)}
    found = []
    for node in inside.values():
        if isinstance(node, ast.ImportFrom) and is_own(node.module):
            found.append(f"{node.lineno}: from {node.module}")
        elif isinstance(node, ast.Import):
            found += [f"{node.lineno}: import {alias.name}" for alias in node.names if is_own(alias.name)]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func).rpartition(".")[2]
            text = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            if called in BY_NAME and (text is None or is_own(str(text).partition(":")[0])):
                found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def test_imports_within_functions_are_few():
    sources = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    counted = [path for path in sources if not str(path.relative_to(ROOT)).startswith(FAULTS)]
    late = [f"{path.relative_to(ROOT)}:{line}" for path in counted for line in list_late_imports(parse(path))]
    assert len(late) <= LIMIT, f"{len(late)} imports within functions, at most {LIMIT}:\n" + "\n".join(late)


def test_what_counts():
    text = """
from engines.batch import batch

def load(name):
    import torch, engines.batch.batch
    from rlworker.base.errors import RunError

    def inner():
        from hardware import platform
    import_module("mindspeed.megatron_adaptor")
    import_module("engines.batch.batch")
    return importlib.import_module(name), resolve_name("rlworker.base.errors:RunError")
"""
    counted = [line.partition(": ")[2] for line in list_late_imports(ast.parse(text))]
    assert sorted(counted) == sorted(
        [
            "import engines.batch.batch",
            "from rlworker.base.errors",
            "from hardware",
            "import_module('engines.batch.batch')",
            "importlib.import_module(name)",
            "resolve_name('rlworker.base.errors:RunError')",
        ]
    )
