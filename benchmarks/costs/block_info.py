"""Measures three ways to note one more token of each sequence in its KV block's metadata.

    python -m benchmarks.costs.block_info [--quick] [--out FILE]

The post behind the third seed replaced immutable records by records that are changed in place, in every layer. Here no
layer has records: lengths and block ids are arrays, changed once a step for all sequences (`engine/core/sequence.py`).
The sequences have prompts of 1 and 4 tokens in turn, so they fill their blocks at different steps.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

from benchmarks.figures import Spread
from benchmarks.machine import Sitting, part_parser

NUM_SEQUENCES, NUM_LAYERS, BLOCK_SIZE, NUM_TOKENS = 64, 12, 16, 128
PROMPT_LENGTHS = (1, 4)

Step = Callable[[], None]


class ImmutableInfo(NamedTuple):
    """A record that is made anew for each token."""

    layer: int
    block_index: int
    start: int
    length: int


@dataclass(slots=True)
class MutableInfo:
    """The same, changed in place."""

    layer: int
    block_index: int
    start: int
    length: int


def start_length(sequence: int) -> int:
    return PROMPT_LENGTHS[sequence % len(PROMPT_LENGTHS)]


def immutable_records() -> Step:
    """One record for each block of each sequence and layer, replaced whenever its length changes."""
    infos: dict[int, ImmutableInfo] = {}
    tails: list[list[int]] = []  # [layer][sequence] id of the last block
    for layer in range(NUM_LAYERS):
        tails.append([])
        for sequence in range(NUM_SEQUENCES):
            tails[layer].append(len(infos))
            infos[len(infos)] = ImmutableInfo(layer, len(infos), 0, start_length(sequence))

    def step() -> None:
        for layer, ids in enumerate(tails):
            for sequence, block_id in enumerate(ids):
                info = infos[block_id]
                if info.length < BLOCK_SIZE:
                    infos[block_id] = ImmutableInfo(info.layer, info.block_index, info.start, info.length + 1)
                else:
                    ids[sequence] = len(infos)
                    infos[len(infos)] = ImmutableInfo(layer, len(infos), info.start + BLOCK_SIZE, 1)

    return step


def mutable_records() -> Step:
    """The same records, their length counted up in place."""
    tails: list[list[MutableInfo]] = [
        [MutableInfo(layer, sequence, 0, start_length(sequence)) for sequence in range(NUM_SEQUENCES)]
        for layer in range(NUM_LAYERS)
    ]

    def step() -> None:
        for layer, infos in enumerate(tails):
            for sequence, info in enumerate(infos):
                if info.length < BLOCK_SIZE:
                    info.length += 1
                else:
                    infos[sequence] = MutableInfo(layer, info.block_index + 1, info.start + BLOCK_SIZE, 1)

    return step


def arrays() -> Step:
    """What the engine does: one addition to all lengths, and one append for the sequences whose block is full."""
    import numpy as np

    from roseinfer.engine.core.sequence import SlotTable

    table = SlotTable(NUM_SEQUENCES, NUM_TOKENS + max(PROMPT_LENGTHS) + BLOCK_SIZE, BLOCK_SIZE)
    slots = np.arange(NUM_SEQUENCES)
    table.num_computed[:] = [start_length(sequence) for sequence in range(NUM_SEQUENCES)]
    table.append_blocks(list(range(NUM_SEQUENCES)), list(range(NUM_SEQUENCES)))

    def step() -> None:
        table.num_computed[slots] += 1
        full = slots[table.num_computed[slots] > table.capacities[slots]]
        if len(full):
            table.append_blocks(full.tolist(), full.tolist())

    return step


WAYS = {"immutable records": immutable_records, "records changed in place": mutable_records, "arrays": arrays}


def measure(make: Callable[[], Step]) -> float:
    """Median microseconds of a step, over as many steps as a request has tokens."""
    step = make()
    durations = []
    for _ in range(NUM_TOKENS):
        began = time.perf_counter_ns()
        step()
        durations.append(time.perf_counter_ns() - began)
    return statistics.median(durations) / 1e3


def main() -> int:
    arguments = part_parser(__doc__, "bench/block_info.json", quick="3 repeats in place of 15").parse_args()
    sitting = Sitting("block_info")
    repeats: dict[str, list[float]] = {name: [] for name in WAYS}
    for _ in range(3 if arguments.quick else 15):
        for name, make in WAYS.items():
            repeats[name].append(measure(make))
    results = {name: asdict(Spread.of(values)) for name, values in repeats.items()}
    for name, row in results.items():
        print(f"  {name}: {row['median']:.1f} µs a step ({row['least']:.1f} to {row['most']:.1f})", flush=True)
    sitting.write(arguments.out, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
