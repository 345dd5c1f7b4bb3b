"""The command line: turns arguments into a `Config` and a call of one front door, and errors into exit codes.

Exit codes: 0 done or drained, 2 something the user gave cannot be used, 70 the engine failed, 130 interrupted.
Heavy libraries are imported by the command that needs them, after its arguments have been understood.
"""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence

from roseinfer import __version__
from roseinfer.config.api_keys import KEYS_VARIABLE
from roseinfer.config.flags import Parser, add_config_flags, parser_of, values_given
from roseinfer.config.sources import Given, LoadedConfig, build, gather
from roseinfer.errors import ConfigError, EngineError, RoseinferError
from roseinfer.messages import Seed, Temperature, TokenCount, TopK, TopP
from roseinfer.model.kernels.levels import LEVELS, find_built, kernels_directory, levels_here, sources

EXIT_USAGE = 2
EXIT_ENGINE = 70
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:2] == ["engine", "--fd"]:  # the child of the process transport: it must be up before all else
        from roseinfer.wiring import engine_main

        return engine_main(int(arguments[2]))
    given: dict[str, Given] = {}
    try:
        parsed = _parser().parse_args(arguments)
        given.update(parsed.defaults)
        given.update(_from_system(os.environ))
        given.update(gather(values_given(parsed), os.environ, parsed.config))
        return int(parsed.run(parsed, build(given)))
    except EngineError as error:
        return _fail(error, given, EXIT_ENGINE)
    except RoseinferError as error:
        return _fail(error, given, EXIT_USAGE)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, as in `| head`; silence Python's flush at exit too
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _from_system(env: Mapping[str, str]) -> dict[str, Given]:
    """What variables that are not ours say about our options; any other source is stronger."""
    cache = env.get("XDG_CACHE_HOME", "")
    return {"runner.kernels_dir": Given(f"{cache}/roseinfer/kernels", "XDG_CACHE_HOME")} if cache else {}


def _fail(error: RoseinferError, given: Mapping[str, Given], code: int) -> int:
    """One line that names the value and whoever gave it."""
    where = ""
    if error.param is not None:
        source = f" (from {given[error.param].source})" if error.param in given else ""
        where = f"{error.param}{source}: "
    print(f"roseinfer: {where}{error.reason}", file=sys.stderr)
    return code


def _parser() -> Parser:
    parser = Parser(prog="roseinfer", description="An LLM inference server; every millisecond of latency has a name.")
    parser.add_argument("--version", action="version", version=f"roseinfer {__version__}")
    parser.set_defaults(parser=parser, config=None, defaults={})
    commands = parser.add_subparsers(required=True, metavar="COMMAND", dest="COMMAND")

    def command(name: str, help: str, usage: str | None = "%(prog)s [options]") -> Parser:  # noqa: A002
        sub = commands.add_parser(name, help=help, description=help, usage=usage)
        assert isinstance(sub, Parser)
        sub.set_defaults(parser=sub)
        return sub

    _add_serve(command("serve", "Serve the OpenAI API, until SIGTERM or Ctrl-C."))
    _add_generate(
        command("generate", "Continue one prompt and stream the text to standard output.", "%(prog)s [options] PROMPT")
    )
    _add_chat(command("chat", "Talk to the model; /help lists the commands."))
    _add_bench(command("bench", "Measure the engine or a server, simulate, replay.", usage=None))
    _add_explain(
        command(
            "explain", "Say in words and numbers what the gaps between tokens went to.", "%(prog)s [options] URL|FILE"
        )
    )
    _add_top(command("top", "Watch a server: requests, latency, causes of slow gaps.", "%(prog)s [options] URL"))
    _add_kernels(command("kernels", "Compile the CPU kernels, or list what is compiled.", usage=None))
    _add_config(
        command(
            "config",
            "Print the configuration, its JSON Schema or its documentation.",
            "%(prog)s [options] {show,schema,docs}",
        )
    )
    return parser


def _add_serve(parser: Parser) -> None:
    parser.set_defaults(run=_serve)
    add_config_flags(parser)


def _serve(_: argparse.Namespace, loaded: LoadedConfig) -> int:
    from roseinfer import wiring

    return wiring.serve(loaded.config, os.environ.get(KEYS_VARIABLE, ""))


def _add_generate(parser: Parser) -> None:
    parser.set_defaults(run=_generate)
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads it from standard input")
    _add_sampling_flags(parser, temperature=0.0)
    add_config_flags(parser)


def _generate(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
    from roseinfer.cli import terminal

    prompt = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    return terminal.generate(loaded.config, prompt, terminal.Sampling.of(arguments))


def _add_chat(parser: Parser) -> None:
    parser.set_defaults(run=_chat)
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    _add_sampling_flags(parser, temperature=0.7)
    add_config_flags(parser)


def _chat(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
    from roseinfer.cli import terminal

    return terminal.chat(loaded.config, arguments.system, terminal.Sampling.of(arguments))


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
    from roseinfer.bench.compare import options as compare_options
    from roseinfer.bench.load import options as load_options
    from roseinfer.bench.seeds import options

    kinds = parser.add_subparsers(required=True, metavar="BENCHMARK", dest="BENCHMARK")
    for name, help_text, add_flags, run in (
        (
            "streaming",
            "Requests on a schedule, each streamed: latency and its parts.",
            options.add_streaming,
            _streaming,
        ),
        ("scheduler", "A batch of requests at once, online or offline.", options.add_scheduler, _scheduler),
        ("serve", "A load through HTTP: what its clients see, and where the time went.", load_options.add_serve, _load),
        ("simulate", "A load through the real scheduler on a virtual clock.", load_options.add_simulate, _simulate),
        ("replay", "Ask a recording again, of a server or of the simulator.", load_options.add_replay, _replay),
        ("compare", "Two servers or results: better, worse or noise.", compare_options.add_compare, _compare),
    ):
        operands = {"replay": " RECORDING", "compare": " [A B]"}.get(name, "")
        usage = f"%(prog)s [options]{operands}"
        sub = kinds.add_parser(name, help=help_text, description=help_text, usage=usage)
        assert isinstance(sub, Parser)
        add_flags(sub)
        defaults = options.DEFAULTS if name in options.SEEDS else {}
        sub.set_defaults(parser=sub, run=run, defaults=defaults)


def _streaming(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
    from roseinfer.bench.seeds import streaming

    return streaming.run(arguments, loaded)


def _scheduler(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
    from roseinfer.bench.seeds import scheduler

    return scheduler.run(arguments, loaded)


def _load(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
    from roseinfer.bench.load import serve, sweep

    return serve.run(arguments, loaded) if arguments.sweep is None else sweep.run(arguments)


def _simulate(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
    from roseinfer.bench.simulate import simulate

    return simulate.run(arguments, loaded)


def _replay(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
    from roseinfer.bench.simulate import replay

    return replay.run(arguments, loaded)


def _compare(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
    from roseinfer.bench.compare import compare

    return compare.run(arguments, loaded)


def _add_explain(parser: Parser) -> None:
    from roseinfer.explain import flags

    flags.add_explain(parser)
    parser.set_defaults(run=_explain)


def _explain(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
    from roseinfer.explain import command

    return command.run_explain(arguments, loaded)


def _add_top(parser: Parser) -> None:
    from roseinfer.explain import flags

    flags.add_top(parser)
    parser.set_defaults(run=_top)


def _top(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
    from roseinfer.explain import top

    return top.run_top(arguments, loaded)


def _add_kernels(parser: Parser) -> None:
    actions = parser.add_subparsers(required=True, metavar="ACTION", dest="ACTION")
    for name, help_text, run in (
        ("build", "Compile the CPU kernels with the C++ compiler on the PATH, or the one in CXX.", _build_kernels),
        ("list", "The levels, whether this processor has them, and where they are built.", _list_kernels),
    ):
        sub = actions.add_parser(name, help=help_text, description=help_text, usage="%(prog)s [options]")
        assert isinstance(sub, Parser)
        sub.set_defaults(parser=sub, run=run)
        if name == "build":
            sub.add_argument(
                "--level",
                action="append",
                choices=[*LEVELS, "all"],
                help="repeatable; default: the highest that this processor has",
            )
        add_config_flags(sub)


def _build_kernels(arguments: argparse.Namespace, loaded: LoadedConfig) -> int:
    from roseinfer.cli.progress import Progress
    from roseinfer.model.kernels.build import build_kernels, find_compiler

    kernels_dir = kernels_directory(loaded.config.runner.kernels_dir)
    compiler = find_compiler(os.environ.get("CXX") or None)
    names = arguments.level or [level.name for level in levels_here()[-1:]]
    if not names:
        raise ConfigError("This processor has no level of the kernels; name one with --level to build it for another.")
    for name in LEVELS if "all" in names else names:
        with Progress(f"compiling {name} kernels", total=len(sources())) as progress:
            path, is_new = build_kernels(LEVELS[name], kernels_dir, compiler, progress.count)
        print(f"{name}: {'built' if is_new else 'already built'}: {path}")
    return 0


def _list_kernels(_: argparse.Namespace, loaded: LoadedConfig) -> int:
    kernels_dir = kernels_directory(loaded.config.runner.kernels_dir)
    runnable = levels_here()
    for level in LEVELS.values():
        has = "this processor has it" if level in runnable else "this processor lacks it"
        print(f"{level.name:<11}  {has}  {find_built(level, kernels_dir) or 'not built'}")
    return 0


def _add_config(parser: Parser) -> None:
    parser.add_argument(
        "what", choices=("show", "schema", "docs"), help="merged tree with sources; JSON Schema; Markdown"
    )
    parser.set_defaults(run=_config)
    add_config_flags(parser)


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
