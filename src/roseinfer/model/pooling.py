"""Makes embeddings of hidden rows, and reads how a checkpoint wants them made.

A checkpoint of sentence-transformers lists its modules in `modules.json`: which rows are pooled, and whether the result
has length 1. One without that list is pooled at its last token and normalised, as Qwen3-Embedding's.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from roseinfer.engine.core.batch import POOLED_UNIT, Int32Array, Pooled, PooledRow
from roseinfer.messages import EmbeddingInfo, Pooling

_MODES: dict[str, Pooling] = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
_SERVED = {"Transformer", "Pooling", "Normalize"}


def pool(hidden: torch.Tensor, rows: Sequence[PooledRow], starts: Int32Array) -> list[torch.Tensor]:
    """The part [width] that each row of a step adds; a row's hidden rows are those from its start to the next one's."""
    parts = []
    for each in rows:
        start, end = int(starts[each.row]), int(starts[each.row + 1])
        if each.pooling == "last":
            parts.append(hidden[end - 1].to(torch.float32, copy=True))
        else:
            units = hidden[start:end].double() / POOLED_UNIT
            parts.append(units.round().to(torch.int64).sum(0))
    return parts


def to_host(parts: Sequence[torch.Tensor]) -> tuple[Pooled, ...]:
    return tuple(part.numpy() for part in parts)


def read_embedding(directory: Path, size: int) -> EmbeddingInfo:
    """How the checkpoint's modules make embeddings of rows of `size` numbers."""
    listed = directory / "modules.json"
    if not listed.exists():
        return EmbeddingInfo(size=size)
    modules = {module["type"].rpartition(".")[2]: module.get("path", "") for module in json.loads(listed.read_text())}
    others = [name for name in modules if name not in _SERVED]
    mode, unserved = _mode(directory / modules["Pooling"] / "config.json") if "Pooling" in modules else ("last", "")
    if others:
        unserved = f"the module {others[0]}"
    return EmbeddingInfo(size=size, pooling=mode, is_normalized="Normalize" in modules, unserved=unserved)


def _mode(file: Path) -> tuple[Pooling, str]:
    """The pooling of a module's file, and what it asks for instead if that is not served."""
    config: dict[str, Any] = json.loads(file.read_text())
    wanted = [name for name, is_on in config.items() if name.startswith("pooling_mode_") and is_on]
    served = [_MODES[name] for name in wanted if name in _MODES]
    if len(wanted) == 1 and served:
        return served[0], ""
    return "last", f"the pooling {' and '.join(wanted) or 'of none of its modes'}"
