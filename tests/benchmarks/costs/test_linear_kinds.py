"""Which ways to multiply a processor has."""

import pytest
import torch

from benchmarks.costs import linear_kinds


def test_without_kernels_the_kinds_are_those_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_kinds, "load_kernels", lambda _: None)
    kinds = linear_kinds.kinds()
    assert list(kinds) == ["oneDNN float32", "oneDNN bfloat16", "torch int8"]
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    for kind in kinds.values():
        rows = torch.ones(2, 16, dtype=kind.at.dtype)
        torch.testing.assert_close(
            kind.build(kind.at, weight)(rows).float(), rows.float() @ weight.T, atol=0.2, rtol=0.05
        )
