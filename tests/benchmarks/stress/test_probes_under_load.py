"""The probes of a server under its worst bodies: a row for each load, and no row for a load that died."""

import asyncio
import re
import subprocess
import sys
from typing import NoReturn

import pytest

from benchmarks.stress.probes_under_load import bodies, running

MAX_BODY_BYTES = 2 << 20


def test_bodies_are_as_long_as_they_may_be_or_ask_for_long_answers() -> None:
    asking = {"scored prompts", "log-probabilities", "tool calls"}
    lengths = {name: len(body) for name, (_, body) in bodies().items()}
    assert max(lengths.values()) <= MAX_BODY_BYTES
    assert min(length for name, length in lengths.items() if name not in asking) > MAX_BODY_BYTES // 2


async def test_a_client_that_dies_is_an_error() -> None:
    async def die() -> NoReturn:
        raise OSError("refused")

    with pytest.raises(OSError, match="refused"):
        async with running(asyncio.sleep(60), die()):
            await asyncio.sleep(0)


@pytest.mark.e2e
def test_a_probe_is_answered_while_long_bodies_come() -> None:
    options = ["--only", "unknown field", "--seconds", "1", "--streams", "1"]
    command = [sys.executable, "-m", "benchmarks.stress.probes_under_load", *options]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)
    row = re.search(r"\| unknown field \| \d+ × 400 \|(.*)\|", done.stdout)
    assert row, done.stdout
    figures_ms = [float(cell) for cell in row[1].split("|")]
    assert len(figures_ms) == 6
    # The aim is 100; machines that run tests are not alone, and the operations port's process is nicer than they are.
    assert max(figures_ms[:3]) < 2000
