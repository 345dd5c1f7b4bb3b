"""Makes the configuration of an engine for a benchmark, from the name of a precision and `path=value` pairs."""

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from roseinfer.config.options import Config
from roseinfer.config.sources import Given, load
from roseinfer.errors import ConfigError
from roseinfer.model.kernels.library import find_built, kernels_directory, levels_here
from roseinfer.runtime import memory

if TYPE_CHECKING:
    from roseinfer.model.runner import ModelRunner  # imports torch

PRECISIONS = ("float32", "bfloat16", "int8")


def precision_options(precision: str) -> dict[str, str]:
    """The options that a precision's name stands for; int8 and int4 are of the linears, their cache is in bfloat16."""
    if precision in ("int8", "int4"):
        return {"model.dtype": "bfloat16", "model.quantization": precision}
    return {"model.dtype": precision}


def parse(pairs: Iterable[str]) -> dict[str, str]:
    """Values by path, of pairs such as `runner.staging=pageable`."""
    return dict(pair.split("=", 1) for pair in pairs)


def engine_command(model: Path, options: Mapping[str, str]) -> list[str]:
    """The command of `benchmarks.peers.engine_only` with these options, by path."""
    pairs = [word for path, value in options.items() for word in ("--option", f"{path}={value}")]
    return [sys.executable, "-m", "benchmarks.peers.engine_only", str(model), *pairs]


def require_kernels() -> None:
    """Raises ConfigError unless this processor's kernels are built: plain torch would be measured by mistake."""
    levels = levels_here()
    if levels and find_built(levels[-1], kernels_directory(None)) is None:
        raise ConfigError(f"The {levels[-1].name} kernels are not built: run `roseinfer kernels build` first.")


def load_as_engines_do(config: Config, num_slots: int) -> "ModelRunner":
    """A runner without an engine, with the settings of malloc and pages that the engine's process has."""
    memory.prefer_huge_pages()
    from roseinfer.model.runner import load_runner

    runner = load_runner(config, num_slots, lambda *_: None)
    memory.give_back()
    memory.keep_freed_memory()
    return runner


def config_of(model: Path, options: Mapping[str, str]) -> Config:
    """Raises ConfigError."""
    if options.get("runner.device", "cpu") == "cpu":
        require_kernels()
    given = {"model.path": str(model), **options}
    return load({path: Given(value, "the benchmark") for path, value in given.items()}).config
