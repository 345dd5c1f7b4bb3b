"""A PromQL expression taken apart: its selectors, its labels, its comparisons. Knows no metric."""

from collections.abc import Iterator
from dataclasses import dataclass

import promql_parser as promql

COMPARISONS = {"==", "!=", ">", "<", ">=", "<="}
SET_OPERATIONS = {"and", "or", "unless"}


@dataclass(frozen=True, slots=True)
class Selector:
    name: str
    matchers: tuple[tuple[str, str, str], ...]  # label, operator, value


@dataclass(frozen=True, slots=True)
class Comparison:
    """`left operator number`, with the text of the left side."""

    left: str
    operator: str
    number: float


def nodes(expression: str) -> list[promql.Expr]:
    found: list[promql.Expr] = []

    def visit(node: promql.Expr) -> bool:
        found.append(node)
        return True

    promql.walk(promql.parse(expression), visit)
    return found


def selectors(expression: str) -> list[Selector]:
    found = []
    for node in nodes(expression):
        if isinstance(node, promql.VectorSelector):
            assert node.name is not None, "a selector without a name"
            matchers = tuple((each.name, str(each.op), each.value) for each in node.matchers.matchers)
            found.append(Selector(node.name, matchers))
    return found


def grouping_labels(expression: str) -> set[str]:
    """Labels that aggregations and vector matching name."""
    found: set[str] = set()
    for node in nodes(expression):
        if isinstance(node, promql.AggregateExpr) and node.modifier is not None:
            found |= set(node.modifier.labels)
        if isinstance(node, promql.BinaryExpr) and node.modifier is not None and node.modifier.matching is not None:
            found |= set(node.modifier.matching.labels)
    return found


def comparisons(expression: str) -> list[Comparison]:
    """With a plain number, as `x > 5`."""
    return [
        Comparison(node.lhs.prettify(), str(node.op), node.rhs.val)
        for node in nodes(expression)
        if isinstance(node, promql.BinaryExpr)
        and str(node.op) in COMPARISONS
        and isinstance(node.rhs, promql.NumberLiteral)
    ]


def measured(expression: str) -> Iterator[str]:
    """What the expression looks at, without its conditions: the sides of its comparisons that are not thresholds."""
    yield from _measured(promql.parse(expression))


def _measured(node: promql.Expr) -> Iterator[str]:
    if isinstance(node, promql.ParenExpr):
        yield from _measured(node.expr)
    elif isinstance(node, promql.BinaryExpr) and str(node.op) in SET_OPERATIONS:
        yield from _measured(node.lhs)
        yield from _measured(node.rhs)
    elif isinstance(node, promql.BinaryExpr) and str(node.op) in COMPARISONS:
        yield node.lhs.prettify()
    elif not (isinstance(node, promql.Call) and node.func.name == "absent"):
        yield node.prettify()
