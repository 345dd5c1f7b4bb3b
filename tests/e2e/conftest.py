"""A server for every test that only asks, and one of its own for each test that harms it."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.server import Server, running

StartServer = Callable[..., Server]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that tests share; they leave it idle."""
    with running(tmp_path_factory.mktemp("server") / "log") as shared:
        yield shared


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    """Start a server for this test alone, with more arguments if need be."""
    with ExitStack() as stack:

        def start(*arguments: str) -> Server:
            return stack.enter_context(running(tmp_path / "log", *arguments))

        yield start
