"""`roseinfer kernels`: compiles the CPU kernels, or lists the levels, which of them run here, and what is compiled."""

import argparse
from collections.abc import Sequence

from roseinfer.cli.progress import Progress
from roseinfer.config.options import Config
from roseinfer.config.sources import LoadedConfig
from roseinfer.errors import ConfigError
from roseinfer.model.kernels.library import (
    LEVELS,
    MACHINES,
    build_kernels,
    compiled_machine,
    find_built,
    find_compiler,
    is_whole,
    kernels_directory,
    levels_here,
    levels_of,
    machine,
    processor_flags,
    sources,
)


def build(names: Sequence[str] | None, config: Config, named_compiler: str | None) -> int:
    """Compile the levels of these names, `all` among them, or the highest of this processor. Raises ConfigError."""
    kernels_dir = kernels_directory(config.runner.kernels_dir)
    compiler = find_compiler(named_compiler)
    names = names or [level.name for level in levels_here()[-1:]]
    if not names:
        raise ConfigError("This processor has no level of the kernels; name one with --level to build it for another.")
    if "all" in names:
        names = [level.name for level in levels_of(compiled_machine(compiler))]
    for name in names:
        with Progress(f"compiling {name} kernels", total=len(sources())) as progress:
            path, is_new = build_kernels(LEVELS[name], kernels_dir, compiler, progress.count)
        print(f"{name}: {'built' if is_new else 'already built'}: {path}")
    return 0


def run_list(_: argparse.Namespace, loaded: LoadedConfig) -> int:
    """Print a line for each level of this machine, and which one `auto` takes."""
    kernels_dir = kernels_directory(loaded.config.runner.kernels_dir)
    levels, flags = levels_of(machine()), processor_flags()
    if not levels:
        print(f"There are kernels for {' and '.join(MACHINES)}, and this is {machine()}: plain torch serves, slower.")
        return 0
    lacking = {level.name: level.lacking(flags) for level in levels}
    paths = {level.name: find_built(level, kernels_dir) for level in levels}
    damaged = [name for name, path in paths.items() if path is not None and not is_whole(path)]
    width = max(map(len, paths))
    for name, path in paths.items():
        has = f"this processor lacks {', '.join(lacking[name])}" if lacking[name] else "this processor has it"
        print(f"{name:<{width}}  {has}  {'damaged: ' if name in damaged else ''}{path or 'not built'}")
    runnable = [name for name in paths if not lacking[name]]
    used = next((name for name in reversed(runnable) if paths[name] and name not in damaged), None)
    print(f"`auto` takes {used or 'none: without kernels all is computed by plain torch, slower'}.")
    if runnable and used != runnable[-1]:
        print(f"{runnable[-1]} would be faster: run `roseinfer kernels build`.")
    return 0
