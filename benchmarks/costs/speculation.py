"""Measures what `scheduler.speculation: auto` gains and costs, in turn with `off`: copies and chats.

    python -m benchmarks.costs.speculation [CHECKPOINT] [--rounds N] [--streams 1 8 64]

The model computes every step, and what it samples is replaced by a text that was planned, since random weights repeat
nothing. A copy repeats a prompt of random tokens with an edit every 40 tokens; a chat is drawn by Zipf's law and
repeats little. Steps are counted as well as seconds, since other work on the machine changes only the seconds.
"""

import argparse
import time
from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np

from benchmarks.engine_options import load_as_engines_do
from roseinfer.config.options import DEMO_MODEL, CacheConfig, Config, ModelConfig, SchedulerConfig
from roseinfer.engine.core.batch import Launched, SampledTokens, ScheduledBatch, Watch
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.core.scheduler import Scheduler
from roseinfer.engine.core.stopwatch import Phases
from roseinfer.engine.pace import Pace
from roseinfer.engine.speculation import Speculation
from roseinfer.messages import Request, SamplingParams
from roseinfer.model.runner import ModelRunner

NUM_PROMPT, NUM_NEW, EDIT_EVERY = 160, 120, 40
MAX_MODEL_LEN = 288
Texts = Sequence[list[int]]


class PlannedTokens:
    """A `Launched` whose tokens are those of the plan."""

    graph_rows = h2d_bytes = 0

    def __init__(self, launched: Launched, token_ids: list[int]) -> None:
        self._launched = launched
        self._token_ids = token_ids

    def wait(self) -> SampledTokens:
        """Wait for the model, and say what was planned."""
        self._launched.wait()
        return SampledTokens(np.array(self._token_ids, np.int32), None)


class PlannedRunner:
    """The model's runner, with texts that were planned: a request's seed is the index of its text."""

    def __init__(self, runner: ModelRunner, texts: Texts) -> None:
        self._runner = runner
        self._texts = texts
        self._text_of_slot: dict[int, int] = {}

    def launch(self, batch: ScheduledBatch, watch: Watch) -> PlannedTokens:
        """See Runner."""
        self._text_of_slot |= {binding.slot: binding.params.seed or 0 for binding in batch.bindings}
        ends = (batch.starts + batch.num_new_tokens)[batch.samples].tolist()
        slots = batch.slots[batch.samples].tolist()
        planned = [self._texts[self._text_of_slot[slot]][end] for slot, end in zip(slots, ends, strict=True)]
        return PlannedTokens(self._runner.launch(batch, watch), planned)


def texts_of(kind: str, num_streams: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts with their answers."""
    random, texts = np.random.default_rng(seed), []
    for _ in range(num_streams):
        prompt = (random.zipf(1.3, NUM_PROMPT) % vocab_size).tolist()
        answer = (random.zipf(1.3, NUM_NEW) % vocab_size).tolist()
        if kind == "copy":
            prompt = random.integers(0, vocab_size, NUM_PROMPT).tolist()
            answer = prompt[:NUM_NEW]
            answer[EDIT_EVERY::EDIT_EVERY] = random.integers(
                0, vocab_size, len(answer[EDIT_EVERY::EDIT_EVERY])
            ).tolist()
        texts.append(prompt + answer)
    return texts


def generate(runner: ModelRunner, texts: Texts, speculation: Literal["auto", "off"]) -> tuple[float, int, int, int]:
    """Seconds and steps of decoding all texts at once, and how many tokens were drafted and accepted."""
    config, cache = SchedulerConfig(speculation=speculation), CacheConfig(prefix_caching=False)
    pace = Pace.of(config, cache.block_size, is_cpu=True)
    scheduler = Scheduler(
        config,
        cache,
        num_blocks=runner.info.num_blocks,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=(),
        pacer=pace,
        make_drafter=partial(Speculation, pace),
    )
    engine = Engine(scheduler, PlannedRunner(runner, texts), Phases(), runner.info)
    for index, text in enumerate(texts):
        params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, seed=index)
        engine.add_request(Request(request_id=str(index), prompt_token_ids=text[:NUM_PROMPT], params=params))
    began_ns, ended_ns, num_steps, num_drafted, num_accepted = 0, 0, 0, 0, 0
    while engine.has_work:
        record = engine.step().record
        if record.kind == "decode":
            began_ns = began_ns or record.start_ns
            ended_ns = record.end_ns
            num_steps += 1
            num_drafted += record.num_draft_tokens
            num_accepted += record.num_accepted_tokens
    return (ended_ns - began_ns) / 1e9, num_steps, num_drafted, num_accepted


def compare(runner: ModelRunner, kind: str, num_streams: int, num_rounds: int) -> str:
    """Both in turn, the first of them in turn too: the ratio of their speeds, its median and its range."""
    ratios, steps = [], []
    for number in range(num_rounds):
        texts = texts_of(kind, num_streams, runner.vocab_size, number)
        found = {}
        order: list[Literal["auto", "off"]] = ["auto", "off"] if number % 2 else ["off", "auto"]
        for speculation in order:
            found[speculation] = generate(runner, texts, speculation)
        ratios.append(found["off"][0] / found["auto"][0])
        steps.append((found["off"][1], *found["auto"][1:]))
    off, on, drafted, accepted = np.median(steps, axis=0)
    return (
        f"{kind:5} {num_streams:3} streams: auto/off {np.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) "
        f"in seconds; steps {off:.0f} -> {on:.0f} ({off / on:.2f}); drafted {drafted:.0f}, accepted {accepted:.0f}"
    )


def main() -> None:
    """Load the model once, and print a line for each load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", nargs="?", default=DEMO_MODEL)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--quantization", default="none", choices=["none", "int8"])
    arguments = parser.parse_args()
    config = Config(
        model=ModelConfig(path=arguments.checkpoint, max_model_len=MAX_MODEL_LEN, quantization=arguments.quantization),
        cache=CacheConfig(num_blocks=64 * MAX_MODEL_LEN // 16 + 64),
    )
    began = time.monotonic()
    runner = load_as_engines_do(config, 64)
    runner.warm_up(512)
    info = runner.info
    print(
        f"{arguments.checkpoint}: {info.dtype}, {info.quantization}, {info.kernels}, {time.monotonic() - began:.0f} s"
    )
    print(compare(runner, "copy", 1, arguments.rounds), flush=True)
    for num_streams in arguments.streams:
        print(compare(runner, "chat", num_streams, arguments.rounds), flush=True)


if __name__ == "__main__":
    main()
