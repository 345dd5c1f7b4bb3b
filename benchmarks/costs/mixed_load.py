"""Measures streams while prompts of others come in, in turn: each way of cutting prompts into steps.

    python -m benchmarks.costs.mixed_load [--quick] [--model DIR] [--rate 4] [--seconds 20] [--rounds 3]
        [--target-itl-ms MS] [--set NAME=OPTION=VALUE] [--only NAME,NAME] [--out FILE]

Requests come as a Poisson process, with prompts of 16 to 400 tokens and 128 new ones, over HTTP, in float32. `whole
steps` is a fixed budget, which holds a prompt of any length; `default` has no other option; with a target there is a
third, and `--set NAME=model.dtype=bfloat16` makes one of another type. Each setting is a server of its own; all but
the one that is measured are paused, and a round has the same requests for each. ITL are those of all streams; medians
over the rounds, and their ranges in brackets.
"""

import argparse
import random
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from benchmarks import protocol
from benchmarks.figures import Spread, summarise
from benchmarks.machine import Sitting, part_parser
from benchmarks.random_gpt2 import make
from benchmarks.rotation import WARM_UP
from benchmarks.servers import Server, start_roseinfer
from benchmarks.tables import print_head, print_row
from benchmarks.workloads import PlannedRequest, Words, requests_of

PROMPT_TOKENS, NEW_TOKENS = (16, 400), 128
SETTINGS: dict[str, dict[str, str]] = {"whole steps": {"scheduler.max_prefill_tokens": "512"}, "default": {}}
COMMON = {"model.dtype": "float32"}  # unless a setting has its own
FIGURES = ("tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "p99/p50")


def mixed_requests(words: Words, rate: float, seconds: float, seed: int) -> list[PlannedRequest]:
    """The requests of one round."""
    generator, planned, moment = random.Random(f"mixed {seed}"), list[PlannedRequest](), 0.0
    while (moment := moment + generator.expovariate(rate)) < seconds:
        planned.append(PlannedRequest(moment, words.draw(generator, generator.randint(*PROMPT_TOKENS)), [], NEW_TOKENS))
    return planned


def figures_of(server: Server, requests: list[PlannedRequest]) -> dict[str, float]:
    """One turn of one setting."""
    server.resume()
    try:
        figures = summarise(server.drive(requests))
    finally:
        server.pause()
    return figures | {"p99/p50": figures["itl_p99_ms"] / figures["itl_p50_ms"]}


def settings_of(arguments: argparse.Namespace) -> Mapping[str, dict[str, str]]:
    settings = dict(SETTINGS)
    if arguments.target_itl_ms is not None:
        settings[f"target {arguments.target_itl_ms:g} ms"] = {"scheduler.target_itl_ms": str(arguments.target_itl_ms)}
    for words in arguments.set:
        name, option, value = words.split("=")
        settings.setdefault(name, {})[option] = value
    return {name: settings[name] for name in arguments.only.split(",")} if arguments.only else settings


def parser_of() -> argparse.ArgumentParser:
    parser = part_parser(__doc__, "bench/mixed.json", quick="one round of 5 seconds", model=True)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second; default: %(default)s")
    parser.add_argument("--seconds", type=float, default=20.0, help="in which requests come; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--target-itl-ms", type=float, help="of a third setting")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=OPTION=VALUE", help="of one setting more")
    parser.add_argument("--only", metavar="NAME,NAME", help="of the settings")
    return parser


def main() -> int:
    arguments = parser_of().parse_args()
    if arguments.quick:
        arguments.rounds, arguments.seconds = 1, 5.0
    model, log, sitting = make(arguments.model), Path("build") / "mixed_load.log", Sitting("mixed")
    words, rounds = Words(model / "tokenizer.json"), dict[str, list[dict[str, float]]]()
    with protocol.own_session_raised(), ExitStack() as stack:
        servers = dict[str, Server]()
        for name, options in settings_of(arguments).items():
            servers[name] = stack.enter_context(start_roseinfer(name, model, COMMON | options, log))
            servers[name].drive(requests_of(WARM_UP, words, repeat=-1))
            servers[name].pause()
        for turn in range(arguments.rounds):
            requests = mixed_requests(words, arguments.rate, arguments.seconds, turn)
            for name, server in servers.items():
                rounds.setdefault(name, []).append(figures_of(server, requests))
    print_head("setting", *FIGURES)
    for name, figures in rounds.items():
        spreads = (Spread.of([each[figure] for each in figures]) for figure in FIGURES)
        print_row(name, *(each.text(".4g") for each in spreads))
    sitting.write(arguments.out, rounds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
