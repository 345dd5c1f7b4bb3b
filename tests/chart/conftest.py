"""Helm as a fixture, one process for the whole session, and what it makes of each example."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import yaml

from tests.chart.helm_process import CHART, NEWEST, PYTHON, HelmProcess, Rendered
from tests.conftest import require_path

ExampleOf = Callable[..., Rendered]


@pytest.fixture(scope="session")
def helm() -> Iterator[HelmProcess]:
    require_path(PYTHON, "make chart")  # with Python 3.12
    with HelmProcess() as process:
        yield process


@pytest.fixture(scope="session")
def example(helm: HelmProcess) -> ExampleOf:
    """Name -> the release of `ci/<name>-values.yaml` on a Kubernetes of some version; each is rendered once."""

    @cache
    def render(name: str, version: str = NEWEST) -> Rendered:
        values = yaml.safe_load((CHART / "ci" / f"{name}-values.yaml").read_text())
        return helm.render(values, version=version)

    return render
