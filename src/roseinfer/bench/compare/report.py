"""The report of a comparison, as lines of text and as JSON for a gate."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from roseinfer.bench.compare.comparison import Finding, Outcome, Thresholds, overall
from roseinfer.bench.report import header_lines, write_json

COMPARISON_FORMAT = "roseinfer bench compare 1"


class Comparison(NamedTuple):
    """The findings, or the objections for which nothing was judged."""

    findings: list[Finding]
    objections: list[str]
    num_runs: tuple[int, int]
    is_interleaved: bool
    thresholds: Thresholds
    left_out: list[str]  # metrics that some run has no figure of, or none above zero

    @property
    def outcome(self) -> Outcome:
        return Outcome.VOID if self.objections else overall(self.findings)


def lines_of(comparison: Comparison, header: Mapping[str, Any]) -> list[str]:
    """The report."""
    num_a, num_b = comparison.num_runs
    turns = "in turn" if comparison.is_interleaved else "NOT in turn: a machine that changed in between looks like this"
    lines = ["=== comparison ===", *header_lines(header), f"Runs: {num_a} of A and {num_b} of B, {turns}"]
    if comparison.objections:
        return [*lines, *(f"Void: {objection}" for objection in comparison.objections)]
    if comparison.left_out:
        lines.append(f"Left out, without a figure above zero in every run: {', '.join(comparison.left_out)}")
    sure, effect, drift = comparison.thresholds
    lines.append(f"Intervals: {sure:.0%} for all together; noise below {effect:.1%}, void above {drift:.1%} of drift")
    outcomes = Counter(finding.outcome for finding in comparison.findings)
    said = ", ".join(f"{outcomes[outcome]} {outcome}" for outcome in Outcome if outcomes[outcome])
    return [*lines, *_table(comparison.findings), f"Verdict: {comparison.outcome} ({said})"]


def _table(findings: Sequence[Finding]) -> list[str]:
    rows: list[tuple[str, ...]] = [("metric", "A", "B", "effect", "interval", "drift", "verdict")]
    for finding in findings:
        interval = f"{finding.low:+.1%} to {finding.high:+.1%}"
        values = (f"{finding.a:.4g}", f"{finding.b:.4g}", f"{finding.effect:+.1%}", interval, f"{finding.drift:.1%}")
        rows.append((f"{finding.metric}, {finding.unit}", *values, finding.outcome))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
    return lines


def write_comparison(file: Path, comparison: Comparison, settings: Mapping[str, Any]) -> None:
    """Effects, intervals and drift are shares: 0.05 is five percent. Raises ConfigError."""
    content = {
        "format": COMPARISON_FORMAT,
        "outcome": comparison.outcome,
        "objections": comparison.objections,
        "num_runs": {"a": comparison.num_runs[0], "b": comparison.num_runs[1]},
        "is_interleaved": comparison.is_interleaved,
        "thresholds": comparison.thresholds._asdict(),
        "settings": settings,
        "left_out": comparison.left_out,
        "findings": msgspec.to_builtins(comparison.findings),
    }
    write_json(file, content)
