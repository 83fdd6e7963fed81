"""Makes the mutants of a module: copies of its source, each with one small mistake.

Most operators are those of cosmic-ray. This module adds those that a transaction needs: a missing
statement, a number twice as large. Needs cosmic-ray, but neither Keras nor a backend.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["PACKAGE", "Mutant", "function_at", "header", "mutants", "replaced"]

PACKAGE = Path(__file__).parents[1] / "keras_nanguard"

BINARY = ("Add_Sub", "Sub_Add", "Mul_Div", "Div_Mul", "FloorDiv_Mul", "Mod_Mul", "Pow_Mul", "RShift_LShift", "LShift_RShift")
ORDERS = ("Lt_LtE", "Lt_GtE", "LtE_Lt", "LtE_Gt", "Gt_GtE", "Gt_LtE", "GtE_Gt", "GtE_Lt")
COMPARISONS = ("Eq_NotEq", "NotEq_Eq", *ORDERS, "Is_IsNot", "IsNot_Is")

OPERATORS = (
    *(f"ReplaceBinaryOperator_{pair}" for pair in (*BINARY, "BitOr_BitAnd", "BitAnd_BitOr")),
    *(f"ReplaceComparisonOperator_{pair}" for pair in COMPARISONS),
    *(f"ReplaceUnaryOperator_Delete_{name}" for name in ("Not", "USub", "Invert")),
    *("AddNot", "ReplaceTrueWithFalse", "ReplaceFalseWithTrue", "ReplaceAndWithOr", "ReplaceOrWithAnd"),
    *("ReplaceBreakWithContinue", "ReplaceContinueWithBreak", "ExceptionReplacer", "ZeroIterationForLoop"),
)
"""Operators of cosmic-ray: for each the one or two replacements that are hardest to detect, not all
eleven.
"""


@dataclass(frozen=True)
class Mutant:
    """A mistake in one place of a module.

    Attributes:
        module: path of the module within the package.
        function: its function, `""` at the level of the module.
        operator: the operator that made it.
        line: the line where it begins.
        before, after: the lines that differ, without and with the mistake.
        nth: its number among mutants with equal lines.
        start, end, text: the place in the source, and the replacement.
    """

    module: str
    function: str
    operator: str
    line: int
    before: str
    after: str
    nth: int
    start: int
    end: int
    text: str

    @property
    def key(self) -> str:
        """Identifies it, also after lines were added elsewhere."""
        return json.dumps([self.module, self.function, self.before, self.after, self.nth])

    def source(self) -> str:
        """Return the source of the module with the mistake."""
        return replaced((PACKAGE / self.module).read_text("utf-8"), self.start, self.end, self.text)


def replaced(source: str, start: int, end: int, text: str) -> str:
    """Return a source with another text in one place."""
    return source[:start] + text + source[end:]


def mutants(module: str) -> list[Mutant]:
    """Return every mutant of a module, except those that differ only in annotations, docstrings,
    decorators and messages.
    """
    source = (PACKAGE / module).read_text("utf-8")
    seen, made, alike = {_meaning(source)}, [], {}
    for operator, mutated in _mutated(source):
        try:
            meaning = _meaning(mutated)
        except SyntaxError:  # `- -1`, and the like
            continue
        if meaning in seen:
            continue
        seen.add(meaning)
        start, end, text = _difference(source, mutated)
        line = source.count("\n", 0, start) + 1
        before, after = _lines(source, start, end), _lines(mutated, start, start + len(text))
        found = function_at(ast.parse(source), line), before, after
        alike[found] = alike.get(found, -1) + 1
        made.append(Mutant(module, found[0], operator, line, before, after, alike[found], start, end, text))
    return sorted(made, key=lambda mutant: mutant.start)


def function_at(tree: ast.Module, line: int) -> str:
    """Return the qualified name of the innermost function or class around a line, `""` for none."""
    names: list[str] = []
    nodes: list[ast.AST] = [tree]
    while nodes:
        node = nodes.pop()
        for inner in ast.iter_child_nodes(node):
            if getattr(inner, "lineno", 0) <= line <= getattr(inner, "end_lineno", 0):
                names += [inner.name] if isinstance(inner, (ast.FunctionDef, ast.ClassDef)) else []
                nodes = [inner]
    return ".".join(names)


def header(tree: ast.Module, line: int) -> tuple[int, int]:
    """Return the first and the last line of the innermost statement around a line; of a block only
    its head.
    """
    best = (line, line)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0):
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno or 0
            if line <= max(last, node.lineno):
                best = node.lineno, max(last, node.lineno)
    return best


def _lines(source: str, start: int, end: int) -> str:
    first = source.rfind("\n", 0, start) + 1
    last = source.find("\n", max(start, end))
    return "\n".join(line.strip() for line in source[first : None if last < 0 else last].split("\n") if line.strip())


def _difference(one: str, other: str) -> tuple[int, int, str]:
    """Return start and end of the part of the first text that differs, and its replacement in the
    other text.
    """
    shorter, start = min(len(one), len(other)), 0
    while start < shorter and one[start] == other[start]:
        start += 1
    same = 0
    while same < shorter - start and one[-1 - same] == other[-1 - same]:
        same += 1
    return start, len(one) - same, other[start : len(other) - same]


class _Skipped(ast.NodeTransformer):
    """Skips nodes that are not mutated."""

    def visit(self, node: ast.AST) -> Any:
        node = self.generic_visit(node)
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            node.decorator_list = []
        if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)) and node.body and _is_text(node.body[0]):
            del node.body[0]
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        if isinstance(node, ast.Raise):
            node.cause = None
            if isinstance(node.exc, ast.Call):
                node.exc.args, node.exc.keywords = [], []
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            node.value = ast.Constant(None)
        return node


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _meaning(source: str) -> str:
    return ast.dump(_Skipped().visit(ast.parse(source)))


def _mutated(source: str) -> Iterator[tuple[str, str]]:
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.operators.provider import OperatorProvider

    known = OperatorProvider()
    operators = {name: known[name]() for name in OPERATORS} | {kind.__name__: kind() for kind in _own_operators()}
    for name, operator in operators.items():
        occurrence = 0
        while (mutated := mutate_code(source, operator, occurrence)) is not None:
            yield name, mutated
            occurrence += 1


def _own_operators() -> tuple[type[Any], ...]:
    import parso
    from cosmic_ray.operators.operator import Operator

    class Own(Operator):
        @classmethod
        def examples(cls) -> tuple[Any, ...]:
            return ()

        def ways(self, node: Any) -> list[str]:
            """Return the possible replacements of a node."""
            raise NotImplementedError

        def mutation_positions(self, node: Any) -> Iterator[Any]:
            return iter([(node.start_pos, node.end_pos)] * len(self.ways(node)))

        def mutate(self, node: Any, index: int) -> Any:
            leaf = node.get_first_leaf()
            return parso.python.tree.Name(self.ways(node)[index], node.start_pos, leaf.prefix)

    class ReplaceNumber(Own):
        """Whole numbers by their neighbours; others by half and twice the value, because 1e24 + 1
        is 1e24.
        """

        def ways(self, node: Any) -> list[str]:
            if node.type != "number":
                return []
            value = ast.literal_eval(node.value)
            if isinstance(value, int):
                return [str(value + 1), f"({value - 1})" if value < 1 else str(value - 1)]
            return [repr(2 * value), repr(value / 2)] if value else ["1.0"]

    class DeleteStatement(Own):
        """A call, an assignment to an attribute or an item, or an augmented assignment: statements
        whose absence may go undetected.
        """

        def ways(self, node: Any) -> list[str]:
            statement = node.parent is not None and node.parent.type == "simple_stmt" and node is node.parent.children[0]
            if not statement or parso.tree.search_ancestor(node, "funcdef") is None:
                return []
            if node.type == "expr_stmt":
                target, how = node.children[0], node.children[1]
                if target.type == "name" and getattr(how, "value", "=") == "=":
                    return []  # nearly always a NameError
            elif node.type not in ("atom_expr", "raise_stmt") or "NotImplementedError" in node.get_code():
                return []
            return ["pass" + "\\\n" * (node.end_pos[0] - node.start_pos[0])]

    class ReturnNothing(Own):
        def ways(self, node: Any) -> list[str]:
            if node.type != "return_stmt" or node.children[1].get_code().strip() in ("None", "False"):
                return []
            return ["return None" + "\\\n" * (node.end_pos[0] - node.start_pos[0])]

    class ReplaceInWithNotIn(Own):
        def ways(self, node: Any) -> list[str]:
            within = node.parent is not None and node.parent.type == "comparison"
            return ["not in"] if within and node.type == "keyword" and node.value == "in" else []

    class ReplaceNotInWithIn(Own):
        def ways(self, node: Any) -> list[str]:
            return ["in"] if node.type == "comp_op" and [leaf.value for leaf in node.children] == ["not", "in"] else []

    class NegateFilter(Own):
        """The condition of a comprehension."""

        def ways(self, node: Any) -> list[str]:
            condition = node.parent is not None and node.parent.type == "comp_if" and node is node.parent.children[1]
            return [f"(not ({node.get_code(include_prefix=False)}))"] if condition else []

    return ReplaceNumber, DeleteStatement, ReturnNothing, ReplaceInWithNotIn, ReplaceNotInWithIn, NegateFilter


if __name__ == "__main__":
    for given in sys.argv[1:]:
        for made in mutants(given):
            print(json.dumps(asdict(made)))
