"""The commands: their flags, and what each of them runs.

Each command imports the heavy libraries that it needs, after its arguments have been parsed.
"""

import argparse
import importlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from roseinfer import __version__
from roseinfer.config.api_keys import KEYS_VARIABLE
from roseinfer.config.flags import Parser, add_config_flags, num_engines, parser_of
from roseinfer.config.sources import LoadedConfig
from roseinfer.errors import ConfigError
from roseinfer.messages import Seed, Temperature, TokenCount, TopK, TopP
from roseinfer.model.kernels.library import LEVELS

_BLAS_THREADS = "OPENBLAS_NUM_THREADS"

Run = Callable[[argparse.Namespace, LoadedConfig], int]


def _later(module: str, function: str = "run") -> Run:
    """Import the module of a command when the command runs."""

    def run(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
        return int(getattr(importlib.import_module(module), function)(arguments, loaded))

    return run


def _add_command(
    commands: "argparse._SubParsersAction[Parser]",
    name: str,
    about: str,
    run: Run | None = None,
    operands: str = "",
) -> Parser:
    """A command that runs `run`, or one with commands of its own."""
    usage = f"%(prog)s [options]{operands}" if run else None
    sub = commands.add_parser(name, help=about, description=about, usage=usage)
    sub.set_defaults(parser=sub, run=run)
    return sub


def make_parser() -> Parser:
    """Make the parser of all commands; what it parses has `run`, which runs the command, and `parser`, its own."""
    from roseinfer.explain import flags as explain_flags

    parser = Parser(prog="roseinfer", description="An LLM inference server; every millisecond of latency has a name.")
    parser.add_argument("--version", action="version", version=f"roseinfer {__version__}")
    parser.set_defaults(parser=parser, config=None, defaults={})
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="COMMAND")

    add_config_flags(
        _add_command(commands, "serve", "Serve OpenAI's and Anthropic's APIs, until SIGTERM or Ctrl-C.", _serve)
    )
    generate = _add_command(
        commands, "generate", "Continue one prompt and stream the text to standard output.", _generate, " PROMPT"
    )
    generate.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads it from standard input")
    _add_sampling_flags(generate, temperature=0.0)
    add_config_flags(generate)
    chat = _add_command(commands, "chat", "Talk to the model; /help lists the commands.", _chat)
    chat.add_argument("--system", metavar="TEXT", help="system prompt")
    _add_sampling_flags(chat, temperature=0.7)
    add_config_flags(chat)
    _add_batch(_add_command(commands, "batch", "Answer a file of requests in OpenAI's batch format.", _batch))
    _add_bench(_add_command(commands, "bench", "Measure the engine or a server, simulate, replay."))
    about = "Say in words and numbers what the gaps between tokens went to."
    explain = _later("roseinfer.explain.command", "run_explain")
    explain_flags.add_explain(_add_command(commands, "explain", about, explain, " URL|FILE"))
    about = "Watch a server: requests, latency, causes of slow gaps."
    explain_flags.add_top(_add_command(commands, "top", about, _later("roseinfer.explain.top", "run_top"), " URL"))
    about = "Say whether and how a checkpoint would be served, and the memory it takes, before its weights are there."
    models = _add_command(commands, "models", about, _later("roseinfer.cli.models"), " CHECKPOINT")
    models.add_argument("checkpoint", metavar="CHECKPOINT", help="a directory, or a Hugging Face id")
    models.add_argument("--revision", metavar="R", help="branch, tag or commit on Hugging Face")
    models.add_argument("--json", action="store_true", help="as JSON")
    _add_kernels(_add_command(commands, "kernels", "Compile the CPU kernels, or list what is compiled."))
    about = "Print the configuration, its JSON Schema or its documentation."
    config = _add_command(commands, "config", about, _config, " {show,schema,docs}")
    config.add_argument(
        "what", choices=("show", "schema", "docs"), help="merged tree with sources; JSON Schema; Markdown"
    )
    add_config_flags(config)
    return parser


@contextmanager
def _one_thread_of_blas() -> Iterator[None]:
    """Where numpy's OpenBLAS can start no thread it sends SIGINT, by which a server would end as if asked to.

    The engine gets the environment as it was.
    """
    before = os.environ.get(_BLAS_THREADS)
    os.environ[_BLAS_THREADS] = "1"
    try:
        yield
    finally:
        del os.environ[_BLAS_THREADS]
        if before is not None:
            os.environ[_BLAS_THREADS] = before


def _serve(_: argparse.Namespace, loaded: LoadedConfig) -> int:
    with _one_thread_of_blas():
        from roseinfer import serving

    return serving.serve(loaded.config, os.environ.get(KEYS_VARIABLE, ""))


def _generate(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
    from roseinfer.cli import terminal

    prompt = terminal.read_prompt() if arguments.prompt == "-" else arguments.prompt
    return terminal.generate(loaded.config, prompt, terminal.Sampling.of(arguments))


def _chat(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
    from roseinfer.cli import terminal

    return terminal.chat(loaded.config, arguments.system, terminal.Sampling.of(arguments))


def _add_batch(parser: Parser) -> None:
    parser.add_argument("--input", type=Path, required=True, metavar="FILE", help="the requests, one a line")
    parser.add_argument(
        "--output",
        type=Path,
        required=True,
        metavar="FILE",
        help="the answers, in the order of the requests; errors go to a file beside it, *.errors.jsonl",
    )
    parser.add_argument(
        "--ray-engines",
        type=num_engines,
        metavar="N",
        help="spread the requests over N engines on a Ray cluster, or over N-M, as many as they need; needs the extra "
        "ray; docs/fleet.md",
    )
    add_config_flags(parser)


def _batch(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
    from roseinfer.batch import command

    answer = None
    if arguments.ray_engines is not None:
        from roseinfer import ray

        try:
            answer = partial(ray.answer_all, engines=arguments.ray_engines)
        except ConfigError as error:  # what it needs is not installed
            raise ConfigError(error.reason, param="--ray-engines") from None
    return command.run(arguments.input, arguments.output, loaded.config, answer)


def _add_sampling_flags(parser: Parser, *, temperature: float) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens", type=parser_of(TokenCount), metavar="N", help="default: 256, or what the context has room for"
    )
    group.add_argument(
        "--temperature",
        type=parser_of(Temperature),
        default=temperature,
        metavar="T",
        help=f"0 is greedy; default: {temperature:g}",
    )
    group.add_argument(
        "--top-p", type=parser_of(TopP), default=1.0, metavar="P", help="keep the likeliest mass P; default: 1"
    )
    group.add_argument(
        "--top-k", type=parser_of(TopK), default=0, metavar="K", help="keep the K likeliest tokens; 0, the default, all"
    )
    group.add_argument(
        "--seed", type=parser_of(Seed), metavar="S", help="the same seed gives the same text; default: a new one"
    )
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")


def _add_bench(parser: Parser) -> None:
    from roseinfer.bench.options import (
        DEFAULTS,
        add_compare,
        add_replay,
        add_scheduler,
        add_serve,
        add_simulate,
        add_streaming,
    )

    kinds = parser.add_subparsers(required=True, metavar="BENCHMARK", dest="BENCHMARK")

    def add(name: str, about: str, add_flags: Callable[[Parser], None], run: Run, operands: str = "") -> Parser:
        sub = _add_command(kinds, name, about, run, operands)
        add_flags(sub)
        return sub

    about = "Requests on a schedule, each streamed: latency and its parts."
    streaming = add("streaming", about, add_streaming, _later("roseinfer.bench.seeds.session"))
    about = "A batch of requests at once, online or offline."
    scheduler = add("scheduler", about, add_scheduler, _later("roseinfer.bench.seeds.session"))
    for seed in (streaming, scheduler):
        seed.set_defaults(defaults=DEFAULTS)
    add("serve", "A load through HTTP: what its clients see, and where the time went.", add_serve, _load)
    about = "A load through the real scheduler on a virtual clock."
    add("simulate", about, add_simulate, _later("roseinfer.bench.simulate.simulate"))
    about = "Ask a recording again, of a server or of the simulator."
    add("replay", about, add_replay, _later("roseinfer.bench.simulate.replay"), " RECORDING")
    about = "Two servers or results: better, worse or noise."
    add("compare", about, add_compare, _later("roseinfer.bench.compare.compare"), " [A B]")


def _load(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
    from roseinfer.bench.load import serve, sweep

    return serve.run(arguments, loaded) if arguments.sweep is None else sweep.run(arguments)


def _add_kernels(parser: Parser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="ACTION")
    about = "Compile the CPU kernels with the C++ compiler on the PATH, or the one in CXX."
    build = _add_command(actions, "build", about, _build_kernels)
    build.add_argument(
        "--level",
        action="append",
        choices=[*LEVELS, "all"],
        help="repeatable; default: the highest that this processor has; all: those of the compiler's architecture",
    )
    about = "The levels, whether this processor has them, and where they are built."
    for sub in (build, _add_command(actions, "list", about, _later("roseinfer.cli.kernels", "run_list"))):
        add_config_flags(sub)


def _build_kernels(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
    from roseinfer.cli import kernels

    return kernels.build(arguments.level, loaded.config, os.environ.get("CXX") or None)


def _config(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
    from roseinfer.config import docs as config_docs

    match arguments.what:
        case "show":
            print(config_docs.show(loaded), end="")
        case "schema":
            print(json.dumps(config_docs.json_schema(), indent=2))
        case _:
            print(config_docs.markdown(), end="")
    return 0
