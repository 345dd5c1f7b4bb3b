"""Measures `roseinfer batch` beside `LLM.generate` with the same prompts, which is `roseinfer bench scheduler` offline.

    python -m benchmarks.costs.batch [--model DIR] [--lines 192] [--max-tokens 64] [--rounds 7]

The two take turns, each with an engine of its own, and the one that begins changes: tokens a second from the first line
or prompt to the last answer, and processor time of the process beside the engine, which reads, writes and detokenises.
Prompts are 16 to 256 token ids, drawn, and each answer has all its tokens.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from benchmarks.figures import Spread
from benchmarks.random_gpt2 import default_directory, make
from benchmarks.tables import print_head, print_row
from roseinfer.batch.command import Tally, answer_with, for_throughput, unanswered
from roseinfer.batch.journal import Journal
from roseinfer.batch.lines import LineEngine
from roseinfer.config.options import CacheConfig, Config, ModelConfig
from roseinfer.llm.llm import LLM
from roseinfer.messages import SamplingParams
from roseinfer.runtime.niceness import FRONT_END_NICENESS, be_nicer

PROMPT_TOKENS = (16, 256)


def prompts_of(num_lines: int, vocab_size: int) -> list[list[int]]:
    generator = random.Random("batch")
    lengths = [generator.randint(*PROMPT_TOKENS) for _ in range(num_lines)]
    return [[generator.randrange(vocab_size) for _ in range(length)] for length in lengths]


class Generating:
    """`LLM.generate` with an engine of its own."""

    def __init__(self, config: Config) -> None:
        self._llm = LLM(config=config)

    def measure(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, float]:
        """Tokens a second, and this process's microseconds a token."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        began_s, used_s = time.monotonic(), time.process_time()
        completions = self._llm.generate(prompts, params)
        num_tokens = sum(len(completion.token_ids) for completion in completions)
        return num_tokens / (time.monotonic() - began_s), (time.process_time() - used_s) / num_tokens * 1e6


class Batching:
    """`roseinfer batch` with an engine of its own, journal and files included."""

    def __init__(self, config: Config) -> None:
        self._config, self._runner = config, asyncio.Runner()
        self._engine = LineEngine(config)
        self._runner.run(self._engine.start())
        be_nicer(FRONT_END_NICENESS)

    def measure(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, float]:
        """As `Generating.measure`."""
        body = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        lines = [
            {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body | {"prompt": prompt}}
            for i, prompt in enumerate(prompts)
        ]
        with tempfile.TemporaryDirectory() as directory:
            source, output = Path(directory) / "in.jsonl", Path(directory) / "out.jsonl"
            source.write_text("".join(json.dumps(line) + "\n" for line in lines))
            used_s = time.process_time()
            with Journal(output, "benchmark") as journal:
                tally = Tally(num_before=0)
                todo = unanswered(source, journal, tally)
                self._runner.run(answer_with(self._engine, todo, source, len(lines), journal, self._config, tally))
                journal.finish()
            rate = tally.num_tokens / tally.elapsed_s
        assert tally.num_tokens == len(prompts) * max_tokens
        return rate, (time.process_time() - used_s) / tally.num_tokens * 1e6


SIDES: dict[str, type[Generating | Batching]] = {"LLM.generate": Generating, "roseinfer batch": Batching}
_started: list[Generating | Batching] = []  # in a child: its side


def start(name: str, config: Config) -> None:
    _started.append(SIDES[name](config))


def measure(prompts: list[list[int]], max_tokens: int) -> tuple[float, float]:
    return _started[0].measure(prompts, max_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=default_directory(), help="default: random GPT-2 small")
    parser.add_argument("--lines", type=int, default=192)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    config = for_throughput(
        Config(
            model=ModelConfig(path=str(make(arguments.model))),
            cache=CacheConfig(prefix_caching=False),  # each round has the same prompts
        )
    )
    prompts = prompts_of(arguments.lines, 50_000)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in SIDES}
    with ExitStack() as stack:
        children = {name: stack.enter_context(ProcessPoolExecutor(1)) for name in SIDES}  # niceness lasts
        for name, child in children.items():
            child.submit(start, name, config).result()
        for number in range(arguments.rounds):
            for name in list(children)[:: 1 if number % 2 else -1]:
                found[name].append(children[name].submit(measure, prompts, arguments.max_tokens).result())
    print_head("who", "tokens/s", "least", "most", "µs of its process a token")
    for name, rounds in found.items():
        spread = Spread.of([rate for rate, _ in rounds])
        print_row(name, spread.median, spread.least, spread.most, Spread.of([us for _, us in rounds]).median)
    ratios = Spread.of([ours[0] / theirs[0] for theirs, ours in zip(*found.values(), strict=True)])
    print(f"ratio within a pair: {ratios.median:.3f} ({ratios.least:.3f} to {ratios.most:.3f})")


if __name__ == "__main__":
    main()
