"""Writes the tables of model types into docs/models.md: who serves them, what the tests find, and what is refused."""

from generated_files import filled
from roseinfer.model.families.registry import FAMILIES
from roseinfer.model.families.tested import REFUSED, TESTED, Findings

NATIVE = {family.model_type for family in FAMILIES.values()}


def page() -> str:
    found = TESTED | {"gpt2": Findings("GPT-2")}  # which no test runs by transformers' code
    rows = sorted(((name, found[name]) for name in NATIVE | found.keys()), key=lambda row: row[1].checkpoints.lower())
    served = [
        "| checkpoints | `model_type` | computed by | CUDA graphs |",
        "|---|---|---|---|",
    ]
    served += [_row(name, findings) for name, findings in rows]
    refused = ["| `model_type` | refused, because it |", "|---|---|"]
    refused += [f"| `{name}` | {reason} |" for name, reason in REFUSED.items()]
    return filled("docs/models.md", {"table of models": "\n".join([*served, "", *refused, ""])})


def _row(name: str, findings: Findings) -> str:
    path = "a file of ours" if name in NATIVE else "transformers"
    graphs = "yes" if findings.is_capturable else "no, it runs eagerly"
    return f"| {findings.checkpoints} | `{name}` | {path} | {graphs} |"
