"""Measures `roseinfer batch` beside `LLM.generate` with the same prompts, which is `roseinfer bench scheduler` offline.

    python -m benchmarks.costs.batch [--model DIR] [--lines 256] [--max-tokens 64] [--rounds 5]

The two take turns, each with an engine of its own that is started anew: tokens a second from the first line or prompt
to the last answer, the start left out. Prompts are 16 to 256 token ids, drawn, and each answer has all its tokens.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from benchmarks.figures import Spread
from benchmarks.random_gpt2 import default_directory, make
from benchmarks.tables import print_head, print_row
from roseinfer.batch.command import Tally, answer_all, for_throughput
from roseinfer.batch.journal import Journal
from roseinfer.config.options import Config, ModelConfig
from roseinfer.llm.llm import LLM
from roseinfer.messages import SamplingParams

PROMPT_TOKENS = (16, 256)


def prompts_of(num_lines: int, vocab_size: int) -> list[list[int]]:
    generator = random.Random("batch")
    lengths = [generator.randint(*PROMPT_TOKENS) for _ in range(num_lines)]
    return [[generator.randrange(vocab_size) for _ in range(length)] for length in lengths]


def generate(config: Config, prompts: list[list[int]], max_tokens: int, _: str) -> float:
    """Tokens a second of `LLM.generate`."""
    with LLM(config=config) as llm:
        began_s = time.monotonic()
        completions = llm.generate(prompts, SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True))
        return sum(len(completion.token_ids) for completion in completions) / (time.monotonic() - began_s)


def batch(config: Config, prompts: list[list[int]], max_tokens: int, directory: str) -> float:
    """Tokens a second of `roseinfer batch`, journal and files included."""
    folder = Path(directory)
    body = {"max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body | {"prompt": prompt}}
        for i, prompt in enumerate(prompts)
    ]
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with Journal(folder / "out.jsonl", "benchmark") as journal:
        tally = Tally(num_before=0)
        asyncio.run(answer_all(source, len(lines), journal, config, tally))
        journal.finish()
        rate = tally.num_tokens / tally.elapsed_s
    (folder / "out.jsonl").unlink()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=default_directory(), help="default: random GPT-2 small")
    parser.add_argument("--lines", type=int, default=256)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    config = for_throughput(Config(model=ModelConfig(path=str(make(arguments.model)))))
    prompts = prompts_of(arguments.lines, 50_000)
    rates: dict[str, list[float]] = {"LLM.generate": [], "roseinfer batch": []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.rounds):
            for name, measure in (("LLM.generate", generate), ("roseinfer batch", batch)):
                with ProcessPoolExecutor(1) as child:  # niceness lasts
                    rates[name].append(child.submit(measure, config, prompts, arguments.max_tokens, folder).result())
    print_head("who", "tokens/s", "least", "most")
    for name, values in rates.items():
        spread = Spread.of(values)
        print_row(name, spread.median, spread.least, spread.most)
    ratios = Spread.of([ours / theirs for theirs, ours in zip(*rates.values(), strict=True)])
    print(f"ratio within a pair: {ratios.median:.3f} ({ratios.least:.3f} to {ratios.most:.3f})")


if __name__ == "__main__":
    main()
