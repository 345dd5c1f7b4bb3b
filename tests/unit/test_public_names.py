"""The package's public face: every name it promises is there, and importing it imports nothing heavy."""

import subprocess
import sys

import roseinfer


def test_every_promised_name_exists_and_others_do_not() -> None:
    for name in roseinfer.__all__:  # type: ignore[attr-defined]  # the stub lists the names themselves
        assert getattr(roseinfer, name) is not None
    assert not hasattr(roseinfer, "Scheduler")


def test_importing_the_package_is_cheap() -> None:
    probe = "import sys, roseinfer; print({'torch', 'aiohttp', 'numpy', 'msgspec'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
