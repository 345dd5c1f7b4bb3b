"""Turns an image's own configuration into a running container, with runc. Knows nothing of how the image was built.

It is run as a cluster with the restricted security profile would: as the image's user, the root read-only, `/tmp` and
`/dev/shm` in memory, no capability and no way to gain one. Its network is its own loopback, so what talks to it runs
inside of it.
"""

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.conftest import require_tool

START_TIMEOUT_S = 180.0
EXIT_TIMEOUT_S = 90.0
NAMESPACES = ("pid", "mount", "ipc", "uts", "network")


class Container:
    """One running container."""

    def __init__(self, bundle: Path, log_path: Path) -> None:
        self.log_path = log_path
        # Rootless: it is started without a control group, whose files a build machine may keep to itself.
        self._runc = [require_tool("runc"), "--rootless=true", "--root", str(bundle / "state")]
        with log_path.open("wb") as log:
            command = [*self._runc, "run", "--bundle", str(bundle), "server"]
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        while not (bundle / "state" / "server" / "state.json").exists():  # until then runc knows no such container
            assert self.process.poll() is None, log_path.read_text()
            time.sleep(0.01)

    def execute(self, *command: str) -> "subprocess.CompletedProcess[str]":
        """Run a program in the container, as the container's user."""
        return subprocess.run([*self._runc, "exec", "server", *command], capture_output=True, text=True, check=False)

    def wait_until_succeeds(self, *command: str) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.execute(*command).returncode:
            assert self.process.poll() is None, self.log_path.read_text()
            assert time.monotonic() < deadline, self.log_path.read_text()
            time.sleep(0.2)

    def signal(self, name: str) -> None:
        subprocess.run([*self._runc, "kill", "server", name], check=True)

    def wait(self) -> int:
        """The exit code of the container's first process."""
        return self.process.wait(EXIT_TIMEOUT_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.signal("KILL")
            self.wait()


@contextmanager
def running(
    image: dict[str, Any], root: Path, bundle: Path, folders: dict[str, Path], **environment: str
) -> Iterator[Container]:
    """Run the image's entry point on its default arguments, with these variables besides its own.

    `folders` of ours are mounted at the paths that are their keys, for reading.
    """
    bundle.mkdir()
    config = runtime_config(image, root, environment)
    config["mounts"] += [
        {"destination": target, "type": "bind", "source": str(source), "options": ["bind", "ro"]}
        for target, source in folders.items()
    ]
    (bundle / "config.json").write_text(json.dumps(config))
    container = Container(bundle, bundle / "log")
    try:
        yield container
    finally:
        container.close()


def runtime_config(image: dict[str, Any], root: Path, environment: dict[str, str]) -> dict[str, Any]:
    """A config.json of the OCI runtime specification."""
    user, _, group = image["User"].partition(":")
    return {
        "ociVersion": "1.0.2",
        "root": {"path": str(root), "readonly": True},
        "process": {
            "user": {"uid": int(user), "gid": int(group)},
            "args": [*image["Entrypoint"], *image["Cmd"]],
            "env": [*image["Env"], *(f"{name}={value}" for name, value in environment.items())],
            "cwd": image["WorkingDir"],
            "capabilities": {"bounding": [], "effective": [], "permitted": []},
            "noNewPrivileges": True,
        },
        "mounts": [
            {"destination": "/proc", "type": "proc", "source": "proc"},
            {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
            {"destination": "/dev/shm", "type": "tmpfs", "source": "shm", "options": ["nosuid", "mode=1777"]},  # noqa: S108
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=1777"]},  # noqa: S108
        ],
        "linux": {"namespaces": [{"type": name} for name in NAMESPACES]},
    }
