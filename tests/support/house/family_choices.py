"""Places where code does one thing for one family of models and another for the next."""

import ast
from pathlib import Path

FAMILIES = Path(__file__).parents[3] / "engines" / "models" / "families"
FAMILY_NAMES = {path.stem for path in FAMILIES.glob("[!_]*.py")}


def is_family_name(node: ast.AST | None) -> bool:
    """Tell whether an expression is the name of a family, written out or read as ``model_type``, or has one in it."""
    match node:
        case ast.Constant(value=value):
            return value in FAMILY_NAMES
        case ast.Name(id="model_type") | ast.Attribute(attr="model_type"):
            return True
        case ast.Subscript(slice=ast.Constant(value="model_type")):
            return True
        case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value="model_type"), *_]):
            return True
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
            return any(map(is_family_name, parts))
    return False


def find_family_choices(tree: ast.AST) -> list[int]:
    """List the lines that do one thing for one family and another for the next: comparisons, dicts by name, matches."""
    lines = []
    for node in ast.walk(tree):
        names: list[ast.AST | None] = []
        match node:
            case ast.Compare(left=left, comparators=others):
                names = [left, *others]
            case ast.Dict(keys=keys):
                names = list(keys)
            case ast.Subscript(slice=key):
                names = [key]
            case ast.Attribute(value=owner):  # model_type.startswith(...)
                names = [owner]
            case ast.Call(func=ast.Name(id="dict"), keywords=keywords):
                names = [ast.Constant(keyword.arg) for keyword in keywords]
            case ast.Call(func=ast.Attribute(attr="get" | "pop" | "setdefault" | "fromkeys"), args=arguments):
                names = arguments
            case ast.Match(subject=subject):
                names = [subject]
            case ast.MatchValue(value=value):
                names = [value]
        lines += [node.lineno] if any(map(is_family_name, names)) else []
    return lines
