"""Plant small faults in a Python file: which statements can be broken, how, and the text with one of them broken.

Places are read from the syntax tree, and the fault is written into the text itself, so that a mutant differs from its
original in one place and comments stay. What no test should hang on is left alone: docstrings, annotations, imports,
decorators, assertions, ``__repr__``, ``raise`` with its message, f-strings, and what only a type checker reads.
"""

import ast
import bisect
import io
import itertools
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

SIGNS = {"+": "-", "-": "+", "+=": "-=", "-=": "+="}
PRODUCTS = {"*": "/", "/": "*", "//": "*", "*=": "/=", "/=": "*=", "//=": "*="}
OR_EQUAL = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
OPPOSITES = {"<": ">=", ">=": "<", ">": "<=", "<=": ">", "==": "!=", "!=": "==", "&": "|", "|": "&", "and": "or"}
OPPOSITES |= {"or": "and", "in": "not in", "not in": "in", "is": "is not", "is not": "is", "&=": "|=", "|=": "&="}
COMMUTATIVE = {"min", "max", "minimum", "maximum", "lcm", "gcd", "add", "mul", "array_equal", "isclose", "allclose"}
"""Calls that do not care about the order of what they are given."""
SKIPPED = (ast.Import, ast.ImportFrom, ast.Raise, ast.Assert, ast.Global, ast.Nonlocal)
NOT_RUN = {"annotation", "returns", "decorator_list", "type_params", "bases", "keywords"}
"""Fields of a statement that are read by people and type checkers, or are of a class or a decorator."""
ELSEWHERE = (ast.stmt, ast.ExceptHandler, ast.match_case, ast.JoinedStr)
"""Parts of a statement that are statements of their own, or text for people."""
TEXTS = (ast.JoinedStr, ast.Dict, ast.List, ast.Tuple)
"""Nodes that ``+``, ``*`` and ``|`` put together rather than compute: any other operator would only fail at once."""


@dataclass(frozen=True)
class Mutation:
    """A fault: ``text[start:end]`` becomes ``new``.

    Attributes:
        operator: ``sign``, ``product``, ``plus-one``, ``minus-one``, ``or-equal``, ``invert``, ``swap``, ``flag`` or
            ``drop``.
        line: where it starts, from 1.
    """

    operator: str
    line: int
    start: int
    end: int
    new: str

    def apply(self, text: str) -> str:
        return text[: self.start] + self.new + text[self.end :]


class Source:
    """The text of a file, with the places of its tokens and of the nodes of its syntax tree."""

    def __init__(self, text: str):
        self.text, self.tree = text, ast.parse(text)
        self._lines = text.splitlines(keepends=True)
        self._starts = [0, *itertools.accumulate(map(len, self._lines))]
        blank = (tokenize.NL, tokenize.NEWLINE, tokenize.COMMENT, tokenize.INDENT, tokenize.DEDENT)
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        self._tokens = [
            (self._starts[t.start[0] - 1] + t.start[1], self._starts[t.end[0] - 1] + t.end[1])
            for t in tokens
            if t.type not in blank and t.string not in ("(", ")", "")
        ]

    def _find_offset(self, line: int, column: int) -> int:
        """Return the offset in the text, in characters; a tree counts columns in bytes."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())

    def find_span(self, node: ast.AST) -> tuple[int, int]:
        return self._find_offset(node.lineno, node.col_offset), self._find_offset(node.end_lineno, node.end_col_offset)

    def find_operator(self, left: ast.AST, right: ast.AST) -> tuple[int, int]:
        """Return the span of the operator between two operands; it may be two words."""
        start, end = self._find_token(self.find_span(left)[1]), self._find_token(self.find_span(right)[0])
        return self._tokens[start][0], self._tokens[end - 1][1]

    def find_first_token(self, node: ast.AST) -> tuple[int, int]:
        return self._tokens[self._find_token(self.find_span(node)[0])]

    def _find_token(self, offset: int) -> int:
        """Return the number of the first token from an offset on."""
        return bisect.bisect_left(self._tokens, (offset, offset))

    def make_mutation(self, operator: str, span: tuple[int, int], new: str) -> Mutation:
        return Mutation(operator, self.text.count("\n", 0, span[0]) + 1, *span, new)


@cache
def list_mutations(text: str) -> list[list[Mutation]]:
    """List the faults of each statement that has any, in the order of the file."""
    source = Source(text)
    lists = (_collect_mutations(source, statement) for statement in walk_statements(source.tree))
    return [mutations for mutations in lists if mutations]


def walk_statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield every statement that may be broken, those inside others too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, SKIPPED) or getattr(node, "name", "") == "__repr__" or _is_for_type_checkers(node):
            continue
        if isinstance(node, ast.stmt):
            yield node
        if isinstance(node, (ast.stmt, ast.ExceptHandler, ast.match_case)):
            yield from walk_statements(node)


def _is_for_type_checkers(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return ast.unparse(node.test).endswith("TYPE_CHECKING")
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):  # an alias, such as Pair = A | B
        return re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", node.targets[0].id) is not None
    return False


def walk_expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    """Yield the expressions of a statement and their parts, without those of statements inside it."""
    queue = [statement]
    while queue:
        node = queue.pop(0)
        for name, value in ast.iter_fields(node):
            parts = [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, ast.AST)]
            if name not in NOT_RUN or isinstance(node, ast.Call):
                nodes = [x for x in parts if not isinstance(x, ELSEWHERE)]
                queue += nodes
                yield from nodes


def _collect_mutations(source: Source, statement: ast.stmt) -> list[Mutation]:
    mutations = [*_break_statement(source, statement)]
    for node in walk_expressions(statement):
        for kind, break_node in _OPERATORS.items():
            if isinstance(node, kind):
                mutations += break_node(source, node)
        for condition in _find_conditions(node):
            mutations += _negate(source, condition)
    for condition in _find_conditions(statement):
        mutations += _negate(source, condition)
    return mutations


def _break_statement(source: Source, node: ast.stmt) -> Iterator[Mutation]:
    is_store = isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript))
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    if is_store or is_call or isinstance(node, ast.AugAssign):
        yield source.make_mutation("drop", source.find_span(node), "pass")
    if isinstance(node, ast.AugAssign):
        yield from _exchange_operator(source, source.find_operator(node.target, node.value), [node.value])


def _break_binary(source: Source, node: ast.BinOp) -> Iterator[Mutation]:
    yield from _exchange_operator(source, source.find_operator(node.left, node.right), [node.left, node.right])


def _exchange_operator(source: Source, span: tuple[int, int], operands: list[ast.expr]) -> Iterator[Mutation]:
    """Put another operator, where the operands are not texts or collections, which know no other."""
    if any(isinstance(x, TEXTS) or isinstance(getattr(x, "value", None), str) for x in operands):
        return
    sign = source.text[slice(*span)]
    for operator, others in (("sign", SIGNS), ("product", PRODUCTS), ("invert", OPPOSITES)):
        if sign in others:
            yield source.make_mutation(operator, span, others[sign])


def _break_unary(source: Source, node: ast.UnaryOp) -> Iterator[Mutation]:
    """Take away the sign or the ``not``, with the blank after it."""
    start, end = source.find_first_token(node)
    end += source.text[end:].startswith(" ")
    if not isinstance(node.op, ast.UAdd):
        yield source.make_mutation("sign" if isinstance(node.op, ast.USub) else "invert", (start, end), "")


def _break_comparison(source: Source, node: ast.Compare) -> Iterator[Mutation]:
    for left, right in itertools.pairwise([node.left, *node.comparators]):
        span = source.find_operator(left, right)
        sign = " ".join(source.text[slice(*span)].split())
        yield source.make_mutation("invert", span, OPPOSITES[sign])
        if sign in OR_EQUAL:
            yield source.make_mutation("or-equal", span, OR_EQUAL[sign])


def _break_boolean(source: Source, node: ast.BoolOp) -> Iterator[Mutation]:
    for left, right in itertools.pairwise(node.values):
        span = source.find_operator(left, right)
        yield source.make_mutation("invert", span, OPPOSITES[source.text[slice(*span)]])


def _break_constant(source: Source, node: ast.Constant) -> Iterator[Mutation]:
    if isinstance(node.value, bool):
        yield source.make_mutation("flag", source.find_span(node), str(not node.value))
    elif isinstance(node.value, int):
        yield source.make_mutation("plus-one", source.find_span(node), str(node.value + 1))
        yield source.make_mutation("minus-one", source.find_span(node), str(node.value - 1))


def _swap_arguments(source: Source, node: ast.Call) -> Iterator[Mutation]:
    """Let neighbours among the arguments change places, by position or by keyword."""
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    positional = [] if name in COMMUTATIVE else [x for x in node.args if not isinstance(x, ast.Starred)]
    keywords = [keyword.value for keyword in node.keywords if keyword.arg]
    for first, second in (*itertools.pairwise(positional), *itertools.pairwise(keywords)):
        (a, b), (c, d) = source.find_span(first), source.find_span(second)
        new = source.text[c:d] + source.text[b:c] + source.text[a:b]
        if ast.dump(first) != ast.dump(second):
            yield source.make_mutation("swap", (a, d), new)


def _find_conditions(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        return [node.test]
    return list(node.ifs) if isinstance(node, ast.comprehension) else []


def _negate(source: Source, node: ast.expr) -> Iterator[Mutation]:
    """Put ``not (...)`` around a condition that has no operator of its own to invert."""
    has_operator = isinstance(node, (ast.Compare, ast.BoolOp)) or (
        isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    )
    if not has_operator:
        start, end = source.find_span(node)
        yield source.make_mutation("invert", (start, end), f"not ({source.text[start:end]})")


_OPERATORS = {
    ast.BinOp: _break_binary,
    ast.UnaryOp: _break_unary,
    ast.Compare: _break_comparison,
    ast.BoolOp: _break_boolean,
    ast.Constant: _break_constant,
    ast.Call: _swap_arguments,
}
