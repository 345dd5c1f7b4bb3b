"""Makes embeddings of hidden rows, and reads how a checkpoint wants them made.

A checkpoint of sentence-transformers lists its modules in `modules.json`: which rows are pooled, and whether the result
has length 1. One without that list is pooled at its last token and normalised, as Qwen3-Embedding's.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch

from roseinfer.engine.core.batch import POOLED_UNIT, Int32Array, PooledRow
from roseinfer.errors import ConfigError
from roseinfer.messages import EmbeddingInfo, Pooling

T = TypeVar("T")

_MODES: dict[str, Pooling] = {
    "lasttoken": "last",
    "mean": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
}
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


class _Module(msgspec.Struct):
    """An entry of modules.json: a class by its whole name, and the folder of what it was saved with."""

    type: str
    path: str = ""


def read_embedding(directory: Path, size: int) -> EmbeddingInfo:
    """How the checkpoint's modules make embeddings of rows of `size` numbers. Raises ConfigError."""
    listed = directory / "modules.json"
    if not listed.exists():
        return EmbeddingInfo(size=size)
    modules = {module.type.rpartition(".")[2]: module.path for module in _read(listed, list[_Module])}
    others = [name for name in modules if name not in _SERVED]
    mode, unserved = _mode(directory / modules["Pooling"] / "config.json") if "Pooling" in modules else ("last", "")
    if others:
        unserved = f"the module {others[0]}"
    return EmbeddingInfo(size=size, pooling=mode, is_normalized="Normalize" in modules, unserved=unserved)


def _mode(file: Path) -> tuple[Pooling, str]:
    """The pooling of a module's file, and what it asks for instead if that is not served.

    sentence-transformers 6 writes the names of modes, older versions whether each is on. Without any it is the mean.
    """
    config = _read(file, dict[str, Any])
    named = config.get("pooling_mode") or [name for name in config if name.startswith("pooling_mode_") and config[name]]
    wanted = [named] if isinstance(named, str) else list(named) or ["mean"]
    if len(wanted) == 1 and wanted[0] in _MODES:
        return _MODES[wanted[0]], ""
    return "last", f"the pooling {' and '.join(map(str, wanted))}"


def _read(file: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{file} cannot be read: {reason}.", param="model.path") from error
