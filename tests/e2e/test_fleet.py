"""The rehearsal of docs/fleet.md in short: nginx, a picker that hears the engines' events, and two real replicas."""

from pathlib import Path

import pytest

from benchmarks.fleet import ARMS, Load, cached_share, fleet
from tests.conftest import require_tool

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

# Twelve prefixes of 16 blocks. A replica's cache has room for eight of them, so for those that the picker sends it.
LOAD = Load(num_requests=96, rate=48, num_prefixes=12, prefix_tokens=256, own_tokens=20, answer_tokens=4)
NUM_BLOCKS = 160


def test_a_picker_that_hears_of_blocks_finds_more_of_them_than_taking_turns(tmp_path: Path) -> None:
    with fleet(tmp_path, require_tool("nginx"), NUM_BLOCKS) as ready:
        in_turn, picked = (cached_share(ready.send(arm, LOAD, seed=1)) for arm in ARMS)
        counts = ready.num_picked()
    assert sum(counts) == LOAD.num_requests, "only those that came to the picker's door"
    assert min(counts) > 0, "nor does it send all to one; how many go to which, chance decides with the first prefixes"
    assert picked > in_turn + 0.1
