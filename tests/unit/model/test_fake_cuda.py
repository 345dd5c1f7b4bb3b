"""What each kind of step asks of a GPU: launches, copies, and places where the host waits for the device; and no races.

`EXPECTED` is the one table of it. A change that makes a step do less fails the same test as one that makes it
do more, with the line that is now right.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.random_qwen3 import QWEN3_06B
from roseinfer.engine.core.batch import PooledRow, SampledTokens, ScheduledBatch, ScoredRow, SlotBinding, Watch
from roseinfer.engine.core.constraint import Constraint, Matcher, TokenMasks
from roseinfer.messages import Grammar, SamplingParams
from roseinfer.model.device import Placement
from roseinfer.model.device_stream import _PastEvent
from roseinfer.model.layers.linear import Linear
from roseinfer.model.steps.results import LaunchedBatch
from roseinfer.model.steps.warm_up_batches import _AnyToken, decode_batch, prompt_batch
from tests.unit.model.attention.test_flashinfer import install
from tests.unit.model.conftest import GREEDY, Shape
from tests.unit.model.driver import Ask, Driver, Plan
from tests.unit.model.fake_cuda import (
    CUDA,
    TAPE,
    FakeCudaStream,
    FakeGpu,
    Note,
    Work,
    cuda_process,
    write_hollow_checkpoint,
)
from tests.unit.model.triton_processes import Worker

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; the extra `test` has it")

NUM_SLOTS = 64
NUM_LAYERS = 2  # of all kinds but those whose nodes are counted for a model
PROMPT = np.zeros(128, np.int32)
START = 5  # the position of the decoding rows' first token

# Functions in which the host may wait, and why.
REASONS: dict[str, str] = {}

EXPECTED = {
    "greedy": Work(nodes=22, copies_in=1, copies_out=1),
    "drawn from all": Work(nodes=22, copies_in=1, copies_out=1),
    "top-k": Work(nodes=22, copies_in=1, copies_out=1),
    "top-p": Work(nodes=22, copies_in=1, copies_out=1),
    "min-p": Work(nodes=22, copies_in=1, copies_out=1),
    "min_tokens": Work(nodes=22, copies_in=1, copies_out=1),
    "log-probability": Work(nodes=22, copies_in=1, copies_out=1),
    "five log-probabilities": Work(nodes=22, copies_in=1, copies_out=1),
    "presence penalty": Work(nodes=22, copies_in=1, copies_out=1),
    "frequency penalty": Work(nodes=22, copies_in=1, copies_out=1),
    "repetition penalty": Work(nodes=22, copies_in=1, copies_out=1),
    "bias": Work(nodes=22, copies_in=1, copies_out=1),
    "more biases than a kernel takes": Work(triton=10, torch=48, copies_in=18, copies_out=1),
    "grammar": Work(nodes=22, copies_in=1, copies_out=1),
    "one of each": Work(nodes=22, copies_in=1, copies_out=1),
    "a greedy row joins": Work(nodes=22, torch=1, copies_in=1, copies_out=1),
    "a penalised row joins": Work(nodes=22, torch=5, copies_in=1, copies_out=1),
    "prompt": Work(nodes=27, torch=1, copies_in=1, copies_out=1),
    "prompt and rows": Work(nodes=27, torch=1, copies_in=1, copies_out=1),
    "part of a prompt and rows": Work(nodes=27, torch=1, copies_in=1, copies_out=1),
    "scored prompt": Work(triton=12, torch=66, copies_in=1, copies_out=1),
    "last row pooled": Work(triton=10, torch=20, copies_in=1, copies_out=1),
    "all rows pooled": Work(triton=10, torch=24, copies_in=1, copies_out=1),
    "greedy without graphs": Work(triton=10, torch=10, copies_in=1, copies_out=1),
    "drawn without graphs": Work(triton=10, torch=10, copies_in=1, copies_out=1),
    "log-probabilities without graphs": Work(triton=10, torch=10, copies_in=1, copies_out=1),
    "part of a prompt without graphs": Work(triton=10, torch=12, copies_in=1, copies_out=1),
    "grammar without graphs": Work(triton=10, torch=10, copies_in=2, copies_out=1),
    "batch-invariant": Work(nodes=24, copies_in=1, copies_out=1),
    "GPT-2 small, batch 1": Work(nodes=82, copies_in=1, copies_out=1),
    "GPT-2 small, batch 64": Work(nodes=82, copies_in=1, copies_out=1),
    "Qwen3-0.6B, batch 1": Work(nodes=234, copies_in=1, copies_out=1),
    "Qwen3-0.6B, batch 64": Work(nodes=234, copies_in=1, copies_out=1),
}


# --- kinds of steps ---------------------------------------------------------------------------------------------------

Steps = list[ScheduledBatch]  # the last is the one that is looked at; those before have bound slots and grown buffers


def bindings(params: SamplingParams, num_slots: int = NUM_SLOTS) -> tuple[SlotBinding, ...]:
    return tuple(SlotBinding(slot, params, 4, (0,), np.zeros(START, np.int32)) for slot in range(num_slots))


def decoding(params: SamplingParams = GREEDY, num_rows: int = NUM_SLOTS) -> Steps:
    steps = [decode_batch(num_rows, START + index) for index in range(3)]
    return [msgspec.structs.replace(steps[0], bindings=bindings(params)), *steps[1:]]


def joined(params: SamplingParams) -> Steps:
    """A row begins among others that have decoded before."""
    steps = [*decoding(params), decode_batch(NUM_SLOTS, START + 3)]
    return [*steps[:-1], msgspec.structs.replace(steps[-1], bindings=bindings(params, 1))]


def under_grammars() -> Steps:
    params = SamplingParams(temperature=0.0, grammar=Grammar("regex", ""))
    matcher: Future[Matcher] = Future()
    matcher.set_result(_AnyToken())
    steps = decoding(params)
    for index, step in enumerate(steps):
        constraint = Constraint(matcher, params, (), 50257)
        places = {(slot, START + index + 1): (constraint, 0) for slot in range(NUM_SLOTS)}
        steps[index] = msgspec.structs.replace(step, masks=TokenMasks(places))
    return steps


def one_of_each() -> Steps:
    first, *rest = decoding()
    kinds = [*SAMPLING.values()]
    of_slots = tuple(
        SlotBinding(slot, kinds[slot % len(kinds)], 4, (0,), np.zeros(START, np.int32)) for slot in range(NUM_SLOTS)
    )
    return [msgspec.structs.replace(first, bindings=of_slots), *rest]


def prompt(**fields: Any) -> Steps:
    step = prompt_batch(len(PROMPT), 1023, NUM_SLOTS)
    first = msgspec.structs.replace(step, bindings=bindings(GREEDY))
    return [first, step, msgspec.structs.replace(step, **fields)]


def mixed(*, samples: bool) -> Steps:
    """Eight rows decode beside a chunk of a prompt, which ends or goes on."""
    counts = np.array([1] * 8 + [len(PROMPT)], np.int32)
    step = ScheduledBatch(
        step_id=0,
        slots=np.arange(9, dtype=np.int32),
        starts=np.array([START] * 8 + [0], np.int32),
        num_new_tokens=counts,
        samples=np.array([True] * 8 + [samples]),
        num_device_rows=8,
        token_ids=PROMPT,
        block_table=np.tile(np.arange(64, dtype=np.int32), (NUM_SLOTS, 1)),
        bindings=(),
    )
    return [msgspec.structs.replace(step, bindings=bindings(GREEDY)), step, step]


SAMPLING = {
    "greedy": GREEDY,
    "drawn from all": SamplingParams(temperature=0.8, seed=1),
    "top-k": SamplingParams(top_k=50, seed=1),
    "top-p": SamplingParams(top_p=0.9, seed=1),
    "min-p": SamplingParams(min_p=0.1, seed=1),
    "min_tokens": SamplingParams(temperature=0.0, min_tokens=16),
    "log-probability": SamplingParams(temperature=0.0, num_logprobs=0),
    "five log-probabilities": SamplingParams(temperature=0.0, num_logprobs=5),
    "presence penalty": SamplingParams(temperature=0.0, presence_penalty=0.5),
    "frequency penalty": SamplingParams(temperature=0.0, frequency_penalty=0.5),
    "repetition penalty": SamplingParams(temperature=0.0, repetition_penalty=1.1),
    "bias": SamplingParams(temperature=0.0, logit_bias={3: 1.0, 9: -100.0}),
}

# No kernel edits such logits: there is no room for so many biases in the table that it reads.
MANY_BIASES = SamplingParams(presence_penalty=0.5, logit_bias=dict.fromkeys(range(1100), 1.0), top_k=50, seed=1)

KINDS: dict[str, Callable[[], Steps]] = {
    **{name: lambda params=params: decoding(params) for name, params in SAMPLING.items()},  # type: ignore[misc]
    "more biases than a kernel takes": lambda: decoding(MANY_BIASES, 4),
    "grammar": under_grammars,
    "one of each": one_of_each,
    "a greedy row joins": lambda: joined(GREEDY),
    "a penalised row joins": lambda: joined(SAMPLING["presence penalty"]),
    "prompt": prompt,
    "prompt and rows": lambda: mixed(samples=True),
    "part of a prompt and rows": lambda: mixed(samples=False),
    "scored prompt": lambda: prompt(scored=(ScoredRow(0, PROMPT, 2),)),
    "last row pooled": lambda: prompt(pooled=(PooledRow(0, "last"),)),
    "all rows pooled": lambda: prompt(pooled=(PooledRow(0, "mean"),)),
}


# --- in the process of its own ----------------------------------------------------------------------------------------


def gpt2(directory: Path, num_layers: int) -> Path:
    """GPT-2 small, with `num_layers` layers."""
    shape = Shape(head_dim=64, num_heads=12, num_layers=num_layers, vocab_size=50257, num_positions=1024)
    return write_hollow_checkpoint(directory / f"gpt2_{num_layers}", shape.config(), shape.shapes())


def qwen3(directory: Path) -> Path:
    """Qwen3-0.6B."""
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"} | QWEN3_06B
    width, inner = config["hidden_size"], config["intermediate_size"]
    head = config["head_dim"]
    q, kv = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    of_layer = {
        **{f"self_attn.{name}_proj": (size, width) for name, size in (("q", q), ("k", kv), ("v", kv))},
        **{f"self_attn.{name}_norm": (head,) for name in "qk"},
        **{f"mlp.{name}_proj": (inner, width) for name in ("gate", "up")},
        "self_attn.o_proj": (width, q),
        "mlp.down_proj": (width, inner),
        **{f"{name}_layernorm": (width,) for name in ("input", "post_attention")},
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], width)}
    for layer in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in of_layer.items()}
    return write_hollow_checkpoint(directory / "qwen3", config, shapes | {"model.norm.weight": (width,)})


def notes_of_kinds(directory: Path) -> dict[str, list[Note]]:
    small = gpt2(directory, NUM_LAYERS)
    gpu, eager = FakeGpu(small, NUM_SLOTS), FakeGpu(small, NUM_SLOTS, cuda_graphs="off")
    invariant = FakeGpu(small, NUM_SLOTS, batch_invariant=True)
    found = {kind: gpu.notes_of(make()) for kind, make in KINDS.items()}
    found["greedy without graphs"] = eager.notes_of(decoding())
    found["drawn without graphs"] = eager.notes_of(decoding(SAMPLING["drawn from all"]))
    found["log-probabilities without graphs"] = eager.notes_of(decoding(SAMPLING["five log-probabilities"]))
    found["part of a prompt without graphs"] = eager.notes_of(prompt(samples=np.zeros(1, np.bool_)))
    found["grammar without graphs"] = eager.notes_of(under_grammars())
    found["batch-invariant"] = invariant.notes_of(decoding())
    for name, model in (("GPT-2 small", gpt2(directory, 12)), ("Qwen3-0.6B", qwen3(directory))):
        whole = FakeGpu(model, NUM_SLOTS)
        found |= {f"{name}, batch {count}": whole.notes_of(decoding(num_rows=count)) for count in (1, NUM_SLOTS)}
    return found


@pytest.fixture(scope="module")
def cuda(kernels_dir: Path) -> Iterator[Worker]:
    yield from cuda_process(kernels_dir)


@pytest.fixture(scope="module")
def notes(cuda: Worker, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Note]]:
    """Of each kind of step."""
    return cuda.call(notes_of_kinds, tmp_path_factory.mktemp("hollow"))


# --- what is found ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EXPECTED)
def test_what_a_step_asks_for(notes: dict[str, list[Note]], kind: str) -> None:
    found = Work.of(notes[kind])
    told = "\n  ".join(str(note) for note in notes[kind] if note.kind in {"in", "out", "wait"})
    assert found == EXPECTED[kind], f"now it is\n    {kind!r}: {found},\n  {told}"


def test_a_step_of_gpt2_is_at_most_85_nodes() -> None:
    assert max(EXPECTED[f"GPT-2 small, batch {batch}"].nodes for batch in (1, NUM_SLOTS)) <= 85


def test_every_kind_is_expected_and_every_wait_has_a_reason(notes: dict[str, list[Note]]) -> None:
    assert set(EXPECTED) == set(notes)
    assert {function for work in EXPECTED.values() for function in work.waits} == set(REASONS)


# --- it can fail ------------------------------------------------------------------------------------------------------


def reads_a_number(logits: torch.Tensor) -> torch.Tensor:
    return logits * (2 if logits.isnan().any() else 1)


def masks_by_booleans(logits: torch.Tensor) -> torch.Tensor:
    return logits[logits.isfinite().all(1)]


def puts_a_number(logits: torch.Tensor) -> torch.Tensor:
    logits[torch.zeros(2, dtype=torch.int64, device=logits.device)] = 0.0
    return logits


def copies_from_pages(logits: torch.Tensor) -> torch.Tensor:
    return logits + torch.from_numpy(np.ones(1, np.float32)).to(logits.device, non_blocking=True)


def copies_in_time(logits: torch.Tensor) -> torch.Tensor:
    return logits + torch.ones(1).pin_memory().to(logits.device)


def waits_for_an_event(logits: torch.Tensor) -> torch.Tensor:
    event = FakeCudaStream(logits.device, is_pinned=True).new_event()
    event.record()
    event.synchronize()
    return logits


def asks_nothing(logits: torch.Tensor) -> torch.Tensor:
    return logits + torch.ones(1).pin_memory().to(logits.device, non_blocking=True)


PLANTED = [reads_a_number, masks_by_booleans, puts_a_number, copies_from_pages, copies_in_time, waits_for_an_event]


def notes_with(directory: Path, planted: Callable[[torch.Tensor], torch.Tensor], cuda_graphs: str) -> list[Note]:
    gpu = FakeGpu(gpt2(directory, 1), NUM_SLOTS, cuda_graphs=cuda_graphs)
    logits = gpu.runner._model.logits
    gpu.runner._model.logits = lambda hidden: planted(logits(hidden))  # type: ignore[method-assign]
    return gpu.notes_of(decoding())


@pytest.mark.parametrize("planted", PLANTED)
def test_a_planted_wait_is_found_where_it_is(cuda: Worker, tmp_path: Path, planted: Callable[..., Any]) -> None:
    found = [note for note in cuda.call(notes_with, tmp_path, planted, "off") if note.kind == "wait"]
    assert [note.function for note in found] == [f"unit/model/test_fake_cuda.py:{planted.__name__}"]
    first = planted.__code__.co_firstlineno
    assert first < found[0].line <= first + 4


@pytest.mark.parametrize("planted", [*PLANTED, asks_nothing])
def test_no_graph_can_hold_it(cuda: Worker, tmp_path: Path, planted: Callable[..., Any]) -> None:
    with pytest.raises(RuntimeError, match=rf"not permitted when stream is capturing.* in {planted.__name__}"):
        cuda.call(notes_with, tmp_path, planted, "lazy")


def test_an_asynchronous_copy_is_no_wait(cuda: Worker, tmp_path: Path) -> None:
    found = Work.of(cuda.call(notes_with, tmp_path, asks_nothing, "off"))
    assert (found.waits, found.copies_in) == ((), 1 + EXPECTED["greedy without graphs"].copies_in)


def head_of(directory: Path) -> tuple[torch.dtype, int, int]:
    """The type of GPT-2's logits, how many a row has, and how far apart rows lie."""
    gpu, found = FakeGpu(gpt2(directory, 1), NUM_SLOTS, cuda_graphs="off"), list[torch.Tensor]()
    logits = gpu.runner._model.logits

    def noted(hidden: torch.Tensor) -> torch.Tensor:
        found.append(logits(hidden))
        return found[-1]

    gpu.runner._model.logits = noted  # type: ignore[method-assign]
    gpu.notes_of(decoding())
    return found[-1].dtype, found[-1].shape[1], found[-1].stride(0)


def test_rows_of_logits_are_aligned_and_not_rounded(cuda: Worker, tmp_path: Path) -> None:
    """GPT-2's in bfloat16 would be up to half a unit apart, and 50,257 numbers are no multiple of a vector's."""
    assert cuda.call(head_of, tmp_path) == (torch.float32, 50257, 50304)


def biased_head() -> tuple[torch.dtype, int, int]:
    """As `head_of`, of a head alone."""
    with TAPE.running():
        weight, bias = torch.ones(50, 64), torch.ones(50)
        head = Linear(weight, bias, Placement(CUDA, torch.bfloat16), dtype=torch.float32)
        logits = head(torch.zeros(3, 64, dtype=torch.bfloat16, device=CUDA))
    return logits.dtype, logits.shape[1], logits.stride(0)


def test_a_head_may_have_a_bias(cuda: Worker) -> None:
    """As Phi-2's has."""
    assert cuda.call(biased_head) == (torch.float32, 50, 64)


def mixes_host_and_device() -> str:
    with TAPE.running(), pytest.raises(RuntimeError) as refusal:
        torch.ones(2, device=CUDA).add_(torch.ones(2))
    return str(refusal.value)


def test_host_and_device_do_not_mix(cuda: Worker) -> None:
    assert "two devices, cuda:0 and cpu" in cuda.call(mixes_host_and_device)


# --- races ------------------------------------------------------------------------------------------------------------


class CheckedRunner:
    """A runner whose tokens must be those that were copied for the step."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def launch(self, batch: ScheduledBatch, watch: Watch) -> "CheckedLaunch":
        return CheckedLaunch(self._gpu.launch(batch), TAPE.num_fetched)


class CheckedLaunch:
    def __init__(self, launched: LaunchedBatch, token_id: int) -> None:
        self._launched = launched
        self._token_id = token_id
        self.graph_rows, self.h2d_bytes = launched.graph_rows, launched.h2d_bytes

    def wait(self) -> SampledTokens:
        sampled = self._launched.wait()
        if (sampled.token_ids != self._token_id).any():
            TAPE.note("race", "tokens were read before they had come, or when others had")
        return sampled


class PlannedWrapper:
    """FlashInfer's, which writes each plan to the same pinned memory."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._plan = TAPE.pin(torch.zeros(8, dtype=torch.int32))
        self._on_device = torch.zeros(8, dtype=torch.int32, device=CUDA)

    def plan(self, *_: Any, **__: Any) -> None:
        self._plan.add_(1)
        self._on_device.copy_(self._plan, non_blocking=True)

    def run(self, *_: Any, out: torch.Tensor) -> None:
        TAPE.note("triton", "flashinfer")


def races_of(directory: Path, spoil: Callable[[FakeGpu], None], **options: Any) -> set[tuple[str, str]]:
    """Of requests of several kinds, a step ahead: what, and where it was seen. `options` are the runner's."""
    install(PlannedWrapper)
    TAPE.notes.clear()
    gpu = FakeGpu(gpt2(directory, 1), 8, **options)
    spoil(gpu)
    kinds = {"greedy": 9, "drawn from all": 9, "log-probability": 2, "presence penalty": 2}
    asks = [Ask([7] * (3 * num_tokens), num_tokens, SAMPLING[kind]) for kind, num_tokens in kinds.items()]
    driver = Driver(CheckedRunner(gpu), gpu.runner.info, 8, Plan(seed=2, depth=1, chunk=15, preempt_every=6))
    driver.generate(asks)
    return {(note.what, note.function) for note in TAPE.notes if note.kind == "race"}


def spoil_nothing(gpu: FakeGpu) -> None: ...


EAGER = {"attention": "flashinfer", "cuda_graphs": "off"}


@pytest.mark.parametrize("options", [{}, EAGER], ids=["graphs", "eager"])
def test_no_step_races_with_its_copies(cuda: Worker, tmp_path: Path, options: dict[str, Any]) -> None:
    assert cuda.call(races_of, tmp_path, spoil_nothing, **options) == set()


def spoil_arenas(gpu: FakeGpu) -> None:
    """Write an arena without waiting for the copy out of it."""
    for arena in gpu.runner._staging.arenas._arenas:
        object.__setattr__(arena, "event", _PastEvent())


def spoil_results(gpu: FakeGpu) -> None:
    """Read tokens without waiting for them."""
    gpu.runner._results._buffers = [(buffer, _PastEvent()) for buffer, _ in gpu.runner._results._buffers]


def spoil_table(gpu: FakeGpu) -> None:
    """Keep a table in pinned memory, and write it while the step before may still read it."""
    with TAPE.running():
        table, on_device = TAPE.pin(torch.zeros(8)), torch.zeros(8, device=CUDA)
    bind = gpu.runner._bind

    def write(bindings: Iterable[SlotBinding]) -> None:
        bind(bindings)
        table.add_(1)
        on_device.copy_(table, non_blocking=True)

    gpu.runner._bind = write  # type: ignore[method-assign]


def spoil_plans(gpu: FakeGpu) -> None:
    """Write the plan of each step over that of the step before."""
    from roseinfer.model.attention.flashinfer import FlashInferAttention

    attention = gpu.runner._attention
    assert isinstance(attention, FlashInferAttention)
    attention._turns = [{None: attention._turns[0][None]._replace(planned=_PastEvent())}] * 2


WRITTEN = "memory was written before its copy has run, which was queued by"


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (spoil_arenas, f"{WRITTEN} model/steps/arenas.py:Arenas.send"),
        (spoil_results, "tokens were read before they had come, or when others had"),
        (spoil_table, f"{WRITTEN} unit/model/test_fake_cuda.py:spoil_table.<locals>.write"),
        (spoil_plans, f"{WRITTEN} unit/model/test_fake_cuda.py:PlannedWrapper.plan"),
    ],
)
def test_a_planted_race_is_found(cuda: Worker, tmp_path: Path, spoil: Callable[[FakeGpu], None], found: str) -> None:
    options = EAGER if spoil is spoil_plans else {}
    assert {what for what, _ in cuda.call(races_of, tmp_path, spoil, **options)} == {found}
