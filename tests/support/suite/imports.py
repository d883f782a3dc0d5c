"""What the files of this repository import, read from their source."""

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parents[2]
ROOT = TESTS.parent


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def names(tree: ast.AST) -> set[str]:
    """Every identifier of a file: names, attributes, arguments, keywords and what is imported."""
    found = set()
    for node in ast.walk(tree):
        for attribute in ("id", "attr", "arg", "name"):
            if isinstance(value := getattr(node, attribute, None), str):
                found.add(value)
    return found


@cache
def imported(path: Path, on_load: bool = False, types: bool = False) -> frozenset[str]:
    """Name what a file imports. ``on_load`` leaves out what functions import, and what loading the file does without;
    ``types`` has what is for type checkers alone, too.

    ``from a import b`` counts as ``a`` and ``a.b``, since either may be a module.
    """
    found, left = set(), [parse(path)]
    while left:
        node = left.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.If) and not types and "TYPE_CHECKING" in names(node.test):
            left += node.orelse
        elif not (on_load and _is_later(node)):
            left += ast.iter_child_nodes(node)
    return frozenset(found)


def _is_later(node: ast.AST) -> bool:
    is_optional = isinstance(node, ast.With) and "ImportError" in names(node.items[0].context_expr)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_optional


@cache
def files_of(module: str) -> tuple[Path, ...]:
    """Find what a module of ours is loaded from, its packages first; nothing for one that is not ours."""
    parts = module.split(".")
    prefixes = ["/".join(parts[: i + 1]) for i in range(len(parts))]
    ends = [f"{prefix}{end}" for prefix in prefixes for end in ("/__init__.py", ".py")]
    return tuple(path for root in (ROOT, TESTS) for end in ends if (path := root / end).is_file())
