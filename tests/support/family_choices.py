"""Where code does one thing for one family of models and another for the next."""

import ast
from pathlib import Path

FAMILIES = Path(__file__).parents[2] / "engines" / "models" / "families"
FAMILY_NAMES = {path.stem for path in FAMILIES.glob("[!_]*.py")}


def is_family_name(node: ast.AST | None) -> bool:
    """Whether an expression is the name of a family, written out or read as ``model_type``, or has one among others."""
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
    """Lines that do one thing for one family and another for the next: comparisons, dicts by name, matches."""
    lines = []
    for node in ast.walk(tree):
        looked_at: list[ast.AST | None] = []
        match node:
            case ast.Compare(left=left, comparators=others):
                looked_at = [left, *others]
            case ast.Dict(keys=keys):
                looked_at = list(keys)
            case ast.Subscript(slice=key):
                looked_at = [key]
            case ast.Attribute(value=owner):  # model_type.startswith(...)
                looked_at = [owner]
            case ast.Call(func=ast.Name(id="dict"), keywords=keywords):
                looked_at = [ast.Constant(keyword.arg) for keyword in keywords]
            case ast.Call(func=ast.Attribute(attr="get" | "pop" | "setdefault" | "fromkeys"), args=arguments):
                looked_at = arguments
            case ast.Match(subject=subject):
                looked_at = [subject]
            case ast.MatchValue(value=value):
                looked_at = [value]
        lines += [node.lineno] if any(map(is_family_name, looked_at)) else []
    return lines
