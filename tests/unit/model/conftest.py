"""Small random checkpoints, and a scheduler played by hand, for tests that drive a real runner."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from roseinfer.config.options import CacheConfig, Config, ModelConfig, RunnerConfig
from roseinfer.engine.core.batch import ScheduledBatch, SlotBinding
from roseinfer.messages import SamplingParams, TokenLogprobs
from roseinfer.model.runner import ModelRunner, load_runner

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(autouse=True)
def _keep_num_threads() -> Iterator[None]:
    """A runner sets the number of threads of the whole process."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@dataclass(frozen=True)
class Shape:
    """A tiny GPT-2."""

    head_dim: int = 16
    num_heads: int = 2
    num_layers: int = 2
    vocab_size: int = 131
    num_positions: int = 256
    is_tied: bool = True
    prefix: str = ""

    @property
    def width(self) -> int:
        return self.head_dim * self.num_heads

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "vocab_size": self.vocab_size,
            "n_positions": self.num_positions,
            "n_embd": self.width,
            "n_layer": self.num_layers,
            "n_head": self.num_heads,
            "tie_word_embeddings": self.is_tied,
        }

    def shapes(self) -> dict[str, tuple[int, ...]]:
        width = self.width
        shapes: dict[str, tuple[int, ...]] = {
            "wte.weight": (self.vocab_size, width),
            "wpe.weight": (self.num_positions, width),
        }
        linears = {"attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width)}
        linears |= {"mlp.c_fc": (width, 4 * width), "mlp.c_proj": (4 * width, width)}
        for layer in range(self.num_layers):
            for name, shape in linears.items():
                shapes |= {f"h.{layer}.{name}.weight": shape, f"h.{layer}.{name}.bias": shape[1:]}
        for norm in ["ln_f", *(f"h.{layer}.ln_{i}" for layer in range(self.num_layers) for i in (1, 2))]:
            shapes |= {f"{norm}.weight": (width,), f"{norm}.bias": (width,)}
        if not self.is_tied:
            shapes["lm_head.weight"] = (self.vocab_size, width)
        return {self.prefix + name if name != "lm_head.weight" else name: shape for name, shape in shapes.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Random weights, wide enough that no two logits are equal for long."""
        generator = torch.Generator().manual_seed(self.width)
        tensors = {name: torch.randn(shape, generator=generator) * 0.25 for name, shape in self.shapes().items()}
        return {name: 1 + tensor if _is_norm_weight(name) else tensor for name, tensor in tensors.items()}


def _is_norm_weight(name: str) -> bool:
    return ".ln_" in f".{name}" and name.endswith("weight")


def write_checkpoint(directory: Path, shape: Shape) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(shape.config()))
    save_file(shape.tensors(), directory / "model.safetensors")
    return directory


@dataclass(frozen=True)
class Outcome:
    """What one row of a step brought."""

    token_id: int
    logits: torch.Tensor
    logprobs: TokenLogprobs | None


@dataclass
class Sequence:
    token_ids: list[int]
    binding: SlotBinding
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)
    is_new: bool = True
    is_last_on_device: bool = False


def assert_same(outcomes: list[Outcome], expected: list[Outcome]) -> None:
    assert [outcome.token_id for outcome in outcomes] == [outcome.token_id for outcome in expected]
    for outcome, other in zip(outcomes, expected, strict=True):
        assert torch.equal(outcome.logits, other.logits)


class Player:
    """Plays the scheduler: hands out blocks in a shuffled order, builds batches, keeps what every slot has become."""

    def __init__(self, runner: ModelRunner, num_slots: int, block_size: int) -> None:
        self.runner = runner
        self.block_size = block_size
        self.free = np.random.default_rng(7).permutation(runner.info.num_blocks).tolist()
        self.table = np.zeros((num_slots, -(-runner.info.max_model_len // block_size)), np.int32)
        self.sequences: dict[int, Sequence] = {}
        self.logits = torch.empty(0)  # of the rows that sampled last
        sample = runner._sampler.sample

        def recording(logits: torch.Tensor, *others: Any) -> Any:
            self.logits = logits.clone()  # a replayed step writes to the same memory
            return sample(logits, *others)

        runner._sampler.sample = recording  # type: ignore[assignment, method-assign]

    def admit(
        self, slot: int, prompt: list[int], params: SamplingParams = GREEDY, eos: tuple[int, ...] = ()
    ) -> Sequence:
        binding = SlotBinding(slot, params, len(prompt), eos)
        self.sequences[slot] = Sequence(list(prompt), binding)
        return self.sequences[slot]

    def share(self, slot: int, prompt: list[int], owner: int, num_blocks: int) -> None:
        """Admit a prompt whose first blocks another slot has computed."""
        sequence = self.admit(slot, prompt)
        sequence.blocks = self.sequences[owner].blocks[:num_blocks]
        sequence.num_computed = num_blocks * self.block_size

    def preempt(self, slot: int, new_slot: int) -> None:
        """Take the blocks away; the sequence goes on in another slot, from nothing but its tokens."""
        sequence = self.sequences.pop(slot)
        self.free.extend(sequence.blocks)
        binding = SlotBinding(
            new_slot, sequence.binding.params, sequence.binding.num_prompt_tokens, sequence.binding.eos_token_ids
        )
        self.sequences[new_slot] = Sequence(sequence.token_ids, binding)

    def step(self, num_new_tokens: dict[int, int]) -> dict[int, Outcome]:
        """Run so many tokens of each slot in one batch; outcomes of the slots that reached the end of theirs."""
        slots = sorted(num_new_tokens, key=lambda slot: not self._is_device_row(slot, num_new_tokens[slot]))
        batch = self._batch(slots, num_new_tokens)
        result = self.runner.launch(batch).wait()
        outcomes = {}
        sampled = [slot for slot, samples in zip(slots, batch.samples, strict=True) if samples]
        for slot in slots:
            sequence = self.sequences[slot]
            sequence.num_computed += num_new_tokens[slot]
            sequence.is_new = False
            sequence.is_last_on_device = slot in sampled
        for row, slot in enumerate(sampled):
            token_id = int(result.token_ids[row])
            self.sequences[slot].token_ids.append(token_id)
            outcomes[slot] = Outcome(token_id, self.logits[row], result.logprobs[row] if result.logprobs else None)
        return outcomes

    def run(self, slot: int, num_tokens: int, chunk: int | None = None) -> list[Outcome]:
        """Prefill alone, in chunks, and decode until so many tokens were generated."""
        outcomes: list[Outcome] = []
        while len(outcomes) < num_tokens:
            sequence = self.sequences[slot]
            rest = len(sequence.token_ids) - sequence.num_computed
            outcomes.extend(self.step({slot: min(chunk or rest, rest)}).values())
        return outcomes

    def _is_device_row(self, slot: int, num_new_tokens: int) -> bool:
        sequence = self.sequences[slot]
        return (
            sequence.is_last_on_device and num_new_tokens == 1 and sequence.num_computed == len(sequence.token_ids) - 1
        )

    def _batch(self, slots: list[int], num_new_tokens: dict[int, int]) -> ScheduledBatch:
        token_ids: list[int] = []
        num_device_rows = 0
        for slot in slots:
            sequence = self.sequences[slot]
            end = sequence.num_computed + num_new_tokens[slot]
            while len(sequence.blocks) * self.block_size < end:
                sequence.blocks.append(self.free.pop())
            self.table[slot, : len(sequence.blocks)] = sequence.blocks
            if self._is_device_row(slot, num_new_tokens[slot]):
                num_device_rows += 1
            else:
                token_ids.extend(sequence.token_ids[sequence.num_computed : end])
        rows = [self.sequences[slot] for slot in slots]
        counts = [num_new_tokens[slot] for slot in slots]
        return ScheduledBatch(
            step_id=0,
            slots=np.array(slots, np.int32),
            starts=np.array([row.num_computed for row in rows], np.int32),
            num_new_tokens=np.array(counts, np.int32),
            samples=np.array([row.num_computed + n == len(row.token_ids) for row, n in zip(rows, counts, strict=True)]),
            num_device_rows=num_device_rows,
            token_ids=np.array(token_ids, np.int32),
            block_table=self.table,
            bindings=tuple(row.binding for row in rows if row.is_new),
        )


MakePlayer = Callable[..., Player]


@pytest.fixture
def make_player(tmp_path: Path) -> MakePlayer:
    """A player over a runner of a fresh checkpoint; further arguments are options of `RunnerConfig`.

    One thread by default: tiny products only wait for a second.
    """

    def make(
        shape: Shape,
        dtype: str = "float32",
        num_slots: int = 8,
        block_size: int = 16,
        quantization: str = "none",
        cache_type: str = "auto",
        **runner: object,
    ) -> Player:
        path = write_checkpoint(tmp_path / f"{shape.head_dim}x{shape.num_heads}", shape)
        config = Config(
            model=ModelConfig(path=str(path), dtype=dtype, quantization=quantization),  # type: ignore[arg-type]
            cache=CacheConfig(block_size=block_size, dtype=cache_type),  # type: ignore[arg-type]
            runner=RunnerConfig(**{"device": "cpu", "num_threads": 1} | runner),  # type: ignore[arg-type]
        )
        return Player(load_runner(config, num_slots, lambda *_: None), num_slots, block_size)

    return make


def prompt_of(length: int, seed: int = 0, vocab_size: int = 131) -> list[int]:
    return [int(token_id) for token_id in np.random.default_rng(seed).integers(0, vocab_size, length)]
