"""Writes the tables of metrics, and the bounds of their buckets, into docs/metrics.md."""

from generated_files import filled
from roseinfer.observe.metrics.catalogue import CATALOGUE, GROUPS
from roseinfer.observe.metrics.exemplars import WITH_EXEMPLARS
from roseinfer.observe.metrics.row import InfoAtScrape, Row


def page() -> str:
    ladders = list(dict.fromkeys(row.buckets for row in CATALOGUE if row.buckets))
    parts = []
    for title, rows in GROUPS.items():
        parts.append(f"## {title}\n\n| metric | kind | unit | labels | meaning |\n|---|---|---|---|---|")
        parts.extend(_line(row, ladders) for row in rows)
        parts.append("")
    parts.append("## Buckets\n\nUpper bounds, inclusive; an unbounded bucket follows each ladder.\n")
    parts.extend(f"- **B{i}**: {', '.join(f'{bound:g}' for bound in ladder)}" for i, ladder in enumerate(ladders, 1))
    return filled("docs/metrics.md", {"tables of metrics": "\n".join([*parts, ""])})


def _line(row: Row, ladders: list[tuple[float, ...]]) -> str:
    labels = ["`model_name`"] if row.is_per_model else []
    for label in row.labels:
        values = ", ".join(f"`{value}`" for value in label.values)
        labels.append(f"`{label.name}`" + (f" = {values}" if values else ""))
    if isinstance(row.source, InfoAtScrape):
        labels.extend(f"`{name}`" for name in row.source.names)
    kind = f"{row.kind}, B{ladders.index(row.buckets) + 1}" if row.buckets else row.kind
    kind += ", exemplars" if row.name in WITH_EXEMPLARS else ""
    return f"| `{row.name}` | {kind} | {row.unit or '1'} | {'; '.join(labels)} | {row.help} |"
