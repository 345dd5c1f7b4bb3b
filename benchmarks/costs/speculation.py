"""Measures what `scheduler.speculation: auto` gains and costs, in turn with `off`: copies, forms and chats.

    python -m benchmarks.costs.speculation [--quick] [--model DIR] [--precision int8] [--loads copy,form,chat]
        [--streams 1,8,64] [--rounds 5] [--out FILE]

The model has the shape of Qwen3-0.6B. It computes every step, and what it samples is replaced by a text that was
planned, since random weights repeat nothing. A copy repeats a prompt of random tokens with an edit every 40 tokens; a
form is JSON by a schema, of which a half is forced; a chat is drawn by Zipf's law and repeats little. Steps are counted
as well as seconds, since other work on the machine changes only the seconds. One chat alone, whose steps are bound by
memory, has six times as many rounds: its ratios spread by 30 %. Printed are the median of the ratio of speeds in
decode, within a round of the two, and the least and the most.
"""

import argparse
import json
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from benchmarks.engine_options import config_of, load_as_engines_do, precision_options
from benchmarks.figures import Spread
from benchmarks.machine import Sitting, part_parser
from benchmarks.protocol import own_session_raised
from benchmarks.random_qwen3 import default_directory, make
from roseinfer.config.options import CacheConfig, SchedulerConfig
from roseinfer.engine.core.batch import Launched, SampledTokens, ScheduledBatch, Watch
from roseinfer.engine.core.engine import Engine
from roseinfer.engine.core.scheduler import Scheduler
from roseinfer.engine.core.stopwatch import Phases
from roseinfer.engine.pace import Pace
from roseinfer.engine.speculation import Speculation
from roseinfer.messages import Grammar, Request, SamplingParams
from roseinfer.model.runner import ModelRunner
from roseinfer.text.grammar.compiler import GrammarCompiler, Vocabulary

EDIT_EVERY = 40
MAX_MODEL_LEN = 288
ROUNDS_OF_ONE_CHAT = 6
FIELDS = [f"measured_value_of_field_{i}" for i in range(10)]
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "integer"} for name in FIELDS},
    "required": FIELDS,
    "additionalProperties": False,
}


class Text(NamedTuple):
    """A prompt with its answer."""

    prompt: list[int]
    answer: list[int]


class Load(NamedTuple):
    """The number of streams at once, and of tokens of their prompts and answers; a form is as long as it is."""

    kind: str
    num_streams: int
    num_prompt: int
    num_new: int

    @property
    def name(self) -> str:
        return f"{self.kind}, {self.num_streams}"

    def rounds(self, num_rounds: int) -> int:
        """Of those that were asked for, how many this load has."""
        return num_rounds * ROUNDS_OF_ONE_CHAT if (self.kind, self.num_streams) == ("chat", 1) else num_rounds


def loads_of(kinds: list[str], streams: list[int]) -> list[Load]:
    """More streams have shorter texts, since their steps take longer."""
    chats = [
        Load("chat", count, *((160, 96) if count < 8 else (96, 64) if count < 64 else (32, 32))) for count in streams
    ]
    all_loads = [Load("copy", 1, 160, 120), Load("form", 1, 16, 0), Load("form", 8, 16, 0), *chats]
    return [load for load in all_loads if load.kind in kinds]


class Bench(NamedTuple):
    """The model, and what texts are made with."""

    runner: ModelRunner
    grammars: GrammarCompiler
    tokenizer: Tokenizer


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
    """The model's runner, with texts that were planned: a request's seed is the index of its text.

    Behind a drafted token that does not hold the plan goes on all the same: that row's token is dropped.
    """

    def __init__(self, runner: ModelRunner, texts: list[Text]) -> None:
        self._runner = runner
        self._texts = [text.prompt + text.answer for text in texts]
        self._text_of_slot: dict[int, int] = {}

    def launch(self, batch: ScheduledBatch, watch: Watch) -> PlannedTokens:
        """See Runner."""
        self._text_of_slot |= {binding.slot: binding.params.seed or 0 for binding in batch.bindings}
        ends = (batch.starts + batch.num_new_tokens)[batch.samples].tolist()
        slots = batch.slots[batch.samples].tolist()
        planned = [self._texts[self._text_of_slot[slot]][end] for slot, end in zip(slots, ends, strict=True)]
        return PlannedTokens(self._runner.launch(batch, watch), planned)


def texts_of(load: Load, bench: Bench, seed: int) -> list[Text]:
    """The texts of a round."""
    random, vocab_size = np.random.default_rng(seed), bench.runner.vocab_size
    texts = []
    for _ in range(load.num_streams):
        prompt = (random.zipf(1.3, load.num_prompt) % vocab_size).tolist()
        answer = (random.zipf(1.3, load.num_new) % vocab_size).tolist()
        if load.kind == "copy":
            prompt = random.integers(0, vocab_size, load.num_prompt).tolist()
            answer = prompt[: load.num_new]
            edits = answer[EDIT_EVERY::EDIT_EVERY]
            answer[EDIT_EVERY::EDIT_EVERY] = random.integers(0, vocab_size, len(edits)).tolist()
        elif load.kind == "form":
            values = {name: int(random.integers(10**6)) for name in FIELDS}
            answer = bench.tokenizer.encode(json.dumps(values), add_special_tokens=False).ids
        texts.append(Text(prompt, answer))
    return texts


class Figures(NamedTuple):
    """Of one run in decode."""

    seconds: float
    num_steps: int
    num_drafted: int
    num_accepted: int


def generate(bench: Bench, load: Load, texts: list[Text], speculation: Literal["auto", "off"]) -> Figures:
    """Decode all texts at once."""
    config, cache = SchedulerConfig(speculation=speculation), CacheConfig(prefix_caching=False)
    pace = Pace.of(config, cache.block_size, is_cpu=True)
    scheduler = Scheduler(
        config,
        cache,
        num_blocks=bench.runner.info.num_blocks,
        max_model_len=MAX_MODEL_LEN,
        eos_token_ids=(),
        grammars=bench.grammars,
        pacer=pace,
        make_drafter=partial(Speculation, pace),
    )
    engine = Engine(scheduler, PlannedRunner(bench.runner, texts), Phases(), bench.runner.info)
    for index, text in enumerate(texts):
        params = SamplingParams(
            temperature=0.0,
            max_tokens=len(text.answer),
            ignore_eos=True,
            seed=index,
            grammar=Grammar("json_schema", json.dumps(SCHEMA)) if load.kind == "form" else None,
        )
        engine.add_request(Request(request_id=str(index), prompt_token_ids=text.prompt, params=params))
    return decoded(engine, sum(len(text.answer) for text in texts))


def decoded(engine: Engine, num_tokens: int) -> Figures:
    """Run the engine to its end, by which it has said that number of tokens."""
    began_ns, ended_ns, said, counts = 0, 0, 0, np.zeros(3, np.int64)
    while engine.has_work:
        record = engine.step().record
        said += record.num_generated_tokens
        if record.kind == "decode":
            began_ns = began_ns or record.start_ns
            ended_ns = record.end_ns
            counts += (1, record.num_draft_tokens, record.num_accepted_tokens)
    assert said == num_tokens, "a text was not said to its end"
    return Figures((ended_ns - began_ns) / 1e9, *counts.tolist())


def compare(bench: Bench, load: Load, num_rounds: int) -> Spread:
    """Both in turn, the first of them in turn too: the ratio of their speeds."""
    ratios, steps = [], []
    for number in range(num_rounds):
        texts, found = texts_of(load, bench, number), dict[str, Figures]()
        order: list[Literal["auto", "off"]] = ["auto", "off"] if number % 2 else ["off", "auto"]
        for speculation in order:
            found[speculation] = generate(bench, load, texts, speculation)
        ratios.append(found["off"].seconds / found["auto"].seconds)
        steps.append((found["off"].num_steps, *found["auto"][1:], found["off"].seconds))
    off, on, drafted, accepted, seconds = np.median(steps, axis=0)
    spread = Spread.of(ratios)
    print(
        f"{load.kind} {load.num_streams:3} streams: auto/off {spread.median:.3f} ({spread.least:.3f} to "
        f"{spread.most:.3f}) in seconds; steps {off:.0f} -> {on:.0f} ({off / on:.2f}) of {seconds / off * 1e3:.1f} ms; "
        f"drafted {drafted:.0f}, accepted {accepted:.0f}",
        flush=True,
    )
    return spread


def main() -> int:
    parser = part_parser(__doc__, "bench/speculation.json", quick="one stream, a fifth of the rounds")
    parser.add_argument("--model", type=Path, default=default_directory(), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--precision", default="int8", help="default: %(default)s")
    parser.add_argument("--loads", default="copy,form,chat", metavar="L,L", help="default: %(default)s")
    parser.add_argument("--streams", default="1,8,64", metavar="N,N", help="of chats; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    model = make(args.model)
    with own_session_raised():  # a product of two threads waits for the one whose core another process has
        measure(args, model)
    return 0


def measure(args: argparse.Namespace, model: Path) -> None:
    """Load the model once, and print a line for each load."""
    options = {"model.max_model_len": str(MAX_MODEL_LEN), "cache.num_blocks": str(64 * MAX_MODEL_LEN // 16 + 64)}
    sitting, began = Sitting("speculation"), time.monotonic()
    runner = load_as_engines_do(config_of(model, {**precision_options(args.precision), **options}), 64)
    runner.warm_up(512)
    vocabulary = Vocabulary.load(model, runner.vocab_size, runner.info.eos_token_ids)
    bench = Bench(runner, GrammarCompiler(vocabulary), Tokenizer.from_file(str(model / "tokenizer.json")))
    info = runner.info
    print(
        f"{model.name}: {info.dtype}, {info.quantization}, {info.kernels}, {time.monotonic() - began:.0f} s", flush=True
    )
    loads = loads_of(args.loads.split(","), [int(count) for count in args.streams.split(",")])
    if args.quick:
        loads, args.rounds = [load for load in loads if load.num_streams == 1], 1
    results = {load.name: asdict(compare(bench, load, load.rounds(args.rounds))) for load in loads}
    sitting.write(args.out, results)


if __name__ == "__main__":
    raise SystemExit(main())
