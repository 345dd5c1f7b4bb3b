"""`roseinfer models`: whether and how a checkpoint would be served, and the memory it takes, from its config alone."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from roseinfer.config.sources import LoadedConfig
from roseinfer.errors import ConfigError
from roseinfer.model.attention.base import AttentionSpec
from roseinfer.model.families.registry import native_spec
from roseinfer.model.families.tested import TESTED
from roseinfer.model.weights.checkpoint import Checkpoint, resolve_checkpoint
from roseinfer.text.tokenizer.files import find_tokenizer

TYPES = {
    "float32": (4, torch.float32),
    "bfloat16": (2, torch.bfloat16),
    "int8": (1, torch.bfloat16),
    "int4": (0.5625, torch.bfloat16),  # with the scales
}
"""Of weights: the bytes of a number in a linear, and the type of everything else."""


def run(arguments: argparse.Namespace, _: LoadedConfig) -> int:
    """Print the outline of a checkpoint. 0 if it would be served, 2 if it is refused or lacks a part."""
    directory = resolve_checkpoint(arguments.checkpoint, arguments.revision, has_weights=False)
    facts = outline(directory)
    if facts["served_by"] != "refused":
        facts["lacks"] = _lack(directory, is_here=Path(arguments.checkpoint).is_dir())
    if arguments.json:
        sys.stdout.write(json.dumps(facts, indent=2) + "\n")
    else:
        _print(facts)
    return 2 if facts["served_by"] == "refused" or facts["lacks"] else 0


def _lack(directory: Path, *, is_here: bool) -> str | None:
    """Why a checkpoint of a kind that is served is not: it has no tokenizer, or, as a directory, no weights."""
    try:
        find_tokenizer(directory)
        if is_here:
            with Checkpoint(directory) as checkpoint:
                checkpoint.names  # noqa: B018 - reads the index and opens the files
    except ConfigError as error:
        return error.reason
    return None


def outline(directory: Path) -> dict[str, Any]:
    """Whether and how a checkpoint would be served, its shape, and its memory in each type, ready for JSON."""
    facts: dict[str, Any] = {"checkpoint": str(directory)}
    try:
        with Checkpoint(directory) as checkpoint:
            facts["architectures"] = checkpoint.architectures
            facts["model_type"] = checkpoint.config.get("model_type")
            facts["quantization"] = checkpoint.quantization and checkpoint.quantization.quant_method
            spec = native_spec(checkpoint)
            from roseinfer.model.families import transformers, transformers_loading  # which take seconds to import

            model = transformers_loading.modules(checkpoint, "eager" if spec else transformers_loading.IN_FIRST_PASS)
            attention = transformers.attention_of(model, checkpoint) if spec is None else spec.attention
            config = model.config.get_text_config(decoder=True)
            positions = transformers_loading.max_positions(config, checkpoint) if spec is None else spec.max_positions
    except ConfigError as error:
        return facts | {"served_by": "refused", "reason": error.reason}
    return facts | {
        "served_by": "native" if spec is not None else "transformers",
        "is_tested": spec is not None or facts["model_type"] in TESTED,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "positions": positions,
        "vocab_size": config.vocab_size,
        "layers": len(attention.windows),
        "heads": attention.num_heads,
        "kv_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "windows": sorted({window for window in attention.windows if window is not None}),
        "types": _types(model, attention),
    }


def _types(model: Any, attention: AttentionSpec) -> list[dict[str, Any]]:
    """The memory of weights and of a token's keys and values, and the tokens that this machine has room for.

    Both for `cache.dtype` `auto` and for `int8`.
    A table that is the head's weight too is held once, as the head holds it.
    """
    tables = {id(child.weight): child.weight for child in model.modules() if isinstance(child, nn.Embedding)}
    head = model.get_output_embeddings().weight
    in_tables = sum(table.numel() for table in tables.values() if table is not head)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2 and id(parameter) not in tables]
    in_linears = sum(matrix.numel() for matrix in matrices)
    if id(head) in tables:
        in_linears += head.numel()
    in_vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() < 2)
    available = _available_bytes()
    rows = []
    for name, (linear_bytes, dtype) in TYPES.items():
        linears = int(in_linears * linear_bytes)
        weights = linears + in_tables * dtype.itemsize + in_vectors * 4
        token, int8_token = attention.bytes_per_token(dtype), attention.bytes_per_token(torch.int8)
        rows.append(
            {
                "type": name,
                "weight_bytes": weights,
                "kv_bytes_per_token": token,
                "tokens_here": max(0, available - weights) // token,
                "kv_int8_bytes_per_token": int8_token,
                "tokens_here_with_kv_int8": max(0, available - weights) // int8_token,
            }
        )
    return rows


def _available_bytes() -> int:
    """Memory that programs can have, by Linux's account; elsewhere all that there is."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def _print(facts: dict[str, Any]) -> None:
    console = Console(highlight=False, markup=False, soft_wrap=True)
    kind = ", ".join(facts.get("architectures", ())) or facts.get("model_type")
    if facts["served_by"] == "refused":
        console.print(f"{kind}: refused. {facts['reason']}" if kind else facts["reason"])
        return
    is_native = facts["served_by"] == "native"
    how = "by a file of its own, the fastest way" if is_native else "by transformers' modelling code, with our layers"
    if facts["lacks"]:
        console.print(f"{kind}: cannot be served as it is. {facts['lacks']}")
        console.print(f"When it is whole it is served {how}.")
    else:
        console.print(f"{kind}: served {how}.")
    if not facts["is_tested"]:
        console.print("No test compares this type with transformers: a server does at start, and refuses what differs.")
    if facts["quantization"]:
        console.print(f"Its weights are quantised ({facts['quantization']}), and read as floats.")
    console.print(
        f"{facts['parameters']:,} parameters, {facts['layers']} layers, {facts['positions']:,} positions, "
        f"{facts['heads']} heads of {facts['head_dim']} over {facts['kv_heads']} of keys."
    )
    table = Table("type", "weights", "KV a token", "tokens that fit here", "KV in int8", "tokens that fit", box=None)
    for row in facts["types"]:
        tokens = []
        for size, number in (
            ("kv_bytes_per_token", "tokens_here"),
            ("kv_int8_bytes_per_token", "tokens_here_with_kv_int8"),
        ):
            tokens += [f"{row[size] / 1024:.1f} KiB", f"{row[number]:,}"]
        table.add_row(row["type"], _size(row["weight_bytes"]), *tokens)
    console.print(table)
