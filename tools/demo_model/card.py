"""Renders the model card from what was trained and measured.

The prose is `card.md` beside this file, with the places of the numbers in braces.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from demo_model.corpus import Document
from demo_model.network import Shape
from demo_model.training import Recipe

_TEMPLATE = Path(__file__).with_name("card.md")


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a reader needs to train the same weights again, and how long that took."""

    fingerprint: str
    command: str
    versions: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Facts:
    """What was measured on the files as written. Losses are nats per token; samples are (prompt, continuation)."""

    num_parameters: int
    num_train_tokens: int
    num_held_out_tokens: int
    bytes_per_token: float
    losses: Mapping[str, float]
    samples: Sequence[tuple[str, str]]
    files: Mapping[str, bytes]


def render(documents: Sequence[Document], shape: Shape, recipe: Recipe, provenance: Provenance, facts: Facts) -> str:
    """The card, in Markdown."""
    num_tokens = recipe.steps * recipe.tokens_per_step
    return _TEMPLATE.read_text(encoding="utf-8").format(
        shape=shape,
        recipe=recipe,
        provenance=provenance,
        facts=facts,
        head_width=shape.width // shape.num_heads,
        mlp_width=4 * shape.width,
        minutes=provenance.seconds / 60,
        tokens_per_second=num_tokens / provenance.seconds,
        epochs=num_tokens / facts.num_train_tokens,
        data_rows="\n".join(_data_rows(documents)),
        recipe_rows="\n".join(f"| {name.replace('_', ' ')} | {value} |" for name, value in asdict(recipe).items()),
        loss_rows="\n".join(f"| {k} | {v:.3f} | {math.exp(v):.1f} |" for k, v in facts.losses.items()),
        file_rows="\n".join(
            f"| `{k}` | {len(v):,} | `{hashlib.sha256(v).hexdigest()}` |" for k, v in facts.files.items()
        ),
        samples="\n\n".join(f"````text\n{prompt}⏵{continuation}\n````" for prompt, continuation in facts.samples),
    )


def _data_rows(documents: Sequence[Document]) -> list[str]:
    rows = []
    for source, form, copies in sorted({(d.source, d.form, d.copies) for d in documents}):
        group = [d for d in documents if (d.source, d.form) == (source, form)]
        held_out = sum(d.num_bytes for d in group if d.is_held_out)
        trained = sum(d.num_bytes for d in group) - held_out
        rows.append(f"| {source} | {form} | {len(group):,} | {trained / 1e3:,.0f} | {copies} | {held_out / 1e3:,.0f} |")
    return rows
