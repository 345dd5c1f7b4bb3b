"""Numbers on their way to a device: the host does not wait for earlier work of the device."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from roseinfer.engine.core.batch import SlotBinding
from roseinfer.messages import SamplingParams
from roseinfer.model.device_stream import TRACE_NAME, Outbox, TorchProfiler, fetched_together, to_device
from roseinfer.model.sampling.edit_table import BARRED, BIAS_SHIFT, KNOWN, EditTable
from roseinfer.model.sampling.logit_edits import Penalties
from roseinfer.model.sampling.sampler import Sampler

DEVICE = torch.device("meta")  # one that is not the CPU, and computes shapes only


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Whether the host waits, for each copy from its memory to `DEVICE`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.waits: list[bool] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = function._schema.name
        if name == "aten::_to_copy" and args[0].device.type == "cpu" and kwargs["device"] == DEVICE:
            self.waits.append(not kwargs.get("non_blocking", False))
        if name == "aten::copy_" and args[0].device == DEVICE and args[1].device.type == "cpu":
            self.waits.append(not (args[2:] or (kwargs.get("non_blocking", False),))[0])
        return function(*args, **kwargs)


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What was pinned; a torch without CUDA cannot."""
    tensors: list[torch.Tensor] = []

    def pin_memory(tensor: torch.Tensor) -> torch.Tensor:
        tensors.append(tensor.clone())
        return tensors[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    return tensors


def test_a_cpu_reads_the_array_itself(pinned: list[torch.Tensor]) -> None:
    array = np.arange(3)
    assert to_device(array, torch.device("cpu")).data_ptr() == array.ctypes.data
    assert not pinned


def test_a_copy_to_a_gpu_is_queued_from_pinned_memory(pinned: list[torch.Tensor]) -> None:
    with Copies() as copies:
        on_device = to_device(np.arange(3), DEVICE)
    assert on_device.device == DEVICE
    assert [tensor.tolist() for tensor in pinned] == [[0, 1, 2]]
    assert copies.waits == [False]


def test_what_is_fetched_together_is_what_it_was() -> None:
    numbers = torch.arange(12, dtype=torch.float32)
    tensors = [numbers[:3], torch.tensor([2**40, -1]), numbers.view(3, 4).T, numbers[:0].view(3, 0), numbers.bfloat16()]
    for fetched, tensor in zip(fetched_together(tensors), tensors, strict=True):
        assert fetched.dtype == tensor.dtype
        assert torch.equal(fetched, tensor)


def test_penalties_are_bound_without_waiting(pinned: list[torch.Tensor]) -> None:
    """A request that joins a batch does not hold up the step that is on its way."""
    params = SamplingParams(presence_penalty=1.0, max_tokens=2, logit_bias={3: 1.5, 9: -100.0})
    outbox = Outbox(DEVICE)
    binding = SlotBinding(0, params, 2, (), np.array([7, 8, 8], np.int32))
    with Copies() as copies:
        assert Penalties(DEVICE, outbox=outbox).bind(binding)
        EditTable(1, 20, 8, DEVICE, outbox).bind(binding, np.array([4]))
        assert not pinned
        outbox.flush()
    words = [KNOWN, KNOWN | 1, KNOWN | 1, BARRED, 1 << BIAS_SHIFT, 2 << BIAS_SHIFT]
    [sent] = pinned
    assert sent[:3].tolist() == [7, 8, 8]
    assert sent[4:16].view(torch.int64).tolist() == [7, 8, 8, 4, 3, 9]
    assert sent[16:22].tolist() == words
    assert sent[22:24].view(torch.float32).tolist() == [1.5, -100.0]
    assert copies.waits == [False]


def test_what_waits_is_used_in_its_order_and_once() -> None:
    outbox, used = Outbox(DEVICE), list[list[object]]()

    def note(*parts: torch.Tensor) -> None:
        used.append([part.tolist() for part in parts])

    outbox.put(note, np.array([1, 2, 3], np.int32))
    outbox.put(note, np.array([2**40, -1]), np.array([0.5], np.float32))
    words = np.zeros(outbox.num_words, np.int32)
    outbox.write(words)
    assert not used
    outbox.use(torch.from_numpy(words))
    assert used == [[[1, 2, 3]], [[2**40, -1], [0.5]]]
    assert outbox.num_words == 0
    outbox.flush()
    assert len(used) == 2


def test_a_cpu_uses_it_at_once() -> None:
    outbox, used = Outbox(torch.device("cpu")), list[object]()
    outbox.put(lambda part: used.append(part.tolist()), np.array([1, 2], np.int32))
    assert used == [[1, 2]]
    assert outbox.num_words == 0


KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(seed=1),
    SamplingParams(seed=2, presence_penalty=1.0, logit_bias={3: 1.0}),
    SamplingParams(temperature=0.0, min_tokens=5, stop_token_ids=(4,)),
    SamplingParams(temperature=0.0, num_logprobs=2),
)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_step_is_sampled_without_waiting(
    backend: str, pinned: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In torch all kinds but rows that draw among the likeliest tokens: there the host decides how many to look at."""
    kinds: tuple[SamplingParams, ...] = KINDS
    if backend == "triton":
        kinds = (*KINDS, SamplingParams(seed=3, top_k=20, top_p=0.8, min_p=0.1))
    sampler = Sampler(len(kinds), 300, DEVICE)
    if backend == "triton":
        if find_spec("triton") is None:
            pytest.skip("triton is not installed; the extra `test` has it")
        from roseinfer.model.triton_kernels import sampling as kernels

        monkeypatch.setattr(kernels, "choose", lambda logits, slots, *_, **__: torch.empty_like(slots))
        sampler._use_triton(max_model_len=40)
    for slot, params in enumerate(kinds):
        sampler.bind(SlotBinding(slot, params, 3, (), np.array([7, 8, 8], np.int32)))
    pinned.clear()
    slots = np.arange(len(kinds), dtype=np.int32)
    with Copies() as copies:
        tokens, logprobs = sampler.sample(torch.empty(len(kinds), 300, device=DEVICE), slots, slots * 0 + 3)
    assert tokens.shape == (len(kinds),)
    assert logprobs is not None
    assert len(copies.waits) == len(pinned) > 0
    assert not any(copies.waits)


def test_a_trace_that_torch_did_not_write_is_an_error_and_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk torch writes what it can of `trace.json.tmp`, logs that it failed, and raises nothing."""

    def fail(_: object, path: str) -> None:
        Path(f"{path}.tmp").write_bytes(b"{")

    monkeypatch.setattr(torch.autograd.profiler.profile, "export_chrome_trace", fail)
    profiler = TorchProfiler("cpu")
    profiler.start()
    with pytest.raises(OSError, match="could not write"):
        profiler.stop(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_the_trace_holds_what_ran_between_start_and_stop(tmp_path: Path) -> None:
    profiler, ones = TorchProfiler("cpu"), torch.ones(4, 4)
    torch.relu(ones)
    for number, operator in enumerate((torch.tanh, torch.sigmoid)):
        profiler.start()
        operator(ones)
        profiler.stop(tmp_path / str(number))
    for number, (name, other) in enumerate([("aten::tanh", "aten::sigmoid"), ("aten::sigmoid", "aten::tanh")]):
        trace = json.loads((tmp_path / str(number) / TRACE_NAME).read_text())
        names = {event.get("name") for event in trace["traceEvents"]}
        assert name in names
        assert not {other, "aten::relu"} & names
