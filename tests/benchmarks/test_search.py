"""The search for tunings: what it measures runs, and what it found is found again by the engine."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
import torch

from tests.unit.model.triton_processes import Worker, interpreter_process

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed; the extra `test` has it")

CPU = torch.device("cpu")


def results() -> dict[str, dict[str, object]]:
    """Of a tiny shape, in a process that interprets kernels."""
    from benchmarks.gpu.search import TINY, search_decode, search_linear

    return {
        "decode": dict([search_decode(TINY, CPU, is_quick=True)]),
        "linear": dict([search_linear(TINY, CPU, is_quick=True)]),
    }


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Worker]:
    yield from interpreter_process()


def test_it_measures_the_rule_and_candidates(interpreter: Worker) -> None:
    found = interpreter.call(results)
    assert list(found["decode"]) == ["group 2, dim 32, bfloat16"], "of heads of 24, as the engine pads them"
    [decode], [linear] = found["decode"].values(), found["linear"].values()
    assert decode["share"] <= 1.0  # type: ignore[index]
    assert linear["best"] in {0, 4}  # type: ignore[index]


def test_what_it_writes_is_what_a_model_asks_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gpu import search
    from roseinfer.model.triton_kernels import tunings

    best = tunings.DecodeTuning(tile=128, min_split_keys=128, programs=4, num_warps=8)
    rows = {
        tunings.decode_key(1, dim, torch.bfloat16): {"best": msgspec.to_builtins(best), "is_rule": dim == 64}
        for dim in (64, 128)
    }
    entry = search.measured({"decode": rows, "linear": {tunings.linear_key(768, 768): {"best": 16}}})
    file = tmp_path / tunings.FILE_NAME
    file.write_text('{"Another": {}}')
    search.write("A GPU", entry, file)
    known = msgspec.json.decode(file.read_bytes(), type=dict[str, tunings.Tunings])
    assert set(known) == {"A GPU", "Another"}
    monkeypatch.setattr(tunings, "read_tunings", lambda: known)
    assert tunings.decode_tuning("A GPU", 1, 64, torch.bfloat16) == tunings.decode_rule(64)
    assert tunings.decode_tuning("A GPU", 1, 128, torch.bfloat16) == best
    assert tunings.linear_rows("A GPU", 768, 768, torch.bfloat16) == 16
    assert tunings.linear_rows("Another", 768, 768, torch.bfloat16) == tunings.MAX_LINEAR_ROWS
    assert tunings.linear_rows("A GPU", 768, 768, torch.float32) == 0
