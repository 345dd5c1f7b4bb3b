"""Helm as a fixture, one process for the whole session, and what it makes of each example."""

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import yaml

from tests.chart.helm_process import CHART, NEWEST, PYTHON, HelmProcess, Rendered
from tests.conftest import requires_all

ExampleOf = Callable[..., Rendered]


@pytest.fixture(scope="session")
def helm() -> Iterator[HelmProcess]:
    if not PYTHON.exists():
        reason = "there is no build/helm-venv; `make chart` sets it up, with Python 3.12"
        if requires_all():
            pytest.fail(reason)
        pytest.skip(reason)
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
