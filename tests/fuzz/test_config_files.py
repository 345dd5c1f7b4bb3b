"""Whatever a configuration file holds, it is a configuration or one sentence that names the place: nothing else."""

from functools import partial
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from roseinfer.config.options import options
from roseinfer.config.sources import load
from roseinfer.errors import ConfigError
from tests.fuzz.mutations import check_each, corpus, mutated

NUM_MUTATIONS = 300
KEPT = corpus("config")


def check(file: Path, content: bytes) -> bool:
    """The property; whether it was taken."""
    file.write_bytes(content)
    try:
        load(file=file)
    except ConfigError as error:
        param, message = error.param, error.message
        assert param
        assert len(message) < 2000, message[:300]
        return False
    return True


@pytest.mark.parametrize(("name", "content"), KEPT, ids=[name for name, _ in KEPT])
def test_the_kept_ones(tmp_path: Path, name: str, content: bytes) -> None:
    assert check(tmp_path / "config.yaml", content) == name.startswith("good")


def test_ones_like_them(tmp_path: Path) -> None:
    check_each(
        mutated([content for _, content in KEPT], NUM_MUTATIONS, seed=1), partial(check, tmp_path / "config.yaml")
    )


SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10) | st.dates() | st.binary(max_size=5)
)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=5), SCALARS, max_size=3)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(sorted(options())), VALUES)
def test_any_value_of_any_option(tmp_path: Path, path: str, value: object) -> None:
    section, name = path.split(".")
    check(tmp_path / "config.yaml", yaml.safe_dump({section: {name: value}}).encode())
