"""The image, built once a session, and one container of it that tests share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.container import Container, running
from tests.deploy.image import ImageStore
from tests.repo.tree import ROOT


@pytest.fixture(scope="session")
def image_store() -> ImageStore:
    """In build/, so that the next session finds the images."""
    return ImageStore(ROOT / "build" / "image")


@pytest.fixture(scope="session")
def image(image_store: ImageStore) -> str:
    return image_store.build("cpu")


@pytest.fixture
def container(image_store: ImageStore, image: str, tmp_path: Path) -> Iterator[Container]:
    """A container of the image, not yet ready, with our load test in it as in deploy/compose."""
    config = image_store.config(image)
    folders = {"/loadtest": ROOT / "loadtest"}
    with (
        image_store.mounted(image) as root,
        running(config, root, tmp_path / "bundle", folders, ROSEINFER_RUNNER__NUM_THREADS="1") as started,
    ):
        yield started
